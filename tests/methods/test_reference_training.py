"""One whole local training equals one step of the published code (CalFAT release, TRADES, MART, GAIRAT).

The numbers are those of tests/maths/test_reference_step.py; here they come out of the training loop, the methods'
losses and their options, instead of the bare arithmetic.
"""

from __future__ import annotations

import pytest
import torch

from calfat_plugin.datasets import ImageData
from calfat_plugin.interfaces import TrainSettings
from calfat_plugin.threat import ThreatModel
from tests.maths.test_reference_step import NOISE, REFERENCE, X, Y, tiny_model
from tests.methods.helpers import build_method, local_task

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
            crafted["x_adv"] = batch.x_adv[self.where(batch.x_nat).argsort()]
            return super().train_loss(batch)

        @staticmethod
        def where(x_nat):
            return torch.tensor([next(i for i in range(2) if torch.equal(X[i], x)) for x in x_nat])

    model = tiny_model()
    task = local_task(
        model,
        ImageData(X, Y),
        settings=SETTINGS,
        threat=ThreatModel(),
        class_counts=torch.tensor([50, 30, 20, 0]),
    )
    update = Repeatable(method.options, method.modifier).fit(task)
    weights = torch.cat([tensor.flatten() for tensor in update.state.values()])
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
