"""FGSM, BIM, PGD, CW and MI-FGSM: settings of the one gradient-ascent loop on a loss of raw logits (methods.md 9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from calfat_plugin.entries import EvaluatorEntry, paper
from calfat_plugin.errors import OptionError
from calfat_plugin.evaluators.base import BudgetedAttack, BudgetOptions, check_budget
from calfat_plugin.exact import StepSize, exact_text
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.maths.attacks import Steering, attack_mode, gradient_ascent, momentum
from calfat_plugin.maths.losses import cross_entropy, true_class, wide, without_true_class
from calfat_plugin.maths.passes import micro_batches
from calfat_plugin.options import option
from calfat_plugin.threat import PIXELS, ThreatModel
from calfat_plugin.trainers.fedpgd import MADRY

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

Start = Literal["x", "uniform"]

_START = "x: the clean image; uniform: a random point of the ball"
_SCALE = "the attack sees this factor times the logits; verdicts do not. 10 undoes CalFAT's flattened logits"


@dataclass(frozen=True)
class PGDOptions(BudgetOptions):
    """Options of PGD; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``."""

    step_size: StepSize | None = option(
        None, low=0, open_low=True, help="length of a step; null: that of calfat.threat", unit=PIXELS
    )
    steps: int = option(20, low=1, help="gradient steps")
    start: Start = option("uniform", help=_START)
    restarts: int = option(1, low=1, help="independent starts; an example is robust if it survives all of them")
    logit_scale: float = option(1.0, low=0, open_low=True, help=_SCALE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start == "x" and self.restarts > 1:
            raise OptionError(
                f"restarts: {self.restarts} from the clean image would all be the same; say start: uniform, or leave "
                "restarts out."
            )

    def lengths(self) -> dict[str, Fraction | None]:
        return {"eps": self.eps, "step_size": self.step_size}

    def threat(self, run: ThreatModel) -> ThreatModel:
        return dataclasses.replace(super().threat(run), steps=self.steps)


@dataclass(frozen=True)
class BIMOptions(PGDOptions):
    """BIM is PGD from the clean image."""

    start: Start = option("x", help=_START)


@dataclass(frozen=True)
class FGSMOptions(BudgetOptions):
    """Options of FGSM, whose one step is as long as eps."""

    restarts: ClassVar[int] = 1
    start: Start = option("x", help=f"{_START} (Wong et al. 2020, who step 1.25 eps from there)")
    logit_scale: float = option(1.0, low=0, open_low=True, help=_SCALE)

    def threat(self, run: ThreatModel) -> ThreatModel:
        """The budget with eps as the step."""
        return dataclasses.replace(super().threat(run), steps=1, step_size=StepSize("eps"))


@dataclass(frozen=True)
class CWOptions(PGDOptions):
    """Options of CW; ``null`` takes the value of ``calfat.threat`` or ``calfat.evaluation``."""

    kappa: float = option(
        50.0, low=0, help="how far beyond the boundary an example keeps moving; 0 stops at the first error"
    )


class PGD(BudgetedAttack):
    """Projected gradient ascent with restarts on CE(f(x'), y); FGSM, CW and MI-FGSM are other settings of it."""

    options: PGDOptions | FGSMOptions
    takes_steps = True

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        threat = self.threat(task)
        return {
            "attack": "bim" if self.options.start == "x" else "pgd",
            "step_size": exact_text(threat.step_size),
            "steps": threat.steps,
            "start": self.options.start,
            "restarts": self.options.restarts,
            "logit_scale": self.options.logit_scale,
            "loss": "cross-entropy",
            "seed": task.seed,
            "batch_size": task.batch_size,
        }

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """What the attack climbs, summed over the batch."""
        return cross_entropy(logits, y, reduction="sum")

    def satisfied(self, logits: Tensor, y: Tensor) -> Tensor:
        """(N,) bool: examples on which the loss is at its largest, so that a gradient of zero masks nothing."""
        return y < 0  # none

    def steering(self) -> Steering | None:
        """Where each step of one climb goes; None: along its gradient."""
        return None

    def craft(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: Generator) -> Tensor:
        """For every example, the point of the last start that it took part in: what is broken is not attacked again.

        Every restart draws noise for the whole batch, whoever takes part, so no start depends on who was skipped.
        Tallies ``zero_gradients``: examples whose first gradient is exactly zero, or nan, in each pixel, in the first
        start, without the ``satisfied``.
        """
        import torch

        threat = self.threat(task)
        x_adv = x
        unbroken = torch.arange(len(x), device=x.device)
        for restart in range(self.options.restarts):
            start = x
            if self.options.start == "uniform":
                start = threat.random_start(x, noise)
            if len(unbroken) == 0:
                continue  # for the draw alone
            y_unbroken = y[unbroken]
            points, vanished = self._climb(task, threat, x[unbroken], y_unbroken, start[unbroken])
            if restart == 0:
                task.tally("zero_gradients", int(vanished))
            x_adv = x_adv.index_copy(0, unbroken, points)
            if restart + 1 < self.options.restarts:
                with torch.no_grad():
                    unbroken = unbroken[task.model(points).argmax(dim=1) == y_unbroken]
        return x_adv

    def _climb(
        self, task: EvaluationTask, threat: ThreatModel, x: Tensor, y: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The points from one start, and how many first gradients were exactly zero."""
        import torch

        scale = self.options.logit_scale

        def climbed(y: Tensor, logits: Tensor) -> Tensor:
            return self.loss(logits * scale, y)

        def satisfied(y: Tensor, logits: Tensor) -> Tensor:
            return self.satisfied(logits * scale, y)

        points = torch.empty_like(x)
        vanished = y.new_zeros(())
        with attack_mode(task.model):
            for part in micro_batches(len(y), task.rows_at_once):
                points[part] = gradient_ascent(
                    _watched(task.model, vanished, partial(satisfied, y[part])),
                    x[part],
                    partial(climbed, y[part]),
                    threat=threat,
                    steps=threat.steps,
                    step_size=float(threat.step_size),
                    start=start[part],
                    steering=self.steering(),
                )
        return points, vanished


class FGSM(PGD):
    """One step of length eps along the gradient of CE(f(x), y)."""

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {**super().settings(task), "attack": "fgsm"}


class CW(PGD):
    """Projected gradient ascent on -max(z_y - max_{k != y} z_k + kappa, 0)."""

    options: CWOptions

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        settings = {**super().settings(task), "attack": "cw"}
        return {**settings, "loss": "Carlini-Wagner margin", "kappa": self.options.kappa}

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """kappa only controls how far a misclassified example keeps moving; 50 never saturates for usual logits."""
        return -(margin(logits, y) + self.options.kappa).clamp_min(0.0).sum()

    def satisfied(self, logits: Tensor, y: Tensor) -> Tensor:
        return margin(logits, y) <= -self.options.kappa


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


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """(N,) the logit of class y above the largest of the others."""
    logits = wide(logits)
    return true_class(logits, y) - without_true_class(logits, y).amax(dim=1)


def _watched(model: nn.Module, vanished: Tensor, satisfied: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The model, adding to ``vanished`` the examples, but for the satisfied, whose first gradient moves no pixel."""
    is_first = True

    def forward(x_adv: Tensor) -> Tensor:
        nonlocal is_first
        logits: Tensor = model(x_adv)
        if is_first and x_adv.requires_grad:
            is_first = False
            done = satisfied(logits.detach())

            def count(grad: Tensor) -> None:  # on the device: nothing waits for it
                moves = (grad.flatten(1).abs() > 0).any(dim=1)  # not where it is zero, and not where it is no number
                vanished.add_((~moves & ~done).sum())

            x_adv.register_hook(count)
        return logits

    return forward


_steps = partial(EvaluatorEntry, number_option="steps", check=check_budget)
ENTRIES = (
    EvaluatorEntry(
        "fgsm",
        build=FGSM,
        config=FGSMOptions,
        summary="one gradient step of length eps from the clean image",
        formula="x' = Proj(x + eps sign grad CE(f(x), y))",
        citation=paper("goodfellow2015explaining"),
        check=check_budget,
    ),
    _steps(
        "bim",
        build=PGD,
        config=BIMOptions,
        summary="PGD from the clean image, 20 steps by default",
        formula="x' <- Proj(x' + step_size sign grad CE(f(x'), y)), first x' = x",
        citation=paper("kurakin2017adversarial"),
    ),
    _steps(
        "pgd",
        build=PGD,
        config=PGDOptions,
        summary="projected gradient ascent from a random start; pgd20 takes 20 steps",
        formula="x' <- Proj(x' + step_size sign grad CE(f(x'), y))",
        citation=MADRY,
    ),
    _steps(
        "cw",
        build=CW,
        config=CWOptions,
        summary="PGD on the Carlini-Wagner margin; cw20 takes 20 steps",
        formula="x' <- Proj(x' + step_size sign grad -max(z_y - max_{k != y} z_k + kappa, 0))",
        citation=paper("carlini2017towards"),
    ),
    _steps(
        "mi-fgsm",
        build=MIFGSM,
        config=MIFGSMOptions,
        summary="PGD with momentum from the clean image, 10 steps by default",
        formula="g <- decay g + grad / ||grad||_1 with grad of CE(f(x'), y), x' <- Proj(x' + step_size sign g)",
        citation=paper("dong2018boosting"),
    ),
)
