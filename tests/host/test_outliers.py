"""An update out of proportion is used, and reported: in the log, on the console, in the record and on the page."""

from __future__ import annotations

import dataclasses
import io
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.outliers import (
    UpdateHistory,
    absurd_changes,
    alarms_of,
    loss_alarms,
    personal_alarms,
    robust_z,
    step_alarms,
    weight_alarms,
)
from calfat_plugin.loggers.base import round_scalars
from calfat_plugin.maths.averaging import Drift, drift, update_norm
from calfat_plugin.progress import Lines, ShownProgress, scores_of
from calfat_plugin.report import write_run_report
from calfat_plugin.results import RoundRecord, RunResult
from calfat_plugin.rounds import RoundsFile, read_rounds
from calfat_plugin.rounds_csv import RoundTables
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.writer import RunWriter
from tests.host.federation import experiment
from tests.methods.helpers import Federation
from tests.report.made import evaluation, record
from tests.runs.remains import read_rows
from tests.snapshot import TextSnapshot


def history(clients: int = 20, groups: Any = (), **settings: Any) -> UpdateHistory:
    run = experiment(train_args__client_num_in_total=clients, calfat__clients=list(groups) or None, **settings)
    return UpdateHistory(run, run.client_groups(np.zeros(clients, dtype=np.int64)))


def named(findings: tuple[str, ...], code: str) -> list[int]:
    """The clients that the findings with a code name, one each."""
    texts = [text.removeprefix(f"{code}: ") for text in findings if text.startswith(code)]
    return [int(text.split("client ")[1].split()[0]) for text in texts]


def rounds(history: UpdateHistory, count: int, norms: Any, cosines: Any = (), examples: Any = ()) -> tuple[str, ...]:
    """The findings of the last of so many rounds, all with these values, by client id."""
    found: tuple[str, ...] = ()
    for _ in range(count):
        found = history.add(
            dict(enumerate(norms)), dict(enumerate(cosines)), dict(enumerate(examples or [30] * len(norms)))
        )
    return found


def test_the_robust_z_score_is_by_median_and_mad() -> None:
    """Of 1, 2, 3, 4, 10 the median is 3, and the median of 2, 1, 0, 1, 7 is 1."""
    values = dict(enumerate([1.0, 2.0, 3.0, 4.0, 10.0]))
    assert robust_z(values, spread=0.1) == pytest.approx({0: -1.349, 1: -0.6745, 2: 0, 3: 0.6745, 4: 4.7214}, rel=1e-4)
    assert robust_z(values, spread=7.0) == pytest.approx({0: -2 / 7, 1: -1 / 7, 2: 0, 3: 1 / 7, 4: 1})


def test_replays_of_an_inner_attack_are_steps() -> None:
    """Eight times the steps on each mini-batch make a longer update, of one client here."""
    group = {"ids": 0, "threat": {"inner": "free"}}
    norms = [8.0, *[1.0] * 19]
    assert named(rounds(history(groups=[group]), 10, norms), "large-update") == []
    assert named(rounds(history(), 10, norms), "large-update") == [0]


def test_a_method_without_an_attack_takes_no_replays() -> None:
    """Whatever the run's inner attack: else the others would seem to move eight times as far in a step."""
    group = {"ids": "0-11", "trainer": "standard"}
    seen = history(groups=[group], calfat__threat={"inner": "free"})
    assert rounds(seen, 10, [*[1.0] * 12, *[8.0] * 8]) == ()


ALIKE = [1.0, 1.01, 0.99, 1.02, 0.98]


@pytest.mark.parametrize(
    ("norms", "clients"),
    [
        ([*ALIKE, math.exp(0.2 * 10) * 1.02], [5]),
        ([*ALIKE, math.exp(0.2 * 10) * 0.98], []),
        ([100.0, 100.0, *ALIKE], [0, 1]),
        ([1.0, 1.0, 10.0], [2]),
        ([1.0, 7000.0], []),  # of two, nobody can say which
        ([0.0, 0.0, 1.0, 1.0], []),  # who does not move is no measure
        ([1.0, 1.5, 2.5, 4.0, 10.0, 50.0], []),  # all differ: none is out of proportion
        ([], []),
    ],
)
def test_one_round_is_enough_for_a_norm_far_above_the_others(norms: list[float], clients: list[int]) -> None:
    assert named(rounds(history(), 1, norms), "large-update") == clients


def test_norms_count_per_local_step() -> None:
    """Twelve times as many examples are twelve times as many steps, and then such a norm is usual."""
    norms, examples = [*ALIKE, 12.0], [10] * 5 + [120]
    assert rounds(history(train_args__batch_size=10), 1, norms, examples=examples) == ()
    assert named(rounds(history(train_args__batch_size=10), 1, norms), "large-update") == [5]
    assert named(rounds(history(train_args__local_steps=3), 1, norms, examples=examples), "large-update") == [5]
    twelve = {"ids": 5, "epochs": 12}
    assert rounds(history(groups=[twelve], train_args__batch_size=30), 1, norms) == ()
    assert named(rounds(history(groups=[twelve]), 1, [*ALIKE[1:], 1.0, 1.0], examples=[30] * 6), "large-update") == []


def test_a_norm_that_is_above_the_others_round_after_round() -> None:
    """1.7 is 0.53 above their log norms, so 2.6 of the smallest spread; in one round that is nothing."""
    norms = [*ALIKE, 1.7]
    seen = history()
    assert rounds(seen, 9, norms) == ()
    assert rounds(seen, 1, norms) == (
        "large-update: the update of client 5 has the norm 1.7, per local step 1.69 times the median of its round "
        "(median z-score of 10 rounds 2.63)",
    )
    assert rounds(seen, 6, [*ALIKE, 1.0]) == ()  # most of its last ten rounds were like the others
    assert rounds(history(), 30, [*ALIKE, 1.6]) == ()
    assert rounds(history(), 30, [*ALIKE[:3], 1.7]) == ()  # among four, nobody can say


def test_norms_that_vanish_make_nobody_large() -> None:
    """At the end four clients have learnt their data. The fifth moves no further than all did before."""
    seen = history()
    assert rounds(seen, 10, [0.2, 0.21, 0.19, 0.22, 0.2]) == ()
    vanishing = [[0.01, 0.011, 0.009, 0.012, norm] for norm in (0.05, 0.1, 0.14)]
    for norms in vanishing:
        assert rounds(seen, 10, norms) == ()
    assert named(rounds(history(), 10, vanishing[0]), "large-update") == [4]  # of a run that never moved further
    assert named(rounds(seen, 1, [*vanishing[0][:4], 2.0]), "large-update") == [4]


def test_what_is_usual_falls_with_the_learning_rate() -> None:
    """After a step to a tenth, a tenth of the norms is usual, and who keeps moving as before is not."""
    schedule: dict[str, Any] = {"lr_schedule": "step", "lr_step_size": 10, "lr_decay_rate": 0.1}
    seen = history(**{f"train_args__{key}": value for key, value in schedule.items()})
    assert rounds(seen, 10, [0.2, 0.21, 0.19, 0.22, 0.2]) == ()
    assert named(rounds(seen, 1, [0.02, 0.021, 0.019, 0.022, 0.2]), "large-update") == [4]


def test_a_resumed_run_knows_what_was_usual() -> None:
    run = experiment(train_args__client_num_in_total=5)
    behind = []
    moved = [0.2, 0.21, 0.19, 0.22, 0.2]
    for number in range(1, 5):
        norms = dict(enumerate(moved))
        behind.append(
            dataclasses.replace(
                record(number, {}),
                clients=(0, 1, 2, 3, 4),
                losses=dict.fromkeys(range(5), 1.0),
                update_norms=norms,
                num_examples=dict.fromkeys(range(5), 30),
            )
        )
    resumed = UpdateHistory(run, {})
    resumed.read(behind)
    late = [0.001, 0.0011, 0.0009, 0.0012, 0.02]
    assert rounds(resumed, 1, late) == ()
    assert named(rounds(UpdateHistory(run, {}), 1, late), "large-update") == [4]


START = {"w": torch.zeros(2, 3), "running_var": torch.ones(3), "num_batches_tracked": torch.tensor(5)}


def moved_by(size: float, name: str = "w") -> dict[str, torch.Tensor]:
    """A model of which one value of one tensor has moved."""
    change = torch.zeros_like(START[name])
    change.view(-1)[0] = size
    return {**START, name: START[name] + change}


@pytest.mark.parametrize(
    ("sent", "refused"),
    [
        ([moved_by(0.1), moved_by(0.2), moved_by(1e17)], {2: "tensor 'w' changes by 1e+17; expected up to 1e+04"}),
        ([moved_by(0.1), moved_by(0.2), moved_by(9_999.0)], {}),  # a thousand times what an attacker scales by
        (
            [moved_by(0.1), moved_by(-1e6, "running_var")],
            {1: "tensor 'running_var' changes by 1e+06; expected up to 1e+04"},
        ),
        ([moved_by(1e17), moved_by(0.0)], {0: "tensor 'w' changes by 1e+17; expected up to 1e+04"}),  # one of two
        ([moved_by(1e17)], {0: "tensor 'w' changes by 1e+17; expected up to 1e+04"}),  # and alone
        ([moved_by(1e5), moved_by(1e5), moved_by(1e8)], {}),  # all have moved far
        ([moved_by(1e5), moved_by(1e5), moved_by(2e9)], {2: "tensor 'w' changes by 2e+09; expected up to 1e+09"}),
        ([moved_by(10**6, "num_batches_tracked"), moved_by(0.1)], {}),
    ],
)
def test_only_a_change_that_no_training_explains_is_absurd(sent: list[Any], refused: dict[int, str]) -> None:
    assert absurd_changes(dict(enumerate(sent)), START) == refused


def test_an_absurd_update_is_refused_by_name_and_the_next_round_goes_on() -> None:
    """One weight of 1e17: averaged, it would make the next round of everybody nan."""
    federation = Federation(experiment(train_args__client_num_in_total=3))
    for number in (1, 2):
        downlink = federation.server.downlink()
        uploads = {client: (30, federation.worker.fit(client, number, downlink)) for client in range(3)}
        if number == 1:
            name = federation.server._parameter_names[0]
            uploads[1][1][name] = uploads[1][1][name].clone()
            uploads[1][1][name].view(-1)[0] = 1e17
        record = federation.server.finish_round(number, uploads)
        assert record.clients == ((0, 2) if number == 1 else (0, 1, 2))
        if number == 1:
            (reason,) = record.refused.values()
            assert reason == f"client 1: tensor '{name}' changes by 1e+17; expected up to 1e+04"
        assert math.isfinite(record.loss)


def test_an_absurd_variate_is_refused_too() -> None:
    """SCAFFOLD's server keeps the mean of the clients' variates for ever."""
    federation = Federation(experiment(train_args__client_num_in_total=3, calfat__aggregator="scaffold"))
    downlink = federation.server.downlink()
    uploads = {client: (30, federation.worker.fit(client, 1, downlink)) for client in range(3)}
    name = next(name for name in uploads[2][1] if name.startswith("scaffold/"))
    uploads[2][1][name] = torch.full_like(uploads[2][1][name], 1e15)
    record = federation.server.finish_round(1, uploads)
    assert record.clients == (0, 1)
    assert record.refused == {2: f"client 2: tensor '{name}' changes by 1e+15; expected up to 1e+04"}


def test_who_makes_the_personal_tensors_alone_is_named() -> None:
    """The evaluated model has their plain mean, so a robust rule does not help."""
    assert personal_alarms({0: 1.0, 1: 1.0, 2: 17.0}) == ()
    assert personal_alarms({0: 1.0, 1: 1.0, 2: 19.0}) == (
        "dominant-personal: client 2 moves its personal tensors by 19, 90.48 % of what all clients of its round "
        "together move theirs",
    )
    assert personal_alarms({0: 5.0}) == personal_alarms({0: 0.0, 1: 0.0}) == personal_alarms({}) == ()


def test_a_cosine_that_is_below_the_others_round_after_round() -> None:
    cosines = [0.5, 0.52, 0.48, 0.51, 0.49, 0.19]
    norms = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    seen = history()
    assert rounds(seen, 9, norms, cosines) == ()
    assert rounds(seen, 1, norms, cosines) == (
        "contrary-update: the update of client 5 has the cosine 0.19 to the median of its round's updates (median "
        "z-score of 10 rounds -3.05)",
    )
    assert rounds(history(), 30, norms, [*cosines[:5], 0.21]) == ()
    assert rounds(history(), 30, norms, [-cosine for cosine in cosines]) == ()  # above the others is no harm


def test_a_round_of_too_few_clients_does_not_repeat_what_was_found_before() -> None:
    norms, cosines = [1.7, *ALIKE], [0.19, 0.5, 0.52, 0.48, 0.51, 0.49]
    seen = history()
    assert named(rounds(seen, 10, norms, cosines), "large-update") == [0]
    assert rounds(seen, 1, norms[:4], cosines[:4]) == ()
    assert named(rounds(seen, 1, norms, cosines), "contrary-update") == [0]


def test_equal_updates_are_found_at_once() -> None:
    norms, cosines = [1.0, 1.1, 1.0, 1.2, 1.0, 1.0], [0.5, 0.4, 0.5, 0.4, 0.5, 0.45]
    seen = history()
    assert rounds(seen, 1, norms, cosines) == ("equal-updates: clients 0, 2, 4 sent the same update",)
    assert seen.named == {0, 2, 4}
    two = rounds(history(), 1, [1.0, 1.0, 1.2], [0.5, 0.5, 0.4])
    assert two == ("equal-updates: clients 0, 1 sent the same update",)


def test_a_client_that_is_not_in_a_round_keeps_its_history() -> None:
    norms = dict(enumerate([*ALIKE, 2.2]))
    seen, examples = history(), dict.fromkeys(range(6), 30)
    for round in range(19):
        some = {client: norm for client, norm in norms.items() if client != 5 or round % 2 == 0}
        found = seen.add(some, {}, examples)
    assert named(found, "large-update") == [5]


def test_shares_of_attackers_and_of_others_that_were_named() -> None:
    seen = history(clients=10, groups=[{"ids": "0-3", "attacker": "sign_flip"}, {"ids": 4, "epochs": 1}])
    assert (seen.named_share(attackers=True), seen.named_share(attackers=False)) == (0.0, 0.0)
    rounds(seen, 1, [100.0, 1.0, 1.01, 0.99, 90.0, 80.0, 1.0, 1.0, 1.0, 1.0])
    assert (seen.named_share(attackers=True), seen.named_share(attackers=False)) == (1 / 4, 2 / 6)
    rounds(seen, 1, [1.0] * 10)
    assert seen.named_share(attackers=True) == 1 / 4  # who was named stays named
    assert history(clients=3).named_share(attackers=True) is None


def test_a_resumed_run_has_the_history_of_its_rounds() -> None:
    run = experiment(train_args__client_num_in_total=6)
    behind = []
    norms, cosines = dict(enumerate([*ALIKE, 2.2])), dict(enumerate([0.5, 0.52, 0.48, 0.51, 0.49, 0.1]))
    for number in range(1, 10):
        behind.append(
            dataclasses.replace(
                record(number, {}, clients=6),
                update_norms=norms,
                update_cosines=cosines,
                num_examples=dict.fromkeys(range(6), 30),
            )
        )
    after = UpdateHistory(run, {})
    after.read(behind)
    found = after.add(norms, cosines, dict.fromkeys(range(6), 30))
    assert [text.partition(":")[0] for text in found] == ["large-update", "contrary-update"]


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
    assert f"loss {mean:.3f}" in scores_of(record)


def test_what_a_client_claims_is_recorded_and_found(tmp_path: Path, snapshot: TextSnapshot) -> None:
    """2^53 examples take the average; a loss of -1e17 is in the record, and not in the round's."""
    group = {"ids": [0, 1], "epochs": 2}
    federation = Federation(experiment(train_args__client_num_in_total=3, calfat__clients=[group]))
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
    assert record.metrics["group/group1/loss"] == record.losses[0]

    file = RoundsFile(tmp_path / "rounds.jsonl", RoundTables(tmp_path, tuple(record.evaluations), 3))
    file.append(record)
    (row,) = read_rows(tmp_path / "rounds.csv")
    assert [row[f"num_examples_{client}"] for client in range(3)] == ["30", "9007199254740992", "30"]
    assert [float(row[f"weight_{client}"]) for client in range(3)] == list(record.weights.values())
    alarms = alarms_of(read_rounds(file.path))
    assert [alarm.code for alarm in alarms] == ["dominant-client", "implausible-loss"]
    snapshot("\n".join(alarm.text for alarm in alarms))


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


@pytest.mark.usefixtures("no_figures")
def test_an_update_scaled_by_100_is_used_and_reported_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    run = experiment(train_args__client_num_in_total=3)
    record, snapshot = scaled_round(run, 100.0)
    (alarm,) = record.alarms
    assert record.clients == (0, 1, 2)
    assert alarm.startswith(
        f"large-update: the update of client 1 has the norm {record.update_norms[1]:.3g}, per local"
    )
    assert (record.attackers_named, record.others_named) == (None, 1 / 3)
    assert f"round 1: {alarm}" in caplog.messages

    stream, errors = io.StringIO(), io.StringIO()
    ShownProgress(Lines(stream, errors)).round_finished(record)
    assert errors.getvalue() == f"warning: round 1: {alarm}.\n"

    directory = RunDirectory.create(run, tmp_path / "run")
    writer = RunWriter(directory, run)
    writer.round_finished(record, snapshot)
    assert [found.alarms for found in read_rounds(directory.rounds)] == [(alarm,)]
    for number in range(2, 9):
        alarms = (alarm,) if number > 2 else ()
        writer.round_finished(dataclasses.replace(record, round=number, alarms=alarms), snapshot)
    writer.run_finished(RunResult((evaluation("natural", 0.5),), 8, 1.0))
    page = write_run_report(directory.path).read_text()
    assert "<strong>large-update: </strong>7 rounds, the last of them 8: the update of client 1 has the norm" in page


def test_honest_updates_raise_no_alarm() -> None:
    record, _ = scaled_round(experiment(train_args__client_num_in_total=3), 1.0)
    assert record.alarms == ()


def test_a_servers_optimiser_takes_steps_of_its_own_length() -> None:
    """Far longer than those of its clients, who all move the same way: not a finding."""
    adam = {"name": "fedadam", "server_lr": 1.0}
    run = experiment(train_args__client_num_in_total=3, train_args__learning_rate=1e-4, calfat__aggregator=adam)
    federation = Federation(run)
    before = federation.server.state
    record = federation.play()
    moved = update_norm(federation.server.state, before, before)
    assert moved > 100 * max(record.update_norms.values())
    assert record.alarms == ()


@pytest.mark.usefixtures("no_figures")
def test_a_page_leaves_out_a_loss_that_no_client_can_have(tmp_path: Path) -> None:
    run = experiment(train_args__client_num_in_total=3)
    directory = RunDirectory.create(run, tmp_path / "run")
    file = directory.rounds_file(run)
    for number in (1, 2):
        losses = {0: 1.5, 1: -1e17 if number == 2 else 1.0, 2: 0.5}
        file.append(RoundRecord(number, (0, 1, 2), {}, losses, {}, 0.0, {}, 1.0, 0, 0))
    page = write_run_report(directory.path).read_text()
    assert "Last round: 1." in page
    assert "e+1" not in page


STEPS = [  # norm and cosine of the server's step beside clients of norms 1 and 2, whether it remembers; what is said
    ((2.0, 1.0), False, ""),
    ((5.9, -0.09), False, ""),
    ((5.9, -0.11), False, "moved against its clients (cosine to their median update -0.11)"),
    ((5.9, -0.49), True, ""),
    ((6.1, 1.0), False, "moved by 6.1, 3.05 times the longest update of its clients"),
    ((6.1, 1.0), True, ""),
    ((0.1, -0.51), True, "moved against its clients (cosine to their median update -0.51)"),
    ((0.0, math.nan), False, ""),
]


@pytest.mark.parametrize(("step", "remembers", "said"), STEPS)
def test_a_step_away_from_the_clients_or_far_beyond_them_is_said(
    step: tuple[float, float], remembers: bool, said: str
) -> None:
    expected = (f"server-step: the global model {said}",) if said else ()
    assert step_alarms(Drift([1.0, 2.0], [1.0, 1.0], 0.5, step), remembers=remembers) == expected


def test_the_step_is_measured_beside_the_clients_and_not_among_them() -> None:
    start, clients = {"w": torch.zeros(2)}, [{"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([4.0, 0.0])}]
    found, still = (drift(clients, start, ["w"], outcome) for outcome in ({"w": torch.tensor([-3.0, 4.0])}, start))
    assert found[:3] == still[:3] == ([2.0, 4.0], [1.0, 1.0], 2.0)
    assert found.step == pytest.approx((5.0, -0.6))
    assert still.step == pytest.approx((0.0, math.nan), nan_ok=True)
