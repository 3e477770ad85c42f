"""An update out of proportion is used, and reported: in the log, on the console, in ``rounds.csv`` and on the page."""

from __future__ import annotations

import dataclasses
import io
import logging
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from calfat_plugin.cli.progress import PlainProgress
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.outliers import norm_alarms
from calfat_plugin.report import write_run_report
from calfat_plugin.results import RunResult
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.rounds import read_rounds
from calfat_plugin.runs.writer import RunWriter
from tests.host.federation import experiment
from tests.methods.helpers import Federation
from tests.report.made import evaluation


@pytest.mark.parametrize(
    ("norms", "clients"),
    [
        ({0: 1.0, 1: 1.1, 2: 11.0}, []),
        ({0: 1.0, 1: 1.0, 2: 10.1}, [2]),
        ({0: 100.0, 1: 100.0, 2: 1.0, 3: 1.0, 4: 1.0}, [0, 1]),
        ({0: 1.0, 1: 7000.0}, []),  # of two, nobody can say which
        ({0: 0.0, 1: 0.0, 2: 1.0}, []),
        ({}, []),
    ],
)
def test_norms_far_above_the_median(norms: dict[int, float], clients: list[int]) -> None:
    assert [int(text.split()[4]) for text in norm_alarms(norms)] == clients


def test_a_finding_says_who_and_how_far() -> None:
    assert norm_alarms({0: 0.5, 1: 0.5, 2: 0.25, 3: 1234.5}) == (
        "the update of client 3 has the norm 1.23e+03, 2469 times the median of its round",
    )


def scaled_round(run: Experiment, factor: float) -> Any:
    """The record of a round in which client 1 scales its honest change."""
    federation = Federation(run)
    downlink = federation.server.downlink()
    uploads = {client: (30, federation.worker.fit(client, 1, downlink)) for client in range(3)}
    wire, start = uploads[1][1], federation.server.state
    for name in start:
        if start[name].is_floating_point():
            wire[name] = start[name] + factor * (wire[name] - start[name])
    return federation.server.finish_round(1, uploads), federation.server.snapshot()


def test_an_update_scaled_by_100_is_used_and_found(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    record, _ = scaled_round(experiment(train_args__client_num_in_total=3), 100.0)
    assert record.clients == (0, 1, 2)
    norm = record.update_norms[1]
    times = norm / median(record.update_norms.values())
    assert 50 < times < 200
    assert record.alarms == (
        f"the update of client 1 has the norm {norm:.3g}, {times:.0f} times the median of its round",
    )
    assert f"round 1: {record.alarms[0]}" in caplog.messages


def test_an_update_scaled_by_100_is_reported_everywhere(tmp_path: Path) -> None:
    run = experiment(train_args__client_num_in_total=3)
    record, snapshot = scaled_round(run, 100.0)
    (alarm,) = record.alarms

    stream, errors = io.StringIO(), io.StringIO()
    PlainProgress(stream, errors).round_finished(record)
    assert errors.getvalue() == f"warning: round 1: {alarm}.\n"

    directory = RunDirectory.create(run, tmp_path / "run")
    writer = RunWriter(directory, run)
    writer.round_finished(record, snapshot)
    assert [row["alarms"] for row in read_rounds(directory.rounds)] == [alarm]
    for number in range(2, 9):
        alarms = (alarm,) if number > 2 else ()
        writer.round_finished(dataclasses.replace(record, round=number, alarms=alarms), snapshot)
    writer.run_finished(RunResult((evaluation("natural", 0.5),), 8, 1.0))
    page = write_run_report(directory.path).read_text()
    assert "<strong>large-update: </strong>round 1: the update of client 1 has the norm" in page
    assert "(and 2 more rounds in rounds.csv). Such an update can replace the model" in page


def test_honest_updates_raise_no_alarm() -> None:
    record, _ = scaled_round(experiment(train_args__client_num_in_total=3), 1.0)
    assert record.alarms == ()
