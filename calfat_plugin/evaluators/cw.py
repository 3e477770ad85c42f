"""CW-N: the Carlini-Wagner margin under PGD (methods.md 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calfat_plugin.entries import Citation, EvaluatorEntry
from calfat_plugin.evaluators.base import check_budget
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.maths.losses import true_class, wide, without_true_class
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CWOptions(PGDOptions):
    """Options of CW; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``."""

    kappa: float = option(
        50.0, low=0, help="how far beyond the boundary an example keeps moving; 0 stops at the first error"
    )


class CW(PGD):
    """Projected gradient ascent on -max(z_y - max_{k != y} z_k + kappa, 0)."""

    options: CWOptions

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        settings = {**super().settings(task), "attack": "cw"}
        return {**settings, "loss": "Carlini-Wagner margin", "kappa": self.options.kappa}

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """kappa only controls how far a misclassified example keeps moving; 50 never saturates for usual logits."""
        logits = wide(logits)
        margin = true_class(logits, y) - without_true_class(logits, y).amax(dim=1)
        return -(margin + self.options.kappa).clamp_min(0.0).sum()


ENTRY = EvaluatorEntry(
    "cw",
    build=CW,
    config=CWOptions,
    summary="PGD on the Carlini-Wagner margin; cw20 takes 20 steps",
    formula="x' <- Proj(x' + step_size sign grad -max(z_y - max_{k != y} z_k + kappa, 0))",
    citation=Citation(
        "Carlini and Wagner, Towards Evaluating the Robustness of Neural Networks, S&P 2017",
        """@inproceedings{carlini2017towards,
  title     = {Towards Evaluating the Robustness of Neural Networks},
  author    = {Carlini, Nicholas and Wagner, David},
  booktitle = {IEEE Symposium on Security and Privacy},
  year      = {2017}
}""",
    ),
    number_option="steps",
    check=check_budget,
)
