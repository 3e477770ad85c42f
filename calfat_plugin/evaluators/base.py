"""The base of every attack that measures a model: batches, budget check and counting, written once.

A subclass only crafts adversarial examples. What it returns is re-checked against the budget before it counts, so an
attack with a bug cannot report a win outside eps or outside the pixel range.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from calfat_plugin import __version__
from calfat_plugin.errors import ModelError
from calfat_plugin.interfaces import EvaluationTask, Evaluator
from calfat_plugin.metrics import Counts
from calfat_plugin.results import EvaluationResult
from calfat_plugin.seeds import generator
from calfat_plugin.threat import ThreatModel

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn


class AttackEvaluator(Evaluator):
    """Counts, in both conventions, what a crafted batch does to the model. Subclasses are final and stateless."""

    implementation = f"calfat-plugin {__version__}"

    def __init__(self, options: Any) -> None:
        self.options = options

    def threat(self, task: EvaluationTask) -> ThreatModel:
        """The budget in force; default: the run's."""
        return task.threat

    @abstractmethod
    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        """How the adversarial examples are made, ready for JSON."""

    @abstractmethod
    def craft(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: Generator) -> Tensor:
        """Adversarial examples for one batch.

        Args:
            task: the model and the budget.
            x: (N, C, H, W) float32 in [0, 1].
            y: (N,) labels.
            noise: the only source of randomness, on ``task.device``.

        Returns:
            Shape of x, inside the budget.
        """

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        """Craft, re-check and count batch by batch. Random starts depend on the batch size, never on the machine.

        Raises:
            BudgetError: what :meth:`craft` returned is outside eps, outside the pixel range, or not finite.
            ModelError: the model is in training mode.
        """
        import torch

        from calfat_plugin.loaders import eval_batches

        refuse_training_mode(task.model)
        started = time.perf_counter()
        noise = generator(task.seed, f"evaluate/{label}", round=task.round, device=task.device)
        threat = self.threat(task)
        verdicts: list[Tensor] = []
        done = correct = 0
        for x, y in eval_batches(task.data, task.batch_size, task.device):
            x_adv = self.craft(task, x, y, noise)
            threat.check(x_adv, x, who=f"evaluator '{label}'")
            with torch.no_grad():
                verdicts.append((task.model(x_adv).argmax(dim=1) == y).cpu())
            done, correct = done + len(y), correct + int(verdicts[-1].sum())
            task.on_progress(done, len(task.data), correct)
        counts = Counts.from_verdicts(
            task.clean_correct.cpu(), task.data.y.cpu(), task.num_classes, torch.cat(verdicts)
        )
        return result_from_counts(
            counts,
            label=label,
            settings=self.settings(task),
            implementation=self.implementation,
            seconds=time.perf_counter() - started,
        )


def result_from_counts(
    counts: Counts, *, label: str, settings: dict[str, Any], implementation: str, seconds: float
) -> EvaluationResult:
    """Word counts of an attacked set as a result."""
    if counts.robust_acc is None or counts.robust_acc_strict is None:
        raise ValueError("nothing was attacked")  # a caller's bug: ImageData is never empty here
    return EvaluationResult(
        label=label,
        num_examples=counts.num_examples,
        accuracy=counts.robust_acc,
        accuracy_strict=counts.robust_acc_strict,
        per_class=counts.robust_per_class or (),
        per_class_strict=counts.robust_per_class_strict or (),
        settings=settings,
        implementation=implementation,
        seconds=seconds,
    )


def refuse_training_mode(model: nn.Module) -> None:
    """Refuse a model in which anything is in training mode: its numbers would depend on the batch.

    Raises:
        ModelError: naming the first such module.
    """
    for name, module in model.named_modules():
        if module.training:
            raise ModelError(
                f"the model is in training mode (module '{name or type(module).__name__}'), so dropout and batch "
                "statistics would blur the evaluation. Call model.eval() first."
            )
