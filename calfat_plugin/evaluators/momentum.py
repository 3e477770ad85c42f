"""MI-FGSM: PGD whose steps keep a share of the gradients before (methods.md 9)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from calfat_plugin.entries import Citation, EvaluatorEntry
from calfat_plugin.evaluators.base import PIXELS, check_budget
from calfat_plugin.evaluators.gradient import PGD, BIMOptions
from calfat_plugin.exact import StepSize
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.maths.attacks import Steering, momentum
from calfat_plugin.options import option
from calfat_plugin.threat import ThreatModel


@dataclass(frozen=True)
class MIFGSMOptions(BIMOptions):
    """Options of MI-FGSM; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``."""

    step_size: StepSize | None = option(
        None, low=0, open_low=True, help="length of a step; null: eps / steps, as published", unit=PIXELS
    )
    steps: int = option(10, low=1, help="gradient steps")
    decay: float = option(1.0, low=0, help="share of the earlier gradients that a step keeps; 0: none, as BIM")

    def threat(self, run: ThreatModel) -> ThreatModel:
        """The budget with the published step unless there is an own one."""
        return dataclasses.replace(super().threat(run), step_size=self.step_size or StepSize(f"eps/{self.steps}"))


class MIFGSM(PGD):
    """Projected gradient ascent along the running sum of the gradients, each 1 long in L1."""

    options: MIFGSMOptions

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {**super().settings(task), "attack": "mi-fgsm", "decay": self.options.decay}

    def steering(self) -> Steering:
        return momentum(self.options.decay)


ENTRY = EvaluatorEntry(
    "mi-fgsm",
    build=MIFGSM,
    config=MIFGSMOptions,
    summary="PGD with momentum from the clean image, 10 steps by default",
    formula="g <- decay g + grad / ||grad||_1 with grad of CE(f(x'), y), x' <- Proj(x' + step_size sign g)",
    citation=Citation(
        "Dong et al., Boosting Adversarial Attacks with Momentum, CVPR 2018",
        """@inproceedings{dong2018boosting,
  title     = {Boosting Adversarial Attacks with Momentum},
  author    = {Dong, Yinpeng and Liao, Fangzhou and Pang, Tianyu and Su, Hang and Zhu, Jun and Hu, Xiaolin
               and Li, Jianguo},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year      = {2018}
}""",
    ),
    number_option="steps",
    check=check_budget,
)
