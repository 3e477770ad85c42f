"""Run a set of evaluators on one model, with the clean pass done once and shared."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.errors import ModelError
from calfat_plugin.evaluators.base import refuse_training_mode
from calfat_plugin.interfaces import EvaluationTask, Evaluator
from calfat_plugin.loaders import eval_batches
from calfat_plugin.results import EvaluationResult
from calfat_plugin.threat import ThreatModel


def measure(
    model: nn.Module,
    data: ImageData,
    evaluators: Iterable[tuple[str, Evaluator]],
    *,
    num_classes: int,
    threat: ThreatModel,
    batch_size: int,
    device: torch.device,
    seed: int,
    round: int = 0,
    on_progress: Callable[[str, int, int, int], None] = lambda label, done, total, correct: None,
) -> dict[str, EvaluationResult]:
    """Evaluate ``model`` in evaluation mode on ``device``.

    Args:
        evaluators: (label, evaluator) pairs; labels are unique.
        round: enters the derived seeds; 0 for a final evaluation.
        on_progress: called with (label, examples done, examples in all, correct so far).

    Returns:
        Label to result, in the order given.

    Raises:
        ModelError: training mode, non-finite logits, or logits of another shape than (N, num_classes).
        BudgetError: an evaluator left the budget.
    """
    refuse_training_mode(model)
    correct = clean_correct(model, data, num_classes=num_classes, batch_size=batch_size, device=device)
    results = {}
    for label, evaluator in evaluators:
        task = EvaluationTask(
            model=model,
            data=data,
            num_classes=num_classes,
            threat=threat,
            batch_size=batch_size,
            device=device,
            seed=seed,
            round=round,
            clean_correct=correct,
            on_progress=lambda done, total, right, label=label: on_progress(label, done, total, right),  # type: ignore[misc]
        )
        results[label] = evaluator.evaluate(task, label)
    return results


def clean_correct(
    model: nn.Module, data: ImageData, *, num_classes: int, batch_size: int, device: torch.device
) -> Tensor:
    """Which clean examples the model gets right: (N,) bool on the CPU.

    Raises:
        ModelError: the logits are not finite or have another shape than (N, num_classes).
    """
    verdicts = []
    with torch.no_grad():
        for x, y in eval_batches(data, batch_size, device):
            logits = model(x)
            if logits.shape != (len(y), num_classes):
                raise ModelError(
                    f"the model returned {tuple(logits.shape)} for {len(y)} images of shape {tuple(x.shape[1:])}; "
                    f"expected logits of shape ({len(y)}, {num_classes})."
                )
            if not bool(logits.isfinite().all()):
                raise ModelError(
                    "the model returned nan or inf for clean images: its weights are not finite. The training diverged "
                    "(lower train_args.learning_rate), or the checkpoint is damaged."
                )
            verdicts.append((logits.argmax(dim=1) == y).cpu())
    return torch.cat(verdicts)
