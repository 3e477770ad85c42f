"""An update out of proportion is used, and reported: in the log, on the console, in ``rounds.csv`` and on the page."""

from __future__ import annotations

import dataclasses
import io
import logging
import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from calfat_plugin.cli.progress import PlainProgress, _scores
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.outliers import alarms_of, loss_alarms, norm_alarms, weight_alarms
from calfat_plugin.loggers.base import round_scalars
from calfat_plugin.report import write_run_report
from calfat_plugin.results import RoundRecord, RunResult
from calfat_plugin.rounds_csv import RoundsFile, read_rounds
from calfat_plugin.runs.directory import RunDirectory
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
    assert [int(text.split()[5]) for text in norm_alarms(norms)] == clients


def test_a_finding_says_who_and_how_far() -> None:
    assert norm_alarms({0: 0.5, 1: 0.5, 2: 0.25, 3: 1234.5}) == (
        "large-update: the update of client 3 has the norm 1.23e+03, 2469 times the median of its round",
    )


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ({0: 0.05, 1: 0.9, 2: 0.05}, ()),
        (
            {0: 0.05, 1: 0.91, 2: 0.04},
            ("dominant-client: client 1 has 91 % of the weight of its round (it claims 11 examples)",),
        ),
        ({0: 1.0}, ()),  # there is no other
        ({}, ()),  # the aggregator says nothing
        ({0: 0.0, 1: 0.0, 2: 0.0}, ()),
    ],
)
def test_a_weight_that_is_nearly_all(weights: dict[int, float], found: tuple[str, ...]) -> None:
    assert weight_alarms(weights, {client: 10 + client for client in weights}) == found


@pytest.mark.parametrize(
    ("losses", "left_out"),
    [
        ({0: 1.5, 1: -1e17, 2: 0.5}, [1]),
        ({0: 1.5, 1: -1e17}, [1]),  # the smaller one of two is the usual one
        ({0: -1e17}, [0]),
        ({0: 900_000.0}, []),
        ({0: 0.001, 1: 100.0, 2: 0.001}, []),
        ({0: 0.001, 1: 100.1, 2: 0.001}, [1]),
        ({0: 2e7, 1: 3e7, 2: 4e6}, []),  # sums and not means: all of this size
        ({0: 1.0, 1: math.nan, 2: math.inf}, [1, 2]),
        ({0: math.nan, 1: math.nan}, []),  # a method that reports none
        ({0: -3.0, 1: 2.0}, []),
        ({0: -300.0, 1: -350.0, 2: -500.0}, []),
    ],
)
def test_a_loss_that_no_client_can_have(losses: dict[int, float], left_out: list[int]) -> None:
    assert list(loss_alarms(losses)) == [
        f"implausible-loss: client {client} claims a loss of {losses[client]:.3g}" for client in left_out
    ]
    honest = [loss for client, loss in losses.items() if client not in left_out and not math.isnan(loss)]
    mean = math.fsum(honest) / len(honest) if honest else math.nan
    record = RoundRecord(1, tuple(losses), {}, losses, {}, 0.0, {}, 1.0, 0, 0)
    assert record.loss == pytest.approx(mean, nan_ok=True)
    assert round_scalars(record).get("loss/mean", math.nan) == pytest.approx(mean, nan_ok=True)
    assert f"loss {mean:.3f}" in _scores(record)


def test_what_a_client_claims_is_recorded_and_found(tmp_path: Path) -> None:
    """2^53 examples take the average; a loss of -1e17 is in the record, and not in the round's."""
    federation = Federation(experiment(train_args__client_num_in_total=3))
    downlink = federation.server.downlink()
    uploads = {client: (30, federation.worker.fit(client, 1, downlink)) for client in range(3)}
    wire = uploads[1][1]
    wire["metric/loss"] = torch.tensor(-1e17, dtype=torch.float64)
    uploads[1] = (2**53, wire)
    record = federation.server.finish_round(1, uploads)
    assert record.num_examples == {0: 30, 1: 2**53, 2: 30}
    assert record.weights[1] > 1 - 1e-14
    assert math.fsum(record.weights.values()) == pytest.approx(1)
    assert record.alarms == (
        "dominant-client: client 1 has 100 % of the weight of its round (it claims 9007199254740992 examples)",
        "implausible-loss: client 1 claims a loss of -1e+17",
    )
    assert record.losses[1] == -1e17
    assert record.loss == (record.losses[0] + record.losses[2]) / 2

    file = RoundsFile(tmp_path / "rounds.csv", tuple(record.evaluations), 3)
    file.append(record)
    (row,) = read_rounds(file.path)
    assert [row[f"num_examples_{client}"] for client in range(3)] == ["30", "9007199254740992", "30"]
    assert [float(row[f"weight_{client}"]) for client in range(3)] == list(record.weights.values())
    assert [(alarm.code, alarm.text) for alarm in alarms_of(file.path)] == [
        (
            "dominant-client",
            "round 1: client 1 has 100 % of the weight of its round (it claims 9007199254740992 examples). It is "
            "nearly the whole average: check its number of examples, or use weights: uniform.",
        ),
        (
            "implausible-loss",
            "round 1: client 1 claims a loss of -1e+17. The round's loss leaves it out, the average has its update: "
            "look at that client.",
        ),
    ]


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
        f"large-update: the update of client 1 has the norm {norm:.3g}, {times:.0f} times the median of its round",
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


def test_a_page_leaves_out_a_loss_that_no_client_can_have(tmp_path: Path) -> None:
    run = experiment(train_args__client_num_in_total=3)
    directory = RunDirectory.create(run, tmp_path / "run")
    file = RoundsFile(directory.rounds, (), 3)
    for number in (1, 2):
        losses = {0: 1.5, 1: -1e17 if number == 2 else 1.0, 2: 0.5}
        file.append(RoundRecord(number, (0, 1, 2), {}, losses, {}, 0.0, {}, 1.0, 0, 0))
    page = write_run_report(directory.path).read_text()
    assert "each of the 3 clients (thin)" in page
    assert "Last round: 1." in page
    assert "e+1" not in page
