"""Natural accuracy: clean test examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calfat_plugin.entries import EvaluatorEntry
from calfat_plugin.evaluators.base import AttackEvaluator
from calfat_plugin.interfaces import EvaluationTask

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Natural(AttackEvaluator):
    """The attack that does nothing."""

    has_budget = gives_examples = False

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {"attack": "none"}

    def craft(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: Generator) -> Tensor:
        return x


ENTRY = EvaluatorEntry("natural", build=Natural, summary="accuracy on clean test examples", formula="argmax f(x) = y")
