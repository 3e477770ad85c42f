"""The numbers of a run under the names that every logger uses for them."""

from __future__ import annotations

import math

from calfat_plugin.results import EvaluationResult, RoundRecord
from calfat_plugin.rounds_csv import columns_of


def round_scalars(record: RoundRecord) -> dict[str, float]:
    """One finished round as name to number. Accuracies are fractions; what is not finite is left out."""
    clients = sorted({*record.losses, *record.update_norms})
    numbers = {"loss/mean": record.loss}
    for column in columns_of(record.evaluations, clients, record.metrics):
        value = column.found(record) if column.logged else None
        if value is not None:
            numbers[column.logged] = float(len(value) if column.kind == "text" else value)
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def accuracies(group: str, result: EvaluationResult) -> dict[str, float]:
    """Both counting conventions of one evaluation: ``accuracy/pgd20`` and ``accuracy/pgd20_release``."""
    return {f"{group}/{result.label}": result.accuracy, f"{group}/{result.label}_release": result.accuracy_release}


def final_scalars(result: EvaluationResult) -> dict[str, float]:
    """One final evaluation: its accuracies, and figures beside them as ``final/pgd20/ece``; finite ones only."""
    beside = {f"final/{result.label}/{name}": number for name, number in result.metrics.items()}
    return {**accuracies("final", result), **{name: number for name, number in beside.items() if math.isfinite(number)}}
