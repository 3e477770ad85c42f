"""CW-N: the Carlini-Wagner margin under PGD (methods.md 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calfat_plugin.entries import Citation, EvaluatorEntry
from calfat_plugin.evaluators.base import BudgetedAttack
from calfat_plugin.evaluators.budget import check_budget
from calfat_plugin.evaluators.gradient import PGDOptions, ascent_settings, climb
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.maths.losses import cw_margin
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Generator, Tensor


@dataclass(frozen=True)
class CWOptions(PGDOptions):
    """Options of CW; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``."""

    kappa: float = option(
        50.0, low=0, help="how far beyond the boundary an example keeps moving; 0 stops at the first error"
    )


class CW(BudgetedAttack):
    """Projected gradient ascent on -max(z_y - max_{k != y} z_k + kappa, 0)."""

    options: CWOptions

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        settings = ascent_settings("cw", self.options, self.threat(task), task)
        return {**settings, "loss": "Carlini-Wagner margin", "kappa": self.options.kappa}

    def craft(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: Generator) -> Tensor:
        def margin(logits: Tensor, y: Tensor) -> Tensor:
            return cw_margin(logits, y, kappa=self.options.kappa)

        return climb(task, x, y, noise, margin, threat=self.threat(task), how=self.options)


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
