"""A run as loggers see it: the parts of its recipe that hold no secret, and its numbers by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from calfat_plugin.results import EvaluationResult, RoundRecord
from calfat_plugin.rounds_csv import columns_of

# The host's communication and tracking sections may name brokers, keys and passwords (``tracking_args.wandb_key``).
PUBLIC_SECTIONS = ("common_args", "data_args", "model_args", "train_args", "device_args", "calfat")


def public_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of ``recipe`` that are safe to show, in their usual order."""
    return {section: recipe[section] for section in PUBLIC_SECTIONS if section in recipe}


def public_recipe_text(recipe: Mapping[str, Any]) -> str:
    """:func:`public_recipe` as YAML."""
    import yaml

    return yaml.safe_dump(public_recipe(recipe), sort_keys=False, width=120)


def round_scalars(record: RoundRecord) -> dict[str, float]:
    """One finished round as name to number. Accuracies are fractions; what is not finite is left out."""
    clients = sorted({*record.losses, *record.update_norms})
    numbers = {"loss/mean": record.loss}
    for column in columns_of(record.evaluations, clients, record.metrics):
        value = column.value_in(record)
        if not column.logged or value is None:
            continue
        if column.kind == "text":  # loggers get numbers: of a text the number of its entries
            value = len(value)
        numbers[column.logged] = float(value)
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def final_scalars(result: EvaluationResult) -> dict[str, float]:
    """One final evaluation; without accuracies where the attack did not run."""
    name = f"final/{result.label}"
    beside = {f"{name}/{metric}": number for metric, number in result.metrics.items() if math.isfinite(number)}
    if result.accuracy is None or result.accuracy_release is None:
        return beside
    return {name: result.accuracy, f"{name}_release": result.accuracy_release, **beside}
