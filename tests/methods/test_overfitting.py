"""Training that has overfitted an attack of one step is noticed: by the client on a few images, by the server."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.federation.outliers import overfit_alarms
from calfat_plugin.interfaces import LocalTask
from calfat_plugin.results import OVERFIT
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.fedpgd import FedPGD
from tests.methods.helpers import SETTINGS, build_method, local_task, train
from tests.methods.test_inner_attacks import build_inner

EPS = 1 / 8


class Bumpy(nn.Module):
    """Grey images are right, and so are they a whole eps brighter; half an eps brighter they are wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        brighter = x.flatten(1).mean(dim=1) - 0.5
        margin = (brighter - EPS / 2).square() - (EPS / 4) ** 2 + self.weight
        return 1e3 * torch.stack([margin, torch.zeros_like(margin)], dim=1)


class Flat(Bumpy):
    """Grey images are wrong as soon as they are brighter."""

    def forward(self, x: Tensor) -> Tensor:
        margin = 0.5 + EPS / 4 - x.flatten(1).mean(dim=1) + self.weight
        return 1e3 * torch.stack([margin, torch.zeros_like(margin)], dim=1)


def gap(model: nn.Module, images: int = 12, method: Any = None, **task: Any) -> float | None:
    """What a client says after a round of one batch."""
    data = ImageData(torch.full((images, 1, 4, 4), 0.5), torch.zeros(images, dtype=torch.int64))
    settings = dataclasses.replace(SETTINGS, epochs=1, batch_size=images, learning_rate=1e-9, weight_decay=0.0)
    usual = {
        "settings": settings,
        "round": 4,
        "threat": ThreatModel(eps=str(EPS), step_size="eps", steps=1),
        "class_counts": torch.tensor([images, 0]),
        "inner": build_inner("rs-fgsm"),
    }
    found: float | None = train(
        method or build_method("fedpgd"), local_task(model, data, **{**usual, **task})
    ).metrics.get(OVERFIT)
    return found


def test_a_model_that_one_step_passes_and_three_do_not_has_overfitted() -> None:
    assert gap(Bumpy()) == 1.0
    assert gap(Flat()) == 0.0


@pytest.mark.parametrize(
    ("task", "measured"),
    [
        ({}, True),
        ({"round": 8}, True),
        ({"round": 1}, False),
        ({"round": 6}, False),
        ({"images": 8}, True),
        ({"images": 7}, False),
        ({"threat": ThreatModel(eps="1/8", step_size="1/16", steps=2)}, True),
        ({"threat": ThreatModel(eps="1/8", step_size="1/16", steps=3)}, False),
        ({"inner": build_inner("free", replays=1)}, True),
        ({"method": build_method("standard")}, False),
    ],
)
def test_when_it_is_measured(task: dict[str, Any], measured: bool) -> None:
    assert (gap(Bumpy(), **task) is not None) == measured


def test_only_images_that_training_attacks_are_looked_at() -> None:
    class Mixed(FedPGD):
        def attacked_rows(self, index: Tensor, task: LocalTask, generator: torch.Generator) -> Tensor:
            return index < 7

    plain = build_method("fedpgd")
    assert gap(Bumpy(), method=Mixed(plain.options, plain.modifier)) is None


def test_logits_are_those_that_the_attack_sees() -> None:
    """With its prior this client cannot be wrong about its class, so nothing shows."""
    counts = torch.tensor([11, 1])
    assert gap(Bumpy(), method=build_method("fedpgd", "calibrated"), class_counts=counts) == 0.0


def test_the_look_draws_nothing_from_the_global_generators() -> None:
    class Drawing(Bumpy):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(1)
            return super().forward(x)

    after = []
    for round in (4, 5):
        torch.manual_seed(0)
        gap(Drawing(), round=round)
        after.append(torch.rand(1))
    assert after[0] == after[1]


def test_the_server_names_the_clients() -> None:
    assert overfit_alarms({}) == overfit_alarms({0: 0.4, 1: -1.0}) == ()
    assert overfit_alarms({0: 0.1, 3: 0.9375}) == (
        "overfitted-attack: client 3 has 94 % more of its images right after one step of eps than after three of eps/2",
    )
