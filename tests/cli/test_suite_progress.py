"""A suite on a terminal: a bar for the whole and for each run at work, and a line for each that ended."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from rich.console import Console

from calfat_plugin.cli.suite import SuiteProgress
from calfat_plugin.progress import Bars, Lines


def test_bars_of_runs_come_and_go() -> None:
    first, second = (
        SimpleNamespace(
            name=f"CalFAT seed {seed}",
            directory=Path("runs"),
            output=Path("seed.txt"),
            state="new",
            lacks=(),
            experiment=SimpleNamespace(num_rounds=4),
        )
        for seed in (0, 1)
    )
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, _environ={})
    pictures, now = [], [0.0]
    clock = patch("calfat_plugin.progress.time", SimpleNamespace(perf_counter=lambda: now[0]))
    with patch("rich.live._RefreshThread"), clock, Bars(console) as bars:
        progress = SuiteProgress(bars, 4)
        events: list[tuple[Any, ...]] = [
            (progress.run_started, first, 0),
            (progress.run_started, second, 0),
            (progress.run_progress, first, 2),
            (progress.run_said, first, "round 3: 50 % done"),
            (
                progress.run_ended,
                SimpleNamespace(**{**vars(first), "state": "failed", "message": "no data", "seconds": 75.0}),
            ),
        ]
        for call, *arguments in events:
            now[0] += 20.0
            call(*arguments)
            before = len(stream.getvalue())
            bars._live.refresh()
            pictures.append(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[━╸╺]+", "", stream.getvalue()[before:]).split("\n"))
    drawn = [[" ".join(line.split()) for line in picture] for picture in pictures]
    assert drawn[1] == ["CalFAT seed 0 starting", "CalFAT seed 1 starting"]
    assert drawn[2][0] == "CalFAT seed 0 round 2/4 ETA 0:40"
    assert drawn[2][2].startswith("suite 0/4 runs ETA ")
    assert drawn[3][0] == "CalFAT seed 0 round 3: 50 % done"
    assert drawn[4] == ["CalFAT seed 1 starting", "suite 1/4 runs ETA 5:00"]
    assert "[1/4] CalFAT seed 0: failed after 1:15: no data  (seed.txt)" in stream.getvalue()
    assert "running CalFAT" not in stream.getvalue()


def test_what_runs_say_of_their_data_is_shown_once() -> None:
    errors = io.StringIO()
    progress = SuiteProgress(Lines(io.StringIO(), errors), 2)
    for seed in (0, 1):
        run: Any = SimpleNamespace(name=f"CalFAT seed {seed}")
        progress.run_said(run, f"warning: seed-{seed}.yaml:3: data_args.dataset: 3 of 9 test images are black.")
        progress.run_said(run, "warning: round 1: alarm.")
    progress.run_said(run, "warning: seed-1.yaml:3: data_args.dataset: 4 of 9 test images are black.")
    assert errors.getvalue().splitlines() == [
        "warning: CalFAT seed 0: data_args.dataset: 3 of 9 test images are black.",
        "warning: CalFAT seed 1: data_args.dataset: 4 of 9 test images are black.",
    ]
