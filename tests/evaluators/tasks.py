"""A task of evaluators around any model and any images, and such a model on trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.evaluators.base import refuse_training_mode
from calfat_plugin.evaluators.measure import clean_predictions
from calfat_plugin.interfaces import EvaluationTask, SetUpTask
from calfat_plugin.judging.trial import Trial, put_on_trial
from calfat_plugin.threat import ThreatModel


def task_of(model: nn.Module, data: ImageData, **changes: Any) -> EvaluationTask:
    """A task on the CPU with these fields; the model is asked about the clean images unless these say what it says."""
    fields: dict[str, Any] = {
        "num_classes": 10,
        "threat": ThreatModel(),
        "batch_size": 500,
        "device": torch.device("cpu"),
        "seed": 0,
        "round": 0,
        **changes,
    }
    if "clean_predictions" not in fields:
        refuse_training_mode(model)
        sizes = {name: fields[name] for name in ("num_classes", "batch_size", "device")}
        fields["clean_predictions"] = clean_predictions(model, data, **sizes)
    return EvaluationTask(model, data, **fields)


def trial_of(
    model: nn.Module,
    data: ImageData,
    *,
    num_classes: int = 10,
    threat: ThreatModel | None = None,
    batch_size: int = 500,
    seed: int = 0,
    surrogates: Mapping[str, nn.Module] | None = None,
    fresh: Callable[[], nn.Module] | None = None,
) -> Trial:
    """A model on trial, on the CPU, with other models by name."""
    others = dict(surrogates or {})
    recipe = SimpleNamespace(
        threat=threat or ThreatModel(), evaluation=SimpleNamespace(batch_size=batch_size), seed=seed
    )
    _, channels, height, width = data.x.shape
    set_up = SetUpTask(
        num_classes, channels, (height, width), torch.device("cpu"), load_model=lambda source, model: others[source]
    )
    transfer: Any = tuple(others)
    return put_on_trial(model, data, cast(Any, recipe), set_up, transfer=transfer, fresh=fresh or (lambda: model))
