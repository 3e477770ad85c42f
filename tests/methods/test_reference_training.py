"""One whole local training equals one step of the published code (CalFAT release, TRADES, MART, GAIRAT).

The numbers in reference_steps.json were made by running that code; see its "about". The model is tiny and all its
inputs are sines, so that the step can be repeated anywhere without a random generator. Float32 and float64 agree on
every gradient's sign here, so the numbers do not hang on a platform's rounding.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.interfaces import TrainSettings
from calfat_plugin.threat import ThreatModel
from tests.methods.helpers import build_method, local_task

REFERENCE = json.loads(Path(__file__).with_name("reference_steps.json").read_text("utf-8"))
Y = torch.tensor([0, 2])


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


SETTINGS = TrainSettings(epochs=1, batch_size=2, learning_rate=0.01, momentum=0.9, weight_decay=2e-3, num_rounds=150)


def near(x, task):
    return x + 0.001 * NOISE


def uniform(x, task):
    return task.threat.project(x + NOISE / 1.5 * (8 / 255), x)


@pytest.mark.parametrize(
    ("name", "options", "reference", "start"),
    [
        ("calfat", {"parameterisation": "release"}, "calfat", near),
        ("fedtrades", {}, "trades", near),
        ("fedmart", {}, "mart", near),
        ("fedgairat", {"start_round": 1}, "gairat", uniform),
    ],
)
def test_one_local_step_equals_the_published_code(name, options, reference, start):
    method = build_method(name, **options)
    crafted = {}

    class Repeatable(type(method)):
        """The batch's noise by example, whatever order the loader gives; and a look at x_adv."""

        def start(self, x_nat, task, generator):
            where = self.where(x_nat)
            return start(X, task)[where]

        def train_loss(self, batch):
            order = self.where(batch.x_nat).argsort()
            crafted["x_adv"] = batch.x_adv[order]
            crafted["kappa"] = None if batch.kappa is None else batch.kappa[order].tolist()
            return super().train_loss(batch)

        @staticmethod
        def where(x_nat):
            return torch.tensor([next(i for i in range(2) if torch.equal(X[i], x)) for x in x_nat])

    model = tiny_model()
    task = local_task(
        model, ImageData(X, Y), settings=SETTINGS, threat=ThreatModel(), class_counts=torch.tensor([50, 30, 20, 0])
    )
    update = Repeatable(method.options, method.modifier).fit(task)
    weights = torch.cat([tensor.flatten() for tensor in update.state.values()])
    assert crafted["kappa"] == ([2, 0] if reference == "gairat" else None)
    assert crafted["x_adv"].flatten().tolist() == pytest.approx(REFERENCE[reference]["x_adv"], abs=1e-6)
    assert update.metrics["loss"] == pytest.approx(REFERENCE[reference]["loss"], abs=2e-6)
    assert weights.tolist() == pytest.approx(REFERENCE[reference]["weights"], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "std"), [("fedtrades", 1e-3), ("fedmart", 1e-3), ("calfat", 1e-3), ("fedpgd", None), ("fedgairat", None)]
)
def test_where_attacks_start(name, std):
    x = torch.full((64, 1, 8, 8), 0.5)
    task = local_task()
    step = build_method(name).start(x, task, torch.Generator().manual_seed(3)) - x
    if std is None:  # uniform in the ball
        assert step.abs().max().item() == pytest.approx(0.1, abs=1e-3)
        assert step.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.05)
    else:
        assert step.std().item() == pytest.approx(std, rel=0.05)
        assert step.mean().abs().item() < std / 10
