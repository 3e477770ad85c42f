"""FGSM, BIM and PGD-N: settings of the one gradient-ascent loop on the cross-entropy of raw logits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from calfat_plugin.attacks import attack_mode, gradient_ascent
from calfat_plugin.entries import Citation, EvaluatorEntry
from calfat_plugin.evaluators.base import AttackEvaluator
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.losses import cross_entropy
from calfat_plugin.options import option
from calfat_plugin.threat import ThreatModel, exact_text
from calfat_plugin.trainers.fedpgd import MADRY

if TYPE_CHECKING:
    from torch import Generator, Tensor

_PIXELS = "fraction of the pixel range"


@dataclass(frozen=True)
class PGDOptions:
    """Options of PGD and BIM; ``null`` takes the value of ``calfat.threat``."""

    norm: Literal["linf", "l2"] | None = option(None, help="norm of the ball")
    eps: Fraction | None = option(None, low=0, help="radius of the ball", unit=_PIXELS)
    step_size: Fraction | None = option(None, low=0, open_low=True, help="length of a step", unit=_PIXELS)
    steps: int = option(20, low=1, help="gradient steps")
    start: Literal["x", "uniform"] = option("uniform", help="x: the clean image; uniform: a random point of the ball")
    restarts: int = option(1, low=1, help="independent starts; an example is robust if it survives all of them")


@dataclass(frozen=True)
class BIMOptions(PGDOptions):
    """BIM is PGD from the clean image."""

    start: Literal["x", "uniform"] = option("x", help="x: the clean image; uniform: a random point of the ball")


@dataclass(frozen=True)
class FGSMOptions:
    """Options of FGSM; ``null`` takes the value of ``calfat.threat``."""

    norm: Literal["linf", "l2"] | None = option(None, help="norm of the ball")
    eps: Fraction | None = option(None, low=0, help="radius of the ball and length of the step", unit=_PIXELS)
    start: Literal["x", "uniform"] = option(
        "x", help="x: the clean image; uniform: a random point of the ball (Wong et al. 2020)"
    )


class PGD(AttackEvaluator):
    """Projected gradient ascent on CE(f(x'), y)."""

    options: PGDOptions

    def threat(self, task: EvaluationTask) -> ThreatModel:
        """The run's budget with this evaluator's own norm, eps and step size where given."""
        own = {
            key: getattr(self.options, key)
            for key in ("norm", "eps", "step_size")
            if getattr(self.options, key) is not None
        }
        return dataclasses.replace(task.threat, **own, steps=self.options.steps)

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        threat = self.threat(task)
        return {
            "norm": threat.norm,
            "eps": exact_text(threat.eps),
            "step_size": exact_text(threat.step_size),
            "steps": threat.steps,
            "start": self.options.start,
            "restarts": self.options.restarts,
            "loss": "cross-entropy of raw logits",
            "seed": task.seed,
            "batch_size": task.batch_size,
        }

    def craft(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: Generator) -> Tensor:
        x_adv = self._ascend(task, x, y, noise)
        for _ in range(self.options.restarts - 1):
            again = self._ascend(task, x, y, noise)
            survived = _correct(task, x_adv, y)
            x_adv = again.where(survived[:, None, None, None], x_adv)
        return x_adv

    def _ascend(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: Generator) -> Tensor:
        threat = self.threat(task)
        with attack_mode(task.model):
            return gradient_ascent(
                task.model,
                x,
                lambda logits: cross_entropy(logits, y, reduction="sum"),
                threat=threat,
                steps=threat.steps,
                step_size=float(threat.step_size),
                start=threat.random_start(x, noise) if self.options.start == "uniform" else x,
            )


class FGSM(AttackEvaluator):
    """One step of length eps along the gradient of CE(f(x), y)."""

    options: FGSMOptions

    def __init__(self, options: FGSMOptions) -> None:
        super().__init__(options)

    def _pgd(self, task: EvaluationTask) -> PGD:
        eps = task.threat.eps if self.options.eps is None else self.options.eps
        return PGD(PGDOptions(norm=self.options.norm, eps=eps, step_size=eps, steps=1, start=self.options.start))

    def threat(self, task: EvaluationTask) -> ThreatModel:
        return self._pgd(task).threat(task)

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return self._pgd(task).settings(task)

    def craft(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: Generator) -> Tensor:
        return self._pgd(task).craft(task, x, y, noise)


def _correct(task: EvaluationTask, x: Tensor, y: Tensor) -> Tensor:
    import torch

    with torch.no_grad():
        verdict: Tensor = task.model(x).argmax(dim=1) == y
    return verdict


PGD_ENTRY = EvaluatorEntry(
    "pgd",
    build=PGD,
    config=PGDOptions,
    summary="projected gradient ascent from a random start; pgd20 takes 20 steps",
    formula="x' <- Proj(x' + step_size sign grad CE(f(x'), y))",
    citation=MADRY,
    number_option="steps",
)
BIM_ENTRY = EvaluatorEntry(
    "bim",
    build=PGD,
    config=BIMOptions,
    summary="PGD from the clean image, 20 steps unless told otherwise",
    formula="x' <- Proj(x' + step_size sign grad CE(f(x'), y)), first x' = x",
    citation=Citation(
        "Kurakin et al., Adversarial Machine Learning at Scale, ICLR 2017",
        """@inproceedings{kurakin2017adversarial,
  title     = {Adversarial Machine Learning at Scale},
  author    = {Kurakin, Alexey and Goodfellow, Ian and Bengio, Samy},
  booktitle = {International Conference on Learning Representations},
  year      = {2017}
}""",
    ),
    number_option="steps",
)
FGSM_ENTRY = EvaluatorEntry(
    "fgsm",
    build=FGSM,
    config=FGSMOptions,
    summary="one gradient step of length eps from the clean image",
    formula="x' = Proj(x + eps sign grad CE(f(x), y))",
    citation=Citation(
        "Goodfellow et al., Explaining and Harnessing Adversarial Examples, ICLR 2015",
        """@inproceedings{goodfellow2015explaining,
  title     = {Explaining and Harnessing Adversarial Examples},
  author    = {Goodfellow, Ian and Shlens, Jonathon and Szegedy, Christian},
  booktitle = {International Conference on Learning Representations},
  year      = {2015}
}""",
    ),
)
