"""The numbers of a run under the names that every logger uses for them."""

from __future__ import annotations

import math

from calfat_plugin.results import EvaluationResult, RoundRecord


def round_scalars(record: RoundRecord) -> dict[str, float]:
    """One finished round as name to number. Accuracies are fractions; what is not finite is left out."""
    numbers = {
        "heterogeneity": record.heterogeneity,
        "seconds": record.seconds,
        "bytes/down": float(record.bytes_down),
        "bytes/up": float(record.bytes_up),
        "refused": float(len(record.refused)),
    }
    for result in record.evaluations.values():
        numbers |= accuracies("accuracy", result)
    numbers |= record.metrics
    measured = ("learning_rate", "peak_memory_mb", "peak_gpu_memory_mb")
    numbers |= {name: value for name in measured if (value := getattr(record, name)) is not None}
    numbers["loss/mean"] = record.loss
    numbers |= {f"loss/client_{client}": loss for client, loss in record.losses.items()}
    numbers |= {f"update_norm/client_{client}": norm for client, norm in record.update_norms.items()}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def accuracies(group: str, result: EvaluationResult) -> dict[str, float]:
    """Both counting conventions of one evaluation: ``accuracy/pgd20`` and ``accuracy/pgd20_release``."""
    return {f"{group}/{result.label}": result.accuracy, f"{group}/{result.label}_release": result.accuracy_release}


def final_scalars(result: EvaluationResult) -> dict[str, float]:
    """One final evaluation: its accuracies, and figures beside them as ``final/pgd20/ece``; finite ones only."""
    beside = {f"final/{result.label}/{name}": number for name, number in result.metrics.items()}
    return {**accuracies("final", result), **{name: number for name, number in beside.items() if math.isfinite(number)}}
