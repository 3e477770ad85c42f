"""Fed-AWP: the gradient is that at the perturbed weights, the step starts from the unperturbed ones."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from calfat_plugin.trainers.additions import perturbation
from tests.methods.helpers import SETTINGS, TinyNet, build_method, local_task, same_bits, tiny_data, train


def test_before_its_warm_up_ends_it_is_fedpgd():
    states = [
        train(build_method(name, **options), local_task(round=10)).state
        for name, options in (("fedawp", {"warmup": 10}), ("fedpgd", {}))
    ]
    assert same_bits(*states)


def test_without_length_it_is_fedpgd():
    states = [
        train(build_method(name, **options), local_task(round=11)).state
        for name, options in (("fedawp", {"gamma": 0.0}), ("fedpgd", {}))
    ]
    assert all(torch.allclose(states[0][name], states[1][name], atol=1e-6) for name in states[0])


@pytest.mark.parametrize("gamma", [0.005, 0.3])
def test_one_step(gamma):
    settings = dataclasses.replace(SETTINGS, momentum=0.0, weight_decay=0.0)
    method = build_method("fedawp", gamma=gamma, warmup=0)
    seen = {}

    class Watched(type(method)):
        def train_loss(self, batch):
            seen.update(x_adv=batch.x_adv, y=batch.y)
            return super().train_loss(batch)

    start = TinyNet()
    update = Watched(method.options, method.modifier).fit(
        local_task(copy.deepcopy(start), tiny_data(count=4), settings=settings)
    )

    def gradients(model):
        loss = nn.functional.cross_entropy(model(seen["x_adv"]), seen["y"])
        parts = torch.autograd.grad(loss, list(model.parameters()))
        return loss.item(), {name: part for (name, _), part in zip(model.named_parameters(), parts, strict=True)}

    _, uphill = gradients(start)
    moved = copy.deepcopy(start)
    with torch.no_grad():
        for name, weight in moved.named_parameters():
            if weight.dim() > 1:
                weight += gamma * weight.norm() / uphill[name].norm() * uphill[name]
    loss, expected = gradients(moved)
    assert update.metrics["loss"] == pytest.approx(loss, abs=1e-6)
    for name, weight in start.named_parameters():
        assert torch.allclose(update.state[name], weight - 0.1 * expected[name], atol=1e-6)


def test_statistics_count_one_pass_a_batch():
    class Normed(TinyNet):
        def __init__(self):
            super().__init__()
            self.body.insert(1, nn.BatchNorm2d(3))

    update = build_method("fedawp", warmup=0).fit(local_task(Normed(), tiny_data(count=8)))
    assert update.state["body.1.num_batches_tracked"].item() == 2


def perturbed(gradient, gamma=0.005):
    return perturbation(torch.tensor([3.0, 4.0]), torch.tensor(gradient), gamma).tolist()


def test_vector():
    assert perturbed([0.0, 2.0]) == pytest.approx([0.0, 0.025])


@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25])
def test_length_is_gamma_times_the_weights_however_large_the_gradient(size):
    assert perturbed([3 * size, 4 * size], gamma=0.1) == pytest.approx([0.3, 0.4])


def test_a_zero_gradient_moves_nothing():
    assert perturbed([0.0, 0.0]) == [0.0, 0.0]
