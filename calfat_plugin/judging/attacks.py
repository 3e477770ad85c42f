"""Attacks that only the battery uses: random points, and losses that do not depend on the scale of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calfat_plugin.evaluators.base import BudgetedAttack, BudgetOptions
from calfat_plugin.evaluators.gradient import PGD, margin
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.maths.losses import true_class, wide, without_true_class
from calfat_plugin.options import option
from calfat_plugin.threat import per_example

if TYPE_CHECKING:
    from torch import Generator, Tensor

_SPREAD = 10.0  # logits from 0 to 10: the softmax neither saturates nor is flat
_TINY = 1e-12


class DLR(PGD):
    """PGD on the difference of logits ratio (Croce and Hein 2020), for at least three classes."""

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {**super().settings(task), "loss": "difference of logits ratio"}

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """-(z_y - max_{k != y} z_k) / (z^1 - z^3), z^1 >= z^2 >= z^3 the largest logits; summed over the batch."""
        logits = wide(logits)
        largest = logits.topk(3, dim=1).values
        return -(margin(logits, y) / (largest[:, 0] - largest[:, 2] + _TINY)).sum()


class ProbabilityMargin(PGD):
    """PGD on the margin of probabilities, of logits that were brought to one spread first."""

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {**super().settings(task), "loss": f"probability margin, logits of spread {_SPREAD:g}"}

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """max_{k != y} p_k - p_y with p = softmax(10 z / (max z - min z)); summed over the batch."""
        logits = wide(logits)
        spread = (logits.amax(dim=1, keepdim=True) - logits.amin(dim=1, keepdim=True)).detach()
        p = (logits * (_SPREAD / (spread + _TINY))).softmax(dim=1)
        return (without_true_class(p, y).amax(dim=1) - true_class(p, y)).sum()


@dataclass(frozen=True)
class NoiseOptions(BudgetOptions):
    """Options of random noise; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``."""

    draws: int = option(100, low=1, help="points of the ball to try")


class Noise(BudgetedAttack):
    """Uniform points of the ball: the first that is misclassified, else the last one."""

    options: NoiseOptions

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {"attack": "noise", "draws": self.options.draws, "seed": task.seed, "batch_size": task.batch_size}

    def craft(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: Generator) -> Tensor:
        """Every draw is for the whole batch, so no point depends on which examples are broken already."""
        import torch

        threat = self.threat(task)
        x_adv = x
        withstands = torch.ones_like(y, dtype=torch.bool)
        with torch.no_grad():
            for _ in range(self.options.draws):
                points = threat.random_start(x, noise)
                x_adv = points.where(per_example(withstands, x), x_adv)
                withstands = withstands & (task.model(points).argmax(dim=1) == y)
        return x_adv
