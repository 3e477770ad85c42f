"""Aggregators at work: published toy numbers through the real training loop and the real server step."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from calfat_plugin.aggregators.fedavg import FedAvg
from calfat_plugin.aggregators.sfat import slack_weights
from calfat_plugin.datasets import ImageData
from calfat_plugin.errors import RecipeError, UpdateError
from calfat_plugin.interfaces import AggregationTask, TrainSettings
from calfat_plugin.results import LocalUpdate
from calfat_plugin.seeds import derive_seed
from calfat_plugin.testing.federation import TinyFederation
from calfat_plugin.testing.tiny import NUM_CLASSES, tiny_experiment
from tests.methods.helpers import (
    SETTINGS,
    Federation,
    GivenLoss,
    TinyNet,
    ToyFederation,
    build_aggregator,
    build_method,
    experiment,
    local_task,
    same_bits,
    tiny_data,
)


def combine(aggregator, vectors, examples, losses=(), *, start=(0.0, 0.0), round=5, **task):
    """One server step on clients' vectors."""
    losses = losses or [1.0] * len(vectors)
    updates = {
        client: LocalUpdate({"w": torch.tensor(vector)}, count, metrics={"loss": loss})
        for client, (vector, count, loss) in enumerate(zip(vectors, examples, losses, strict=True))
    }
    return aggregator.combine(
        AggregationTask({"w": torch.tensor(start)}, updates, task.pop("server_state", {}), ["w"], 3, round, **task)
    )


VECTORS = [(1.0, 2.0), (3.0, 4.0), (5.0, 0.0)]
EXAMPLES = [10, 30, 60]


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
@pytest.mark.parametrize(("weights", "expected"), [("examples", (4.0, 1.4)), ("uniform", (3.0, 2.0))])
def test_weighted_means(name, weights, expected):
    result = combine(build_aggregator(name, weights=weights), VECTORS, EXAMPLES)
    assert result.state["w"].tolist() == pytest.approx(expected, abs=1e-6)
    assert math.fsum(result.weights.values()) == pytest.approx(1)


# --- SFAT -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "expected"), [("uniform", (3.125, 1.875)), ("examples", (4.107143, 1.25))])
def test_sfat_favours_the_smallest_loss(weights, expected):
    aggregator = build_aggregator("sfat", ratio=1.2, weights=weights)
    result = combine(aggregator, VECTORS, EXAMPLES, losses=[2.0, 3.0, 1.0])
    assert result.state["w"].tolist() == pytest.approx(expected, abs=1e-6)
    late = combine(build_aggregator("sfat", start_round=5), VECTORS, EXAMPLES, losses=[2.0, 3.0, 1.0], round=4)
    assert late.state["w"].tolist() == pytest.approx((3.0, 2.0))  # a plain mean before its start round


@given(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.integers(1, 3))
def test_sfat_with_ratio_one_is_fedavg(losses, top):
    even = combine(build_aggregator("sfat", ratio=1.0, top=top), VECTORS, EXAMPLES, losses=losses)
    mean = combine(build_aggregator("fedavg", weights="uniform"), VECTORS, EXAMPLES)
    assert torch.allclose(even.state["w"], mean.state["w"], atol=1e-7)


def test_sfat_ranks_only_the_clients_that_attack():
    """Client 2 has the smallest loss, of clean images: 1.2 / 3.2 for client 0, 1 / 3.2 for the others."""
    updates = {
        client: LocalUpdate({"w": torch.ones(2)}, 1, metrics={"loss": loss}) for client, loss in enumerate([2, 3, 1])
    }
    task = AggregationTask(
        {"w": torch.ones(2)}, updates, {}, ["w"], num_clients=3, round=2, unattacked=frozenset({2, 7})
    )
    weights = build_aggregator("sfat", ratio=1.2).combine(task).weights
    assert weights == pytest.approx({0: 0.375, 1: 0.3125, 2: 0.3125})
    nobody = dataclasses.replace(task, unattacked=frozenset(range(3)))
    assert build_aggregator("sfat", top=2).combine(nobody).weights == pytest.approx(dict.fromkeys(range(3), 1 / 3))


@pytest.mark.parametrize(("ratio", "top", "other"), [(1.2, 0.2308, 0.1923), (1.4, 0.2593, 0.1852)])
def test_sfats_published_weights_of_five_clients(ratio, top, other):
    weights = slack_weights([1] * 5, [3, 1, 2, 4, 5], ratio=ratio, top=1)
    assert weights == pytest.approx([other, top, other, other, other], abs=1e-4)


@pytest.mark.parametrize(
    ("losses", "top", "expected"),
    [
        ([0.5, 0.5, 0.5, 0.1], 2, [2 / 6, 1 / 6, 1 / 6, 2 / 6]),  # ties go to the first
        ([math.nan, 9.0], 1, [1 / 3, 2 / 3]),  # not a client that diverged,
        ([None, 9.0], 1, [1 / 3, 2 / 3]),  # nor one without an attack
    ],
)
def test_whom_sfat_favours(losses, top, expected):
    assert slack_weights([1] * len(losses), losses, ratio=2.0, top=top) == pytest.approx(expected)


# --- FedProx ----------------------------------------------------------------------------------------------------------


class Vector(nn.Module):
    """A model of one parameter and nothing else; its logits are the parameter for every image."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values))

    def forward(self, x):
        return self.w.expand(len(x), -1)


def blank(count: int) -> ImageData:
    return ImageData(torch.zeros(count, 1, 1, 1), torch.zeros(count, dtype=torch.int64))


def test_fedprox_adds_mu_times_the_distance_to_the_gradient():
    model = Vector(0.5, 1.0)
    active = build_aggregator("fedprox", mu=0.01).correction().begin(local_task(model))
    with torch.no_grad():
        model.w.copy_(torch.tensor([1.0, 2.0]))
    model.w.grad = torch.tensor([1.0, 1.0])
    active.after_backward(model)
    assert model.w.grad.tolist() == pytest.approx([1.005, 1.01], abs=1e-7)
    model.w.grad = None  # a parameter that the loss does not reach is pulled back all the same
    active.after_backward(model)
    assert model.w.grad.tolist() == pytest.approx([0.005, 0.01], abs=1e-7)


def test_fedprox_of_mu_zero_is_fedavg_for_unused_parameters_too():
    """A gradient of zeros would have them decay; without a gradient they stay."""

    class WithUnused(Vector):
        def __init__(self):
            super().__init__(1.0)
            self.unused = nn.Parameter(torch.tensor(5.0))

    settings = dataclasses.replace(SETTINGS, weight_decay=0.5)
    states = []
    for aggregator in (build_aggregator("fedprox", mu=0.0), build_aggregator("fedavg")):
        task = local_task(WithUnused(), blank(4), settings=settings, correction=aggregator.correction())
        states.append(GivenLoss(quadratic).fit(task).state)
    assert same_bits(*states)
    assert states[0]["unused"].item() == 5.0
    assert states[0]["w"].item() < 1.0


# --- SCAFFOLD: the toy of docs/methods.md -----------------------------------------------------------------------------


def quadratic(client, model):
    """g1(w) = w, g2(w) = 2 (w - 3)."""
    return model.w.square().sum() / 2 if client == 0 else (model.w - 3).square().sum()


def toy(momentum=0.0, nesterov=False, **options):
    settings = TrainSettings(
        1, 1, learning_rate=0.1, momentum=momentum, weight_decay=0, num_rounds=9, nesterov=nesterov
    )
    return ToyFederation(
        GivenLoss(quadratic),
        build_aggregator("scaffold", **options),
        Vector(1.0),
        settings,
        {0: blank(2), 1: blank(2)},  # two steps each
    )


def numbers(federation):
    """y_1, y_2, x, c, c_1, c_2 after a round."""
    return [
        *(update.state["w"].item() for update in federation.updates.values()),
        federation.state["w"].item(),
        federation.server_state["scaffold/c/w"].item(),
        *(kept["scaffold/c/w"].item() for kept in federation.kept.values()),
    ]


def test_scaffold_option_two():
    federation = toy(variant="II")
    federation.play()
    assert numbers(federation) == pytest.approx([0.81, 1.72, 1.265, -1.325, 0.95, -3.6], abs=1e-5)
    federation.play()
    assert numbers(federation) == pytest.approx([1.4569, 1.4801, 1.4685, -1.0175, 1.3155, -3.3505], abs=1e-5)
    federation.play()
    assert federation.state["w"].item() == pytest.approx(1.6163275, abs=1e-5)


def test_scaffold_option_one():
    federation = toy(variant="I")
    federation.play()
    assert numbers(federation) == pytest.approx([0.81, 1.72, 1.265, -1.5, 1.0, -4.0], abs=1e-5)
    federation.play()
    assert numbers(federation)[2:] == pytest.approx([1.469625, -1.1025, 1.265, -3.47], abs=1e-5)


@pytest.mark.parametrize(
    ("nesterov", "pairing", "models", "variates"),
    [
        (False, "after_step", (0.72, 2.08, 1.4), (1.4, -5.4)),
        (False, "gradient", (0.72, 2.08, 1.4), (0.965517, -3.724138)),
        (True, "after_step", (0.5751, 2.5552, 1.56515), (2.1245, -7.776)),
        (True, "gradient", (0.5751, 2.5552, 1.56515), (0.921692, -3.373536)),
    ],
)
def test_scaffold_with_momentum(nesterov, pairing, models, variates):
    federation = toy(momentum=0.9, nesterov=nesterov, pairing=pairing)
    federation.play()
    assert numbers(federation)[:3] == pytest.approx(models, abs=1e-5)
    assert numbers(federation)[4:] == pytest.approx(variates, abs=1e-5)


@pytest.mark.parametrize(
    ("pairing", "momentum", "nesterov", "holds"),
    [
        ("after_step", 0.0, False, True),
        ("gradient", 0.0, False, True),
        ("gradient", 0.9, False, True),
        ("gradient", 0.9, True, True),
        ("after_step", 0.9, False, False),
        ("after_step", 0.9, True, False),
    ],
)
def test_scaffold_option_one_keeps_clients_at_the_optimum_or_is_refused(pairing, momentum, nesterov, holds):
    """There the variates are the clients' gradients, 2 and -2, and nobody may drift."""
    federation = toy(momentum, nesterov, variant="I", pairing=pairing)
    federation.state = {"w": torch.tensor([2.0])}
    federation.kept = {0: {"scaffold/c/w": torch.tensor([2.0])}, 1: {"scaffold/c/w": torch.tensor([-2.0])}}
    federation.play()
    assert (numbers(federation) == pytest.approx([2, 2, 2, 0, 2, -2], abs=1e-5)) == holds
    picked = {"name": "scaffold", "variant": "I", "pairing": pairing}
    train_args = {"train_args__momentum": momentum, "train_args__nesterov": nesterov}
    with nullcontext() if holds else pytest.raises(RecipeError, match="Write pairing: gradient, or momentum: 0"):
        experiment("fedpgd", picked, **train_args)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    variant=st.sampled_from(["I", "II"]),
    pairing=st.sampled_from(["after_step", "gradient"]),
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=3),
)
def test_scaffold_keeps_c_the_mean_of_the_clients_variates(seed, variant, pairing, sizes):
    data = {client: tiny_data(seed + client, count=size) for client, size in enumerate(sizes)}
    federation = ToyFederation(
        build_method("fedpgd"),
        build_aggregator("scaffold", variant=variant, pairing=pairing),
        TinyNet(seed),
        dataclasses.replace(SETTINGS, learning_rate=0.01),
        data,
    )
    start = federation.state
    for round in range(3):
        federation.play()
        for name in start:
            kept = torch.stack([state[f"scaffold/c/{name}"] for state in federation.kept.values()])
            c = federation.server_state[f"scaffold/c/{name}"]
            assert torch.allclose(c, kept.mean(dim=0), atol=1e-4 * max(1.0, float(kept.abs().max())))
        if round == 0:  # all variates were zero: the round was FedAvg's
            mean = {name: sum(u.state[name] for u in federation.updates.values()) / len(sizes) for name in start}
            assert all(torch.allclose(federation.state[name], mean[name], atol=1e-5) for name in start)


def test_an_aggregator_has_a_seed_for_each_round_and_the_number_of_classes(monkeypatch):
    given = []
    combine = FedAvg.combine
    monkeypatch.setattr(FedAvg, "combine", lambda self, task: given.append(task) or combine(self, task))
    federation = TinyFederation(tiny_experiment(None))
    federation.play(), federation.play()
    assert [task.seed for task in given] == [derive_seed(0, "aggregator", round=round) for round in (1, 2)]
    assert {task.num_classes for task in given} == {NUM_CLASSES}


def test_scaffold_with_some_clients_divides_by_all():
    federation = toy()
    federation.data.pop(1)
    federation.aggregator = build_aggregator("scaffold")
    federation.play()
    update = federation.updates[0]
    task = AggregationTask({"w": torch.tensor([1.0])}, {0: update}, {}, ["w"], num_clients=4, round=1)
    result = federation.aggregator.combine(task)
    assert result.server_state["scaffold/c/w"].item() == pytest.approx(0.95 / 4, abs=1e-6)


def test_scaffold_moves_with_its_own_step_and_weighs_all_clients_the_same():
    extras = {"scaffold/change/w": torch.zeros(1)}
    updates = {client: LocalUpdate({"w": torch.tensor([3.0])}, 1 + client, extras=extras) for client in (1, 4)}
    task = AggregationTask({"w": torch.tensor([1.0])}, updates, {}, ["w"], num_clients=5, round=1)
    found = build_aggregator("scaffold", server_lr=0.25).combine(task)
    assert (found.state["w"].item(), found.weights) == (pytest.approx(1.5), {1: 0.5, 4: 0.5})


def test_scaffold_corrects_parameters_that_the_loss_does_not_reach():
    model = Vector(1.0, 2.0)
    c, own = torch.tensor([0.5, -1.0]), torch.tensor([0.25, 1.0])
    kept = {"broadcast": {"scaffold/c/w": c}, "client_state": {"scaffold/c/w": own}}
    active = build_aggregator("scaffold", pairing="gradient").correction().begin(local_task(model, **kept))
    for _ in range(2):
        model.w.grad = None
        active.after_backward(model)
        assert model.w.grad.tolist() == [0.25, -2.0]
        model.w.grad.add_(1)  # as weight decay may; the next step's correction does not see it


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "client 1: SCAFFOLD's scaffold/change/: tensor 'body.0.weight' is missing, and 3 more"),
        (
            {"scaffold/change/classifier.bias": torch.zeros(3)},
            "client 1: SCAFFOLD's scaffold/change/: tensor 'classifier.bias' has shape (3,), expected (10,)",
        ),
        (
            {"scaffold/change/classifier.bias": torch.full((10,), math.nan)},
            "client 1: its 'scaffold/change/classifier.bias' holds 10 nan or inf among 10 values",
        ),
    ],
)
def test_a_client_with_a_broken_variate_is_left_out(change, text):
    federation = Federation(experiment("fedpgd", "scaffold"))
    downlink = federation.server.downlink()
    uploads = {client: (30, federation.worker.fit(client, 1, downlink)) for client in range(3)}
    wire = uploads[1][1]
    broken = change or [name for name in wire if name.startswith("scaffold/")]
    for name in broken:
        if change:
            wire[name] = change[name]
        else:
            del wire[name]
    record = federation.server.finish_round(1, uploads)
    assert record.refused == {1: text}
    assert record.clients == (0, 2)
    assert all(tensor.isfinite().all() for tensor in federation.server.server_state.values())


def test_option_one_needs_a_trainer_that_gives_the_whole_gradient(snapshot):
    active = build_aggregator("scaffold", variant="I").correction().begin(local_task(Vector(1.0)))
    with snapshot.raises(UpdateError):
        active.finish(Vector(1.0))


# --- server optimisers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "betas"),
    [("fedadam", {"beta1": 0.0, "beta2": 0.5}), ("fedyogi", {"beta1": 0.5, "beta2": 0.25}), ("fedadagrad", {})],
)
def test_server_optimisers_by_hand(name, betas):
    """Two steps on one number; each round the clients' weighted mean stands 0.5, then -0.2, from the model."""
    aggregator = build_aggregator(name, weights="uniform", server_lr=0.1, tau=0.01, **betas)
    (b1, b2), found, memory, w, m, v = betas.values() or (0, 0), 1.0, {}, 1.0, 0.0, 0.0
    for step, d in enumerate((0.5, -0.2), start=1):
        vectors = [(found + d - 0.3,), (found + d + 0.3,)]
        result = combine(aggregator, vectors, [1, 9], start=(found,), server_state=memory, round=step)
        found, memory = result.state["w"].item(), result.server_state
        if name == "fedadagrad":
            v += d * d
            w += 0.1 * d / (math.sqrt(v) + 0.01)
        else:
            m = b1 * m + (1 - b1) * d
            v = v - (1 - b2) * d * d * math.copysign(1, v - d * d) if name == "fedyogi" else b2 * v + (1 - b2) * d * d
            w += 0.1 * (m / (1 - b1**step)) / (math.sqrt(v / (1 - b2**step)) + 0.01)
        assert found == pytest.approx(w, abs=1e-6)
        assert result.weights == {0: 0.5, 1: 0.5}


def test_server_optimisers_remember_parameters_of_any_name():
    """A slash separates the parts of a name in memory, and may be in a parameter's own."""
    states = []
    for name in ("w", "blocks/0/w"):
        aggregator, state, memory = build_aggregator("fedadam"), {name: torch.tensor([1.0])}, {}
        for round in (1, 2):
            updates = {0: LocalUpdate({name: state[name] + 0.5 / round}, 1)}
            result = aggregator.combine(AggregationTask(state, updates, memory, [name], 1, round))
            state, memory = result.state, result.server_state
        states.append(state[name])
    assert torch.equal(*states)


def test_server_optimisers_average_buffers():
    updates = {
        client: LocalUpdate({"w": torch.tensor([value]), "n": torch.tensor(count)}, 1)
        for client, (value, count) in enumerate([(1.0, 4), (3.0, 8)])
    }
    state = {"w": torch.tensor([1.0]), "n": torch.tensor(0)}
    result = build_aggregator("fedadam").combine(AggregationTask(state, updates, {}, ["w"], 2, 1))
    assert result.state["n"].item() == 6
    assert result.state["n"].dtype == torch.int64
    assert state["w"].item() == 1.0
