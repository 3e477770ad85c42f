"""FedRBN: the dual layers, the two roles, what is personal, and how noise statistics propagate."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

from calfat_plugin.errors import ModelError
from calfat_plugin.models.norms import dual_norms, using_branch, with_dual_norms
from calfat_plugin.results import LocalUpdate
from calfat_plugin.trainers.fedrbn import _lent, propagation_weights
from tests.methods.helpers import (
    SETTINGS,
    Federation,
    TinyNet,
    build_method,
    experiment,
    local_task,
    same_bits,
    tiny_data,
)

AT_THEN_ST = "at st st"


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, eps=1e-3, momentum=0.3), nn.ReLU(), nn.Flatten())


# --- the layer --------------------------------------------------------------------------------------------------------


def test_a_branch_normalises_as_the_layer_it_replaces():
    plain, dual = normed(), normed()
    dual.load_state_dict(plain.state_dict())
    with_dual_norms(dual)
    with torch.no_grad():
        for layer in (plain[1], dual[1]):
            layer.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
            layer.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    x = tiny_data().x
    for _ in range(2):
        assert torch.allclose(dual(x), plain(x), atol=1e-6)
    assert torch.allclose(dual[1].noise.running_mean, plain[1].running_mean)
    assert torch.allclose(dual[1].noise.running_var, plain[1].running_var)
    assert dual[1].noise.num_batches_tracked == plain[1].num_batches_tracked == 2
    assert torch.allclose(dual.eval()(x), plain.eval()(x), atol=1e-6)


def test_branches_keep_apart_and_frozen_ones_stay():
    model = with_dual_norms(normed())
    layer, x = model[1], tiny_data().x
    start = copy.deepcopy(layer.noise.state_dict())
    with using_branch(model, "clean"):
        model(x)
    assert layer.clean.num_batches_tracked == 1
    assert same_bits(layer.noise.state_dict(), start)
    with using_branch(model, "noise", frozen=True):
        frozen = model(x)
    assert same_bits(layer.noise.state_dict(), start)
    assert torch.allclose(frozen, model.eval()(x))
    assert layer.noise.training is False  # .eval() above reached it: the switch put the mode back to training before
    assert layer.branch == "noise"


def test_a_model_without_normalisation_gets_one_after_each_convolution():
    model = TinyNet()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with_dual_norms(model)
    assert list(dual_norms(model)) == ["body.0.norm"]
    assert torch.equal(model.state_dict()["body.0.conv.weight"], before["body.0.weight"])
    norm = model.body[0].norm
    assert norm.weight.tolist() == [1.0] * 3
    assert norm.bias.tolist() == [0.0] * 3
    assert list(dual_norms(with_dual_norms(normed()))) == ["1"]  # one that has normalisation gets no further ones


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(1, 8)),
        nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)),
        nn.Sequential(nn.BatchNorm2d(3, momentum=None)),
    ],
)
def test_models_that_cannot_be_made_dual(model, snapshot):
    with snapshot.raises(ModelError):
        with_dual_norms(model)


# --- roles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "clients", "chosen"),
    [(1.0, 5, [0, 1, 2, 3, 4]), (0.2, 5, [4]), (0.4, 5, [2, 4]), (0.5, 4, [1, 3]), (0.29, 100, 29), (0.07, 100, 7)],
)
def test_roles_by_fraction_are_spread_evenly(fraction, clients, chosen):
    options = build_method("fedrbn", at_fraction=fraction).options
    adversarial = [client for client in range(clients) if options.trains_adversarially(client)]
    assert (adversarial if isinstance(chosen, list) else len(adversarial)) == chosen


# --- one client's step ------------------------------------------------------------------------------------------------


def test_an_at_client_fills_both_branches_and_an_st_client_only_the_clean_one():
    fresh = build_method("fedrbn").adapt_model(TinyNet()).state_dict()
    for client, fills in ((0, True), (1, False)):
        method = build_method("fedrbn", roles=AT_THEN_ST)
        model = method.adapt_model(TinyNet())
        update = method.fit(local_task(model, tiny_data(count=4), client=client, round=20))
        moved = {name: not torch.equal(update.state[name], fresh[name]) for name in fresh if "running" in name}
        assert moved["body.0.norm.clean.running_mean"]
        assert moved["body.0.norm.noise.running_mean"] is fills


def test_an_at_client_weighs_clean_and_adversarial_loss():
    # One batch, plain SGD: the step is linear in the two gradients.
    settings = dataclasses.replace(SETTINGS, momentum=0.0, weight_decay=0.0)

    def step(lam):
        method = build_method("fedrbn", lam=lam)
        task = local_task(method.adapt_model(TinyNet()), tiny_data(count=4), settings=settings)
        return method.fit(task).state["classifier.weight"]

    assert torch.allclose(step(0.25), 0.75 * step(0.0) + 0.25 * step(1.0), atol=1e-6)
    assert not torch.allclose(step(0.0), step(1.0), atol=1e-3)


def gradient_steps(pnc, round, *, warmup=10, scale=1.0):
    """The st client's plain SGD step of one batch, as a gradient, and the gradients that it should be made of."""
    settings = dataclasses.replace(SETTINGS, momentum=0.0, weight_decay=0.0)
    method = build_method("fedrbn", roles=AT_THEN_ST, pnc=pnc, pnc_warmup=warmup)
    model = method.adapt_model(TinyNet())
    with torch.no_grad():
        model.body[0].norm.noise.running_var.fill_(1 / scale**2)
        model.body[0].norm.noise.running_mean.fill_(0.2)
    data = tiny_data(count=4)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def gradients(branch, frozen):
        twin = copy.deepcopy(model).train()
        with using_branch(twin, branch, frozen=frozen):
            nn.functional.cross_entropy(twin(data.x), data.y).backward()
        return {name: parameter.grad for name, parameter in twin.named_parameters()}

    clean, noise = gradients("clean", False), gradients("noise", True)
    update = method.fit(local_task(model, data, client=1, round=round, settings=settings))
    made = {name: (start[name] - update.state[name]) / settings.learning_rate for name in start}
    return made, clean, noise


def test_the_gradient_through_the_noise_branch_is_clipped():
    made, clean, noise = gradient_steps(0.5, 11, scale=300.0)
    norm = 0.5 * torch.stack([gradient.square().sum() for gradient in noise.values()]).sum().sqrt()
    assert norm > 20
    factor = 0.5 * 10 / norm
    for name in made:
        assert torch.allclose(made[name], 0.5 * clean[name] + factor * noise[name], atol=2e-3, rtol=1e-3)


# --- propagation ------------------------------------------------------------------------------------------------------


def update_with(clean, noise, noise_var=1.0):
    """An update of one dual layer with two channels."""
    state = {"w": torch.zeros(1)}
    for branch, mean, var in (("clean", clean, (1.0, 1.0)), ("noise", noise, (noise_var, noise_var))):
        state[f"n.{branch}.running_mean"] = torch.tensor(mean)
        state[f"n.{branch}.running_var"] = torch.tensor(var)
    return LocalUpdate(state, 1)


NAMES = sorted(name for name in update_with((0.0, 0.0), (0.0, 0.0)).state if name.startswith("n."))


def lent(method, own, sources):
    return _lent(own.state, [source.state for source in sources], method.options)


def test_one_at_client_is_copied_bit_for_bit():
    method = build_method("fedrbn", roles=AT_THEN_ST)
    source = update_with((0.1, 0.7), (0.123456789, -3.3), noise_var=0.777)
    given = lent(method, update_with((1.0, 0.0), (9.0, 9.0)), [source])
    assert sorted(given) == ["n.noise.running_mean", "n.noise.running_var"]
    assert all(torch.equal(given[name], source.state[name]) for name in given)


def layer(cos_mean, cos_var):
    """Statistics at angles of these cosines to those of ``TARGET``."""
    mean, var = (torch.tensor([cosine, math.sqrt(1 - cosine**2)]) for cosine in (cos_mean, cos_var))
    return 3 * mean, 0.5 * var


TARGET = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])


def of_layers(*layers):
    kinds = "mean", "var"
    return {f"{n}.clean.running_{kind}": t for n, own in enumerate(layers) for kind, t in zip(kinds, own, strict=True)}


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([[layer(1, 1)], [layer(0.98, 0.96)]], [0.952574, 0.047426]),
        ([[layer(1, 1)] * 3, [layer(0.98, 0.96)] * 3], [0.952574, 0.047426]),  # more layers do not sharpen them
        ([[layer(1, 1), layer(0.96, 0.92)], [layer(0.98, 0.96)] * 2], [0.5, 0.5]),  # the mean over layers
        ([[layer(1, 1)], [(-TARGET[0], -TARGET[1])]], [1.0, 0.0]),  # and nothing overflows
    ],
)
def test_weights_of_at_clients(sources, expected):
    own = of_layers(*[TARGET] * len(sources[0]))
    assert propagation_weights(own, [of_layers(*each) for each in sources]) == pytest.approx(expected, abs=1e-4)


def test_like_clients_lend_more():
    method = build_method("fedrbn")
    own = update_with((1.0, 0.0), (0.0, 0.0))
    near = update_with((1.0, 0.0), (1.0, 1.0))  # cosines (1, 1)
    far = update_with((0.94, 0.341174), (0.0, 0.0))  # cosines (.94, 1): their mean is .97, as of (.98, .96)
    assert lent(method, own, [near, far])["n.noise.running_mean"].tolist() == pytest.approx(
        [0.952574, 0.952574], abs=1e-4
    )
    equal = build_method("fedrbn", similarity="equal")
    assert lent(equal, own, [near, far])["n.noise.running_mean"].tolist() == pytest.approx([0.5, 0.5])


def test_debias_moves_borrowed_statistics_along_the_clean_difference():
    method = build_method("fedrbn", debias=0.5)
    own, source = update_with((3.0, 1.0), (0.0, 0.0)), update_with((1.0, 1.0), (5.0, 5.0))
    assert lent(method, own, [source])["n.noise.running_mean"].tolist() == pytest.approx([6.0, 5.0])


def test_the_server_sends_along_what_st_clients_need():
    method = build_method("fedrbn", roles=AT_THEN_ST)
    updates = {client: update_with((1.0, 0.0), (float(client), 2.0)) for client in range(3)}
    sent = method.broadcast(updates)
    assert sorted(sent) == [f"fedrbn/at/0/{name}" for name in NAMES]
    assert sorted(method.broadcast({0: updates[0]})) == sorted(sent)  # the next round may have st clients
    assert method.broadcast({1: updates[1]}) == {}
    for everyone in ({}, {"roles": "at at at"}):  # nobody borrows
        assert build_method("fedrbn", **everyone).broadcast(updates) == {}


def test_each_client_borrows_by_its_own_options():
    """The server evaluates what the clients of a group hold."""
    run = build_method("fedrbn", similarity="equal", role="at")
    group = build_method("fedrbn", role="st")
    updates = {
        0: update_with((1.0, 0.0), (1.0, 1.0)),
        1: update_with((0.94, 0.341174), (0.0, 0.0)),
        2: update_with((1.0, 0.0), (9.0, 9.0)),
    }
    mean = run.among({0: run, 1: run, 2: group}).evaluated_personal(updates, NAMES)
    held = lent(group, updates[2], [updates[0], updates[1]])["n.noise.running_mean"]
    assert mean["n.noise.running_mean"].tolist() == pytest.approx(((1.0 + 0.0 + held) / 3).tolist())


# --- in a federation --------------------------------------------------------------------------------------------------

ROLES = {"name": "fedrbn", "roles": AT_THEN_ST, "pnc_warmup": 1}


def test_personal_tensors_stay_with_their_client():
    federation = Federation(experiment(ROLES))
    federation.play()
    assert {norm.branch for norm in dual_norms(federation.server._model).values()} == {"noise"}  # it is evaluated so
    personal = [name for name in federation.server.state if ".norm." in name]
    states = federation.worker.client_states
    for client, kept in states.items():
        assert sorted(kept) == sorted(f"personal/{name}" for name in personal), client
    first = "body.0.norm.clean.running_mean"
    assert first in personal
    assert not torch.equal(states[0][f"personal/{first}"], states[1][f"personal/{first}"])
    mean = sum(states[client][f"personal/{first}"] for client in range(3)) / 3
    assert torch.allclose(federation.server.state[first], mean)


def test_a_client_trains_on_from_its_own_personal_tensors():
    """And not from the mean of all clients, which the server sends: a marked running mean fades step by step."""
    federation = Federation(experiment(ROLES))
    federation.play()
    name = "body.0.norm.clean.running_mean"
    kept = federation.worker.client_states[0]
    federation.worker.client_states[0] = {**kept, f"personal/{name}": torch.full_like(kept[f"personal/{name}"], 1e3)}
    downlink = federation.server.downlink()
    update = federation.worker.fit(0, 2, downlink)
    assert downlink[name].max() < 1
    assert update[name].min() > 1


@pytest.mark.parametrize(
    ("value", "clients", "said"),
    [
        (9e3, (0, 1, 2), "dominant-personal: client 1 moves its personal tensors by "),
        (1e6, (0, 2), "client 1: tensor 'body.0.norm.clean.running_mean' changes by 1e+06; expected up to 1e+04"),
    ],
)
def test_who_makes_the_evaluated_statistics_alone_is_named_or_refused(value, clients, said):
    """A robust rule combines what is not personal; of personal tensors the server evaluates the plain mean."""
    federation = Federation(experiment(ROLES, "median"))
    downlink, first = federation.server.downlink(), "body.0.norm.clean.running_mean"
    uploads = {client: (30, federation.worker.fit(client, 1, downlink)) for client in range(3)}
    uploads[1][1][first] = torch.full_like(uploads[1][1][first], value)
    record = federation.server.finish_round(1, uploads)
    assert record.clients == clients
    (found,) = [text for text in (*record.alarms, *record.refused.values()) if "client 1" in text]
    assert found.startswith(said)


def test_aggregators_leave_personal_tensors_alone():
    for aggregator in ("scaffold", "fedprox", "fedadam"):
        federation = Federation(experiment(ROLES, aggregator))
        federation.play()
        federation.play()
        extras = [*federation.server.server_state, *federation.server.broadcast]
        assert not any(".norm." in name for name in extras if not name.startswith("fedrbn/"))
        kept = federation.worker.client_states[1]
        assert not any(".norm." in name for name in kept if not name.startswith("personal/"))
    task = local_task(personal=frozenset({"classifier.bias"}))
    assert "classifier.bias" not in task.shared_parameters()
    assert "classifier.weight" in task.shared_parameters()
