"""One training step of CalFAT (release), TRADES, MART and GAIRAT equals the published code's.

The numbers in reference_steps.json were made by running that code; see its "about". The model is
tiny and all its inputs are sines, so that the step can be repeated anywhere without a random
generator. Float32 and float64 agree on every gradient's sign here, so the numbers do not hang on a
platform's rounding.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.maths.attacks import CorrectIterates, attack_mode, gradient_ascent
from calfat_plugin.maths.losses import cross_entropy, kl_divergence
from calfat_plugin.modifiers.priors import RELEASE
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.losses_methods import gairat_loss, gairat_weights, mart_loss, trades_loss

REFERENCE = json.loads(Path(__file__).with_name("reference_steps.json").read_text("utf-8"))
THREAT = ThreatModel()
Y = torch.tensor([0, 2])
LOG_PRIOR = RELEASE.log_prior(torch.tensor([50, 30, 20, 0]))


def wave(*shape: int, freq: float, amp: float) -> Tensor:
    count = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return (amp * torch.sin(freq * count + 0.6)).reshape(shape).float()


X = 0.5 + wave(2, 1, 4, 4, freq=0.37, amp=0.5)
NOISE = wave(2, 1, 4, 4, freq=5.1, amp=1.5)


def tiny_model() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))
    values = [
        wave(2, 1, 3, 3, freq=1.7, amp=0.8),
        wave(2, freq=0.9, amp=0.2),
        wave(4, 8, freq=2.3, amp=0.9),
        wave(4, freq=1.1, amp=0.3),
    ]
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
    return model


def attack(model: nn.Module, loss, start: Tensor, observe=None) -> Tensor:
    with attack_mode(model):
        return gradient_ascent(
            model,
            X,
            loss,
            threat=THREAT,
            steps=THREAT.steps,
            step_size=float(THREAT.step_size),
            start=start,
            observe=observe,
        )


def near_start() -> Tensor:
    return X + 0.001 * NOISE


def calfat(model):
    with torch.no_grad():
        nat = RELEASE.inner(model(X), LOG_PRIOR)
    x_adv = attack(
        model,
        lambda z: kl_divergence(nat, RELEASE.inner(z, LOG_PRIOR), "sum"),
        near_start(),
    )
    return x_adv, cross_entropy(RELEASE.outer(model(x_adv), LOG_PRIOR), Y)


def trades(model):
    with torch.no_grad():
        nat = model(X)
    x_adv = attack(model, lambda z: kl_divergence(nat, z, "sum"), near_start())
    return x_adv, trades_loss(model(X), model(x_adv), Y, beta=6.0)


def mart(model):
    x_adv = attack(model, lambda z: cross_entropy(z, Y, "sum"), near_start())
    return x_adv, mart_loss(model(X), model(x_adv), Y, lam=6.0)


def gairat(model):
    counter = CorrectIterates(Y)
    start = (X + NOISE / 1.5 * (8 / 255)).clamp(0, 1)
    x_adv = attack(model, lambda z: cross_entropy(z, Y, "sum"), start, counter)
    assert counter.kappa.tolist() == [2, 0]
    weights = gairat_weights(counter.kappa, THREAT.steps, lam=-1.0)
    return x_adv, gairat_loss(cross_entropy(model(x_adv), Y, "none"), weights)


@pytest.mark.parametrize("method", [calfat, trades, mart, gairat])
def test_step_equals_published_code(method):
    reference = REFERENCE[method.__name__]
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=2e-3)
    x_adv, loss = method(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert x_adv.flatten().tolist() == pytest.approx(reference["x_adv"], abs=1e-6)
    assert loss.item() == pytest.approx(reference["loss"], abs=2e-6)
    assert weights.tolist() == pytest.approx(reference["weights"], abs=1e-6)
