"""A network trained on digits, and one of CIFAR's shape; both once a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.digits import load_digits
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.models.building import seeded
from calfat_plugin.models.cnn import CNNSmall
from calfat_plugin.threat import ThreatModel


def train(model: nn.Module, data: ImageData, *, eps: float, epochs: int, learning_rate: float) -> nn.Module:
    """FGSM adversarial training, so that some examples withstand an attack and others do not.

    It learns from any seed and with any instruction set, because no step can ruin the network: the attack grows from
    nothing to ``eps`` over the first half of the epochs, and gradients longer than 1 are shortened to 1.
    """
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    for epoch in range(epochs):
        radius = eps * min(1.0, 2 * epoch / epochs)
        for where in torch.randperm(len(data), generator=generator).split(64):
            x, y = data.x[where], data.y[where]
            clean = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(nn.functional.cross_entropy(model(clean), y), clean)
            optimiser.zero_grad()
            nn.functional.cross_entropy(model((x + radius * grad.sign()).clamp(0, 1)), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
    return model.eval()


@pytest.fixture(scope="session")
def digits() -> ImageData:
    """scikit-learn's 359 test digits."""
    return load_digits().test


@pytest.fixture(scope="session")
def digits_model() -> nn.Module:
    """About 98 % natural and 80 % under PGD-20 at eps 0.1."""
    model = seeded(lambda: CNNSmall(in_channels=1, image_size=(8, 8), num_classes=10), 0)
    return train(model, load_digits().train, eps=0.1, epochs=6, learning_rate=0.1)


@pytest.fixture(scope="session")
def colour_digits() -> ImageData:
    """60 test digits in the shape of CIFAR: (3, 32, 32), ink and paper of random colours."""
    return _painted(load_digits().test.subset(range(60)))


@pytest.fixture(scope="session")
def colour_model() -> nn.Module:
    """A small network for CIFAR's shape, trained on painted digits."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, 10),
        ),
        0,
    )
    return train(model, _painted(load_digits().train), eps=8 / 255, epochs=8, learning_rate=0.05)


def _painted(data: ImageData) -> ImageData:
    generator = torch.Generator().manual_seed(0)
    large = nn.functional.interpolate(data.x, size=(32, 32), mode="bilinear", align_corners=False)
    ink, paper = 0.4 * torch.rand(2, len(data), 3, 1, 1, generator=generator)
    return ImageData(large * ink + (1 - large) * (1 - paper), data.y)


@pytest.fixture
def make_task() -> Callable[..., EvaluationTask]:
    """(model, data, **changes) to a task on the CPU; what the model gets right clean is measured here."""

    def make(model: nn.Module, data: ImageData, **changes: Any) -> EvaluationTask:
        with torch.no_grad():
            correct = model(data.x).argmax(1) == data.y
        values: dict[str, Any] = {
            "model": model,
            "data": data,
            "num_classes": 10,
            "threat": ThreatModel(eps=0.1, step_size=0.025),
            "batch_size": 500,
            "device": torch.device("cpu"),
            "seed": 0,
            "round": 0,
            "clean_correct": correct,
        }
        return EvaluationTask(**{**values, **changes})

    return make
