"""Server and worker take nothing that they are sent for granted."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.entries import AggregatorEntry, ModelEntry, TrainerEntry
from calfat_plugin.errors import UpdateError
from calfat_plugin.federation.wire import Wire, pack_downlink, pack_refusal, pack_update, unpack_update
from calfat_plugin.interfaces import Aggregate, AggregationTask, Aggregator, LocalTask, LocalTrainer, TrainBatch
from calfat_plugin.results import LocalUpdate
from calfat_plugin.trainers.calfat import CalFAT, CalFATOptions
from tests.host.federation import experiment, run
from tests.methods.helpers import Federation
from tests.plugins import offering
from tests.snapshot import TextSnapshot


class Diverging(CalFAT):
    """Client 1 diverges in round 1; in round 3 all do."""

    def train_loss(self, batch: TrainBatch) -> Tensor:
        lost = batch.task.round == 3 or (batch.task.round, batch.task.client) == (1, 1)
        return super().train_loss(batch) * (math.nan if lost else 1.0)


class Misshapen(CalFAT):
    """Client 0 returns a model of another shape, and client 2 weights that are not finite."""

    def fit(self, task: LocalTask) -> LocalUpdate:
        update = super().fit(task)
        state = dict(update.state)
        if task.client == 0:
            state["classifier.bias"] = torch.zeros(3)
        if task.client == 2:
            state["classifier.bias"] = torch.full((10,), math.inf)
        return LocalUpdate(state, update.num_examples, client_state={"kept": torch.ones(1)})


class Transposing(Aggregator):
    """Returns tensors of wrong shapes."""

    def __init__(self, options: Any) -> None:
        pass

    def combine(self, task: AggregationTask) -> Aggregate:
        return Aggregate({name: tensor.reshape(-1) for name, tensor in task.updates[0].state.items()})


class Drawing(Aggregator):
    """Adds noise from the global generators, as a careless author would."""

    def __init__(self, options: Any) -> None:
        pass

    def combine(self, task: AggregationTask) -> Aggregate:
        noise = random.random() + np.random.rand() + torch.rand(())
        return Aggregate({name: tensor + noise for name, tensor in task.updates[0].state.items()})


def dropping(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    pixels = in_channels * image_size[0] * image_size[1]
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(pixels, num_classes))


class Gambler(LocalTrainer):
    """Draws from every global generator, as a careless author would."""

    draws: dict[tuple[int, int], tuple[float, float, float]]

    def __init__(self, options: Any, modifier: Any) -> None:
        pass

    def fit(self, task: LocalTask) -> LocalUpdate:
        self.draws[task.round, task.client] = random.random(), float(np.random.rand()), float(torch.rand(()))
        return LocalUpdate(task.model.state_dict(), len(task.data))


PLUGIN = offering(
    TrainerEntry("diverging", build=Diverging, config=CalFATOptions),
    TrainerEntry("misshapen", build=Misshapen, config=CalFATOptions),
    TrainerEntry("gambler", build=Gambler),
    AggregatorEntry("transposing", build=Transposing),
    AggregatorEntry("drawing", build=Drawing),
    ModelEntry("dropping", build=dropping),
)


# --- a client that has no update --------------------------------------------------------------------------------------


def test_a_client_that_diverges_is_left_out_by_name_and_the_round_continues(
    caplog: pytest.LogCaptureFixture, snapshot: TextSnapshot
) -> None:
    first, second = run(experiment(PLUGIN, calfat__trainer="diverging")).records
    assert (first.clients, list(first.refused)) == ((0, 2, 3, 4), [1])
    snapshot(first.refused[1])
    assert f"client 1 has no update in round 1: {first.refused[1]}" in caplog.messages
    assert sorted(first.losses) == sorted(first.update_norms) == [0, 2, 3, 4]
    assert (second.clients, second.refused) == ((0, 1, 2, 3, 4), {})


def test_a_round_without_any_update_ends_the_run_with_the_reasons(snapshot: TextSnapshot) -> None:
    with snapshot.raises(UpdateError, "round 3: not one client delivered a usable update.", "client 4"):
        run(experiment(PLUGIN, calfat__trainer="diverging", train_args__comm_round=3))
    with snapshot.raises(UpdateError, "round 1"):
        run(experiment(PLUGIN, calfat__trainer="misshapen", train_args__client_num_in_total=1))


def test_a_client_whose_update_does_not_fit_keeps_the_state_it_had() -> None:
    ran = run(experiment(PLUGIN, calfat__trainer="misshapen"))
    for record in ran.records:
        assert record.clients == (1, 3, 4)
        assert record.refused == {
            0: "client 0: tensor 'classifier.bias' has shape (3,), expected (10,)",
            2: "client 2: tensor 'classifier.bias' holds 10 nan or inf among 10 values",
        }
    assert sorted(ran.snapshots[-1].client_states) == [1, 3, 4]


def test_an_aggregator_that_returns_wrong_shapes_is_refused_by_name() -> None:
    with pytest.raises(UpdateError, match=r"^aggregator 'transposing': tensor '.* has shape \(.*\), expected \("):
        run(experiment(PLUGIN, calfat__aggregator="transposing"))


# --- messages that no client of ours would send -----------------------------------------------------------------------


def uploads_of(federation: Federation) -> dict[int, tuple[int, Wire]]:
    """Three clients whose models are the global one plus 1, 2 and 3."""
    state = federation.server.state
    return {
        client: (10, pack_update(LocalUpdate({n: t + client + 1 for n, t in state.items()}, 10, metrics={"loss": 1.0})))
        for client in range(3)
    }


def tampered(federation: Federation, change: Any) -> tuple[str, float]:
    """(reason to refuse client 1, how far the global model moved)."""
    uploads: Any = uploads_of(federation)
    uploads[1] = change(*uploads[1])
    before = federation.server.state
    record = federation.server.finish_round(1, uploads)
    assert record.clients == (0, 2)
    moved = {float((federation.server.state[name] - before[name]).mean()) for name in before}
    return record.refused[1], pytest.approx(moved.pop()) if len(moved) == 1 else sum(moved) / len(moved)


def without(wire: Mapping[str, Tensor], name: str) -> Wire:
    return OrderedDict((key, value) for key, value in wire.items() if key != name)


@pytest.mark.parametrize(
    "change",
    [
        lambda n, wire: (n, pack_refusal("out of memory")),
        lambda n, wire: (0, wire),
        lambda n, wire: (math.nan, wire),
        lambda n, wire: (10**400, wire),
        lambda n, wire: (True, wire),
        lambda n, wire: (n, {**wire, "x/y": torch.zeros(2).to(torch.float8_e4m3fn)}),
        lambda n, wire: (n, {**wire, "classifier.bias": torch.full((10,), 3.4e38)}),
        lambda n, wire: (n, {name: tensor * 1e15 for name, tensor in wire.items()}),
        lambda n, wire: (n, pack_refusal("\x1b[2J\u2028wiped\x00" + "x" * 10**6)),
        lambda n, wire: (n, {**wire, "extra": "text"}),
        lambda n, wire: (n, {**wire, 3: torch.zeros(1)}),
        lambda n, wire: (n, {**wire, "metric/loss": torch.zeros(2)}),
        lambda n, wire: (n, {**wire, "scaffold/delta": torch.tensor([1.0, math.nan])}),
        lambda n, wire: (n, without(wire, "classifier.bias")),
        lambda n, wire: (n, {**wire, "clasifier.bias": torch.zeros(10)}),
        lambda n, wire: (n, {**wire, "classifier.bias": torch.zeros(10, dtype=torch.float64)}),
    ],
)
def test_a_message_that_does_not_fit_is_refused_by_name_and_does_not_move_the_model(
    change: Any, snapshot: TextSnapshot
) -> None:
    told, moved = tampered(Federation(experiment()), change)
    assert told.startswith("client 1: ")
    snapshot(told)
    assert moved == pytest.approx(2.0)  # the mean of clients 0 and 2, which moved by 1 and 3


def test_a_refusal_may_hold_anything() -> None:
    for tensor in (torch.tensor([-1.0, 300.0, math.nan]), torch.zeros(0), torch.zeros(2, 2, dtype=torch.bool)):
        with pytest.raises(UpdateError):
            unpack_update({"refused/reason": tensor}, 1)


@pytest.mark.parametrize("name", ["metric/loss", "refused/reason"])
def test_an_extra_does_not_take_a_name_that_means_something(name: str) -> None:
    extras = {name: torch.ones(1)}
    for pack in (lambda: pack_update(LocalUpdate({}, 1, extras=extras)), lambda: pack_downlink({}, extras)):
        with pytest.raises(UpdateError, match=f"^the extra '{name}' is misnamed: metric/, refused/reason are reserved"):
            pack()


# --- randomness of others ---------------------------------------------------------------------------------------------


def test_each_client_and_round_finds_the_global_generators_at_a_state_of_its_own() -> None:
    gambling = experiment(PLUGIN, calfat__trainer="gambler", train_args__comm_round=3)
    Gambler.draws = {}
    whole = run(gambling)
    drawn = dict(Gambler.draws)
    for library in range(3):
        assert len({draws[library] for draws in drawn.values()}) == len(drawn) == 15

    Gambler.draws = {}
    random.random(), np.random.rand(), torch.rand(1)  # the world moves on
    run(gambling, resume_from=whole.snapshots[0])
    assert Gambler.draws == {place: draws for place, draws in drawn.items() if place[0] > 1}

    Gambler.draws = {}
    run(experiment(PLUGIN, calfat__trainer="gambler", common_args__random_seed=1))
    assert not set(Gambler.draws.values()) & set(drawn.values())


@pytest.mark.parametrize(
    "values",
    [{"model_args__model": "dropping"}, {"calfat__aggregator": "drawing"}],
    ids=["dropout", "an aggregator that draws"],
)
def test_a_resume_repeats_what_was_drawn_from_global_generators(values: dict[str, Any]) -> None:
    def weights(resume: bool) -> list[float]:
        drawing = experiment(PLUGIN, train_args__comm_round=3, **values)
        whole = run(drawing)
        random.random(), np.random.rand(), torch.rand(1)
        last = run(drawing, resume_from=whole.snapshots[0]) if resume else whole
        return [float(tensor.double().sum()) for tensor in last.snapshots[-1].global_state.values()]

    assert weights(resume=True) == weights(resume=False)
