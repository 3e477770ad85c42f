"""A run as loggers see it: the parts of its recipe that hold no secret, and its numbers by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from calfat_plugin.options import Tag
from calfat_plugin.recipe.schema import HOST_SECTIONS
from calfat_plugin.recipe.tagged_keys import without
from calfat_plugin.results import EvaluationResult, RoundRecord
from calfat_plugin.rounds_csv import columns_of


def public_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of ``recipe`` that are safe to show, in their usual order, without keys that may hold a secret.

    A section that this package does not declare, such as FedML's ``tracking_args`` with its ``wandb_key``, is not safe.
    """
    declared = {section: recipe[section] for section in (*HOST_SECTIONS, "calfat") if section in recipe}
    return without(declared, Tag.SECRET)


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
    numbers = {}
    if result.accuracy is not None and result.accuracy_release is not None:
        numbers[name] = result.accuracy
        numbers[f"{name}_release"] = result.accuracy_release
    for metric, number in result.metrics.items():
        if math.isfinite(number):
            numbers[f"{name}/{metric}"] = number
    return numbers
