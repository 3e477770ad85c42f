"""What every evaluator must keep."""

from __future__ import annotations

import math
from typing import Any

from calfat_plugin.evaluators.measure import measure
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.ambient import seeded_world
from calfat_plugin.interfaces import Evaluator
from calfat_plugin.registry import Registry
from calfat_plugin.results import EvaluationResult
from calfat_plugin.testing.tiny import CPU, NUM_CLASSES, TinyModel, require, tiny_dataset, tiny_experiment, unchanged

_NUMBERS = ("num_examples", "accuracy", "accuracy_strict", "per_class", "per_class_strict")


def check_evaluator(name: str, *, registry: Registry | None = None, **options: Any) -> None:
    """Hold an evaluator to its contract.

    It leaves model and images alone; gives the same numbers again, whatever it measured in between; its accuracies are
    shares of the examples that it counted, the strict one never above the others; its settings and details are ready
    for JSON. Whatever is an attack keeps its budget, and with eps 0 it finds the natural accuracy.

    Args:
        name: as recipes name it, also with a number (``pgd20``).
        registry: where it is; None: among the built-ins and what is installed.
        options: instead of its defaults.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        CalfatError: the framework refuses it; ``BudgetError``: its examples left the budget.
    """
    experiment = tiny_experiment(registry, evaluators=[{"name": name, **options}])
    ((label, evaluator),) = experiment.build_evaluators(experiment.evaluators)
    natural, found = _measured(experiment, label, evaluator)
    _check_numbers(name, found, natural)
    _measured(experiment, label, evaluator, seed=1)
    again = _measured(experiment, label, evaluator)[1]
    require(
        all(getattr(again, number) == getattr(found, number) for number in _NUMBERS),
        f"{name}: the same model, images and seed must give the same result; draw from EvaluationTask.seed alone.",
    )
    own_eps = getattr(experiment.evaluators[0].options, "eps", None)
    if getattr(evaluator, "has_budget", False) and own_eps is None:
        zero = tiny_experiment(experiment.registry, evaluators=[{"name": name, **options}], threat={"eps": 0})
        natural, found = _measured(zero, label, evaluator)
        require(
            found.num_examples < natural.num_examples or found.accuracy == natural.accuracy,
            f"{name}: with eps 0 it must find the natural accuracy {natural.accuracy}; got {found.accuracy}.",
        )


def _measured(
    experiment: Experiment, label: str, evaluator: Evaluator, seed: int = 0
) -> tuple[EvaluationResult, EvaluationResult]:
    """(natural accuracy, what the evaluator found) of a tiny model."""
    data, model = tiny_dataset().test, TinyModel().eval()
    plain = tiny_experiment(experiment.registry)
    ((_, natural),) = plain.build_evaluators(plain.evaluators)
    with unchanged(f"{label}: the test images", data.x, data.y), seeded_world(seed):
        results = measure(
            model,
            data,
            [("the natural one", natural), (label, evaluator)],
            num_classes=NUM_CLASSES,
            threat=experiment.recipe.threat,
            batch_size=5,
            device=CPU,
            seed=seed,
        )
    return results["the natural one"], results[label]


def _check_numbers(name: str, found: EvaluationResult, natural: EvaluationResult) -> None:
    require(0 < found.num_examples <= natural.num_examples, f"{name}: num_examples must be those that it counted.")
    for kind in ("accuracy", "accuracy_strict"):
        share, total = getattr(found, kind), found.num_examples
        whole = 0 <= share <= 1 and math.isclose(share * total, round(share * total), abs_tol=1e-6)
        require(whole, f"{name}: {kind} must be a share of its {total} examples; got {share}.")
    below = found.accuracy_strict <= found.accuracy
    if found.num_examples == natural.num_examples:
        below = below and found.accuracy_strict <= natural.accuracy
    require(below, f"{name}: accuracy_strict must be at most accuracy and the natural accuracy.")
    classes = len(found.per_class) == len(found.per_class_strict) == NUM_CLASSES
    require(classes, f"{name}: per_class and per_class_strict must have a value for each of the {NUM_CLASSES} classes.")
