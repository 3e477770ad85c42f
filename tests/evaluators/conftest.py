"""The stored networks, the digits they were trained on, and a task around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.published import load_digits
from calfat_plugin.evaluators.subattacks import PUBLISHED
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.threat import ThreatModel
from tests import stored_models
from tests.evaluators.trust_models import narrowed


@pytest.fixture(scope="session")
def stored_model(pytestconfig: pytest.Config) -> Callable[[str], nn.Module]:
    """The one way for a test to a network of ``stored_models.py``: by its name."""
    return partial(stored_models.stored_model, noise=pytestconfig.getoption("--weight-noise"))


@pytest.fixture(scope="session")
def digits() -> ImageData:
    """scikit-learn's 359 test digits."""
    return load_digits().test


@pytest.fixture(scope="session")
def digits_model(stored_model: Callable[[str], nn.Module]) -> nn.Module:
    """About 99 % natural and 80 % under PGD-20 at eps 0.1."""
    return narrowed(stored_model("robust"))


@pytest.fixture(scope="session")
def cnn_small(stored_model: Callable[[str], nn.Module]) -> nn.Module:
    """The same, with all of the tensors that recipes' ``cnn_small`` has."""
    return stored_model("robust")


@pytest.fixture(scope="session")
def plain_model(stored_model: Callable[[str], nn.Module]) -> nn.Module:
    """Trained on clean images alone: about 95 % natural."""
    return narrowed(stored_model("plain"))


@pytest.fixture(scope="session")
def colour_digits() -> ImageData:
    """30 test digits in the shape of CIFAR."""
    return stored_models.painted(load_digits().test.subset(range(30)))


@pytest.fixture(scope="session")
def colour_model(stored_model: Callable[[str], nn.Module]) -> nn.Module:
    """A small network for CIFAR's shape, trained on painted digits."""
    return stored_model("colour")


@pytest.fixture
def few_targets(monkeypatch: pytest.MonkeyPatch) -> int:
    """AutoAttack's targeted sub-attacks aim at so many classes instead of nine: in a quarter of the passes."""
    monkeypatch.setitem(PUBLISHED, "targets", 2)
    return PUBLISHED["targets"]


@pytest.fixture
def make_task() -> Callable[..., EvaluationTask]:
    """(model, data, **changes) to a task on the CPU; what the model gets right clean is measured here."""

    def make(model: nn.Module, data: ImageData, **changes: Any) -> EvaluationTask:
        with torch.no_grad():
            predictions = model(data.x).argmax(1)
        values: dict[str, Any] = {
            "model": model,
            "data": data,
            "num_classes": 10,
            "threat": ThreatModel(eps=0.1, step_size=0.025),
            "batch_size": 500,
            "device": torch.device("cpu"),
            "seed": 0,
            "round": 0,
            "clean_predictions": predictions,
        }
        return EvaluationTask(**{**values, **changes})

    return make
