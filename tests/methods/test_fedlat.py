"""Fed-LAT: clean rounds, then a model that is linear in its weights trains, is attacked, evaluated and stored."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.functional import cross_entropy

from calfat_plugin.entries import AggregatorEntry, ModelEntry
from calfat_plugin.errors import CalfatError
from calfat_plugin.maths.attacks import attack_mode
from calfat_plugin.models.base import PixelConv2d
from calfat_plugin.models.networks import Linearised
from calfat_plugin.options import describe_options
from calfat_plugin.results import PASSES
from calfat_plugin.runs.checkpoints import load_checkpoint, save_checkpoint
from calfat_plugin.testing.federation import TinyFederation
from calfat_plugin.testing.tiny import tiny_experiment
from tests.methods.helpers import (
    TinyNet,
    build_method,
    experiment,
    local_task,
    registry,
    same_bits,
    small_digits,
    tiny_data,
)
from tests.snapshot import TextSnapshot

AGGREGATORS = [entry for entry, _ in registry().offers(AggregatorEntry)]
X = tiny_data(3, 6).x.double()


def moved(network: nn.Module, by: float = 0.3) -> Linearised:
    """Linearised at the network's weights, with weights of its own, in evaluation mode."""
    model, stream = Linearised(network), torch.Generator().manual_seed(1)
    model.linearise()
    with torch.no_grad():
        for weight in model.network.parameters():
            weight += by * torch.randn(weight.shape, generator=stream).to(weight)
    return model.eval()


def expanded(model: Linearised, x: Tensor) -> Tensor:
    """f(x; w0) + J (w - w0) with the whole Jacobian, for networks without convolutions of the package."""
    w0 = {name: weight.detach() for name, weight in model.origin.named_parameters()}
    jacobian = jacrev(lambda weights: functional_call(model.origin, weights, (x,)))(w0)
    logits: Tensor = functional_call(model.origin, w0, (x,))
    for name, weight in model.network.named_parameters():
        logits = logits + (jacobian[name] * (weight - w0[name])).flatten(2).sum(2)
    return logits


# --- the linearised model ---------------------------------------------------------------------------------------------


def test_before_it_is_linearised_it_is_the_network() -> None:
    network = TinyNet(norm=True)
    alone, model = copy.deepcopy(network), Linearised(network)
    images = tiny_data(3, 6).x
    assert torch.equal(model.train()(images), alone.train()(images))  # in training mode, with the batch's statistics
    assert torch.equal(model.eval()(images), alone.eval()(images))
    assert same_bits(model.network.state_dict(), alone.state_dict())
    assert (model.passes, model.linear) == (1, False)


def test_at_w0_it_is_the_network_in_evaluation_mode() -> None:
    network = TinyNet(norm=True)
    network.train()(tiny_data(4, 9).x)  # statistics that are not those of a new layer
    model = Linearised(network)
    model.linearise()
    images = tiny_data(3, 6).x
    assert torch.equal(model.train()(images), network.eval()(images))
    assert (model.passes, model.linear) == (3, True)


@pytest.mark.parametrize("norm", [False, True])
def test_it_is_the_first_order_expansion(norm: bool) -> None:
    """By the whole Jacobian, and by differences of the network at weights on both sides of w0."""
    model = moved(TinyNet(norm=norm).double())
    found = model(X)
    assert torch.allclose(found, expanded(model, X), rtol=0, atol=1e-12)
    w0, step = dict(model.origin.named_parameters()), 1e-6
    change = {name: weight - w0[name] for name, weight in model.network.named_parameters()}
    ahead, behind = (
        functional_call(model.origin, {name: w0[name] + sign * step * change[name] for name in w0}, (X,))
        for sign in (1, -1)
    )
    assert torch.allclose(found, model.origin(X) + (ahead - behind) / (2 * step), rtol=0, atol=1e-6)
    assert not torch.allclose(found, model.network.eval()(X), rtol=0, atol=0.1)


def test_a_network_that_is_one_layer_can_be_linearised() -> None:
    """Its parameters have no name of a layer in front. It is linear in its weights, so the expansion is exact."""
    model = moved(nn.Linear(3, 2))
    x = torch.rand(5, 3)
    torch.testing.assert_close(model(x), model.network(x))


def test_its_gradients_are_those_of_the_expansion() -> None:
    """Of the images, which an attack follows; of w, constant; w0 has none."""
    model = moved(TinyNet(norm=True).double())
    images = X.clone().requires_grad_()
    labels = torch.arange(6) % 4
    wanted = torch.autograd.grad(cross_entropy(expanded(model, images), labels), [images, *model.network.parameters()])
    with attack_mode(model):
        (seen,) = torch.autograd.grad(cross_entropy(model(images), labels), images)
    assert torch.allclose(seen, wanted[0], rtol=0, atol=1e-12)
    cross_entropy(model(images), labels).backward()
    for weight, right in zip(model.network.parameters(), wanted[1:], strict=True):
        assert weight.grad is not None
        assert torch.allclose(weight.grad, right, rtol=0, atol=1e-12)
    assert all(weight.grad is None for weight in model.origin.parameters())


NETWORKS: dict[str, dict[str, Any]] = {
    "cnn": {"image_size": (18, 18)},
    "cnn_small": {"norm": "group"},
    "cnn_strided": {"norm": "batch"},
    "cnn_mcmahan": {"image_size": (28, 28), "padding": 2},
    "vgg8": {"image_size": (8, 8)},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_each_network_can_be_linearised_and_attacked(name: str) -> None:
    entry, _ = registry().find(ModelEntry, name)
    torch.manual_seed(0)
    network = entry.load()(in_channels=1, num_classes=10, **{"image_size": (8, 8), **NETWORKS[name]}).double()
    model, images = moved(network, 1e-3), torch.rand(2, 1, *NETWORKS[name].get("image_size", (8, 8))).double()
    step, along = 1e-6, torch.randn_like(images)
    with attack_mode(model):
        (seen,) = torch.autograd.grad(model(images.requires_grad_()).logsumexp(1).sum(), images)
        with torch.no_grad():
            ahead, behind = (model(images + sign * step * along).logsumexp(1).sum() for sign in (1, -1))
    assert float((seen * along).sum()) == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-4, abs=1e-9)
    model.train()(images).sum().backward()
    assert all(weight.grad is not None for weight in model.network.parameters())


def test_a_convolution_that_gets_the_image_itself_has_its_derivative() -> None:
    """Its own way to the gradient of an attacked image knows of no weights that have a tangent."""
    model = moved(nn.Sequential(PixelConv2d(1, 2, 3), nn.Flatten()).double())
    with attack_mode(model):
        (seen,) = torch.autograd.grad(model(images := X.clone().requires_grad_()).sum(), images)
    weight = model.network[0].weight.detach()  # type: ignore[index]  # its type is Module
    assert torch.allclose(seen, nn.functional.conv_transpose2d(torch.ones(6, 2, 2, 2).double(), weight))


def test_it_drops_nothing_out_and_moves_no_statistics() -> None:
    network = TinyNet(norm=True)
    network.body.append(nn.Dropout(0.5))
    model, images = moved(network).train(), tiny_data(3, 6).x
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert torch.equal(model(images), model(images))
    assert same_bits(before, model.state_dict())


def test_bfloat16_is_not_for_it() -> None:
    """Derivatives of group normalisation have another type than what they are of, and convolutions refuse them."""
    entry, _ = registry().find(ModelEntry, "cnn_small")
    model = moved(entry.load()(norm="group"), 0.01)
    images = torch.rand(2, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(images)
    assert found.dtype == torch.float32
    assert torch.equal(found, model(images))


def test_its_state_says_all_that_it_is() -> None:
    model, other = moved(TinyNet(norm=True)), Linearised(TinyNet(5, norm=True))
    images = tiny_data(3, 6).x
    plain = Linearised(TinyNet(5, norm=True)).eval()
    before = plain(images)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(images), model(images))
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.eval()(images), before)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_group_normalisation_trains_from_the_first_linear_round_on(precision: str) -> None:
    """Its derivative takes no map that is channels last in memory, which the loop has to see before it chooses."""
    entry, _ = registry().find(ModelEntry, "cnn_small")
    data = small_digits().train.subset(range(9))
    for round in (7, 8):
        model = Linearised(entry.load()(norm="group"))
        settings = {"round": round, "clean_rounds": 7, "precision": precision}
        task = local_task(model, data, class_counts=torch.ones(10), **settings)
        build_method("fedlat").fit(task)
        assert model.linear == (round == 8)


# --- training ---------------------------------------------------------------------------------------------------------


def test_w0_is_what_clean_rounds_gave() -> None:
    """Also where the client comes to it first: the weights of the global model, not those that it trains to."""
    model = Linearised(TinyNet(norm=True))
    model.network.load_state_dict(TinyNet(8, norm=True).state_dict())  # clean training
    update = build_method("fedlat").fit(local_task(model, round=8, clean_rounds=7))
    wanted = {f"origin.{name}": tensor for name, tensor in TinyNet(8, norm=True).state_dict().items()}
    assert same_bits({name: update.state[name] for name in wanted}, wanted)
    assert int(update.state["_extra_state"]) == 1
    assert update.metrics[PASSES] == 3 * (local_task().threat.steps + 1) * update.num_examples
    other = Linearised(TinyNet(3, norm=True))
    other.load_state_dict(update.state)
    later = build_method("fedlat").fit(local_task(other, round=9, clean_rounds=7))
    assert same_bits({name: later.state[name] for name in wanted}, wanted)  # and it stays


@cache
def trained(aggregator: str) -> tuple[dict[str, Tensor], TinyFederation]:
    """(the global model after two clean rounds, the federation after two more)."""
    entry, _ = registry().find(AggregatorEntry, aggregator)
    options = {"f": 0} if "f" in {info.name for info in describe_options(entry.config)} else {}
    options |= {"start_round": 3} if aggregator == "sfat" else {}
    chosen = {"trainer": {"name": "fedlat", "clean_rounds": 2}, "aggregator": {"name": aggregator, **options}}
    federation = TinyFederation(tiny_experiment(registry(), **chosen, evaluators=["fgsm"]))
    for _ in range(2):
        federation.play()
    clean = dict(federation.server.state)
    for _ in range(2):
        assert federation.play().refused == {}
    return clean, federation


@pytest.mark.parametrize("aggregator", [entry.name for entry in AGGREGATORS])
def test_every_aggregator_leaves_w0_alone(aggregator: str) -> None:
    clean, federation = trained(aggregator)
    after = federation.server.state
    assert (int(clean["_extra_state"]), int(after["_extra_state"])) == (0, 1)
    for name, tensor in clean.items():
        if name.startswith("network."):
            assert torch.equal(after[name.replace("network.", "origin.", 1)], tensor)
    assert not torch.equal(after["network.classifier.weight"], clean["network.classifier.weight"])


def test_what_is_evaluated_and_stored_is_the_linearised_model(tmp_path: Path) -> None:
    """By its checkpoint, and by an attack that an evaluator makes through it."""
    _, federation = trained("fedavg")
    save_checkpoint(tmp_path / "last.safetensors", federation.snapshot(), {})
    state = load_checkpoint(tmp_path / "last.safetensors")[0].global_state
    run, data = federation.server.experiment, federation.server.dataset.test
    model = run.build_model(federation.server.dataset, run.build_trainer()).eval()
    model.load_state_dict(dict(state))
    assert isinstance(model, Linearised)
    with torch.no_grad():
        logits = expanded(model, data.x)
        for seen in (model, federation.server._model):
            assert torch.allclose(seen(data.x), logits, rtol=0, atol=1e-5)
        assert not torch.allclose(model.network(data.x), logits, rtol=0, atol=1e-3)
    images = data.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(expanded(model, images), data.y), images)
    attacked = (data.x + 0.1 * gradient.sign()).clamp(0, 1)
    with torch.no_grad():
        right = (logits.argmax(1) == data.y) & (expanded(model, attacked).argmax(1) == data.y)
    (found,) = federation.server.final_evaluation()
    assert found.accuracy == pytest.approx(float(right.double().mean()))


# --- what is refused --------------------------------------------------------------------------------------------------

GROUP = [{"ids": 0, "trainer": {"name": "fedlat", "clean_rounds": 0}}]


@pytest.mark.parametrize(
    ("trainer", "aggregator", "settings"),
    [
        ({"name": "fedlat", "clean_rounds": 2}, "fedavg", {}),
        ({"name": "fedlat", "clean_rounds": -1}, "fedavg", {}),
        ({"name": "fedlat", "clean_rounds": 2}, "sfat", {"train_args__comm_round": 3}),
        ({"name": "fedlat", "clean_rounds": 1}, "fedavg", {"calfat__clients": GROUP}),
        ({"name": "fedlat", "clean_rounds": 1}, "fedavg", {"calfat__clients": [{"ids": 0, "trainer": "fedpgd"}]}),
        ({"name": "fedlat", "clean_rounds": 1, "loss": "robal"}, "fedavg", {}),
        ({"name": "fedlat", "clean_rounds": 1}, "fedavg", {"calfat__ema": {"decay": 0.5}}),
    ],
    ids=["no round left", "negative", "sfat", "groups", "beside others", "robal", "moving average"],
)
def test_refusals(trainer: Any, aggregator: str, settings: dict[str, Any], snapshot: TextSnapshot) -> None:
    with snapshot.raises(CalfatError):
        experiment(trainer, aggregator, **settings)


def test_what_is_not_refused() -> None:
    one = {"name": "fedlat", "clean_rounds": 1}
    for aggregator, settings in (
        ("sfat", {}),
        ({"name": "sfat", "start_round": 5}, {}),
        ("fedavg", {"calfat__clients": [{"ids": 0, "threat": {"eps": 0.05}}]}),
        ("fedavg", {"calfat__clients": [{"ids": 0, "trainer": {**one, "loss": "calibrated"}}]}),
        ("fedavg", {"calfat__threat__inner": "free"}),
    ):
        assert experiment(one, aggregator, **settings).trainer.name == "fedlat"
    assert experiment({**one, "clean_rounds": 0}, "fedavg", calfat__ema={"decay": 0.5}).ema is not None
