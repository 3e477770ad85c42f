"""Plugins and observers hear of a run's life in order, with what they need, when it is on disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from calfat_plugin import disk
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.host.runtimes import Runtime
from calfat_plugin.host.tasks import ServerTask
from calfat_plugin.observer import RunObserver
from calfat_plugin.recipe import read_document
from calfat_plugin.registry import Registry
from calfat_plugin.results import EvaluationResult, RoundRecord, RunInfo, RunResult
from calfat_plugin.runs import session
from calfat_plugin.runs.checkpoints import load_checkpoint
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import Request
from calfat_plugin.runs.session import run
from tests.report.made import record
from tests.runs.mortals import FailOnWarning
from tests.runs.processes import SABOTEUR, TIMEOUT
from tests.runs.remains import read_rows


class Listener:
    """A plugin that notes what it hears, and what is on disk at that moment."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    @hookimpl
    def calfat_run_started(self, run: RunInfo) -> None:
        self.run = run
        self.heard.append(("started", (run.start_round, run.num_rounds)))

    @hookimpl
    def calfat_round_finished(self, run: RunInfo, record: RoundRecord) -> None:
        assert run is self.run
        rows = len(read_rows(run.directory / "rounds.csv"))
        snapshot, _ = load_checkpoint(run.directory / "checkpoints" / "last.safetensors")
        self.heard.append(("round", (record.round, rows, snapshot.round)))

    @hookimpl
    def calfat_run_finished(self, run: RunInfo, result: RunResult) -> None:
        assert run is self.run
        labels = [evaluation.label for evaluation in result.evaluations]
        self.heard.append(("finished", (labels, result.num_rounds, (run.directory / "results.json").exists())))


@pytest.fixture
def build(recipe: Path, monkeypatch: pytest.MonkeyPatch, no_page: None) -> Any:
    """Builds the tests' experiment with a plugin."""
    monkeypatch.syspath_prepend(str(SABOTEUR))

    def experiment(*plugins: Any, rounds: int = 2) -> Experiment:
        changes = [f"train_args.comm_round={rounds}", "train_args.client_num_in_total=2"]
        return assemble(
            read_document(recipe).with_overrides(changes), Registry.load(entry_points=False, plugins=plugins)
        )

    return experiment


def test_plugins_hear_of_each_step_when_it_is_on_disk(build: Any, recipe: Path) -> None:
    listener = Listener()
    request = Request(build(listener), recipe.parent / "run", False, [])
    run(request, RunDirectory.open(request), FailOnWarning())
    assert listener.heard == [
        ("started", (1, 2)),
        ("round", (1, 1, 1)),
        ("round", (2, 2, 2)),
        ("finished", (["natural", "fgsm"], 2, True)),
    ]
    info = listener.run
    assert (info.name, info.directory) == ("tiny", recipe.parent / "run")
    assert info.recipe["train_args"]["comm_round"] == 2
    assert sum(map(sum, info.class_counts)) == 1438  # digits' training examples
    assert [len(counts) for counts in info.class_counts] == [10, 10]

    listener.heard.clear()
    request = Request(build(listener, rounds=3), recipe.parent / "run", True, [])
    run(request, RunDirectory.open(request), FailOnWarning())
    assert [name for name, _ in listener.heard] == ["started", "round", "finished"]
    assert listener.heard[0] == ("started", (3, 3))


class Wanderer:
    """A plugin that goes to another folder, as some libraries do."""

    @hookimpl
    def calfat_round_finished(self) -> None:
        os.chdir("/")


def test_a_plugin_that_goes_elsewhere_takes_no_run_with_it(
    build: Any, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user has named the run directory from where the command was started."""
    monkeypatch.chdir(recipe.parent)
    request = Request(build(Wanderer()), Path("run"), False, [])
    run(request, RunDirectory.open(request), FailOnWarning())
    assert (recipe.parent / "run" / "results.json").exists()
    assert len(read_rows(Path("run/rounds.csv"))) == 2
    assert Path.cwd() == recipe.parent


class OneRound(Runtime):
    """Plays a round without training, and looks which round is on disk when it is over; the disk takes its time.

    Attributes:
        gate: the disk goes on when it is set, which is a while after the round at the earliest.
    """

    num_processes = 1

    def __init__(self, experiment: Experiment, directory: Path) -> None:
        super().__init__(experiment)
        self.last, self.seen, self.gate = directory / "checkpoints" / "last.safetensors", -1, threading.Event()

    def run_server(self, task: ServerTask) -> tuple[EvaluationResult, ...]:
        later = threading.Timer(0.3, self.gate.set)
        if self.is_cross_silo or self.experiment.registry.listeners():
            later.start()
        task.on_round(record(1, {"natural": 0.5, "fgsm": 0.5}), Snapshot(1, {"w": torch.ones(1)}))
        self.seen = load_checkpoint(self.last)[0].round if self.last.exists() else 0
        self.gate.set()
        return ()


class OneRoundOfSilos(OneRound):
    is_cross_silo = True


@pytest.mark.parametrize(
    ("runtime", "plugins", "seen"),
    [(OneRound, (), 0), (OneRoundOfSilos, (), 1), (OneRound, (Listener(),), 1)],
    ids=["nobody waits", "silos", "a plugin hears of rounds"],
)
def test_who_waits_until_a_round_is_on_disk(
    build: Any,
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    runtime: type[OneRound],
    plugins: tuple[object, ...],
    seen: int,
) -> None:
    """A client across silos then forgets what it kept before the round; a hook may read the checkpoint."""
    request = Request(build(*plugins), recipe.parent / "run", False, [])
    directory = RunDirectory.open(request)
    one = runtime(request.experiment, directory.path)
    monkeypatch.setattr(session, "runtime_of", lambda experiment: one)
    together, main = disk.sync_together, threading.current_thread()

    def slow(paths: Collection[Path]) -> None:
        assert threading.current_thread() is main or one.gate.wait(TIMEOUT)
        together(paths)

    monkeypatch.setattr(disk, "sync_together", slow)
    run(request, directory, RunObserver())
    assert one.seen == seen
    assert load_checkpoint(one.last)[0].round == 1
