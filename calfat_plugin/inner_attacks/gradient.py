"""PGD, attacks of one step from noise (RS-FGSM, N-FGSM), and free adversarial training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import InnerAttackEntry, paper
from calfat_plugin.errors import ModelError
from calfat_plugin.interfaces import InnerAttack, InnerTask, LocalTask, TrainBatch
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from calfat_plugin.threat import ThreatModel

_MULTIPLE = "multiple of eps"


@dataclass(frozen=True)
class RSFGSMOptions:
    """Options of RS-FGSM."""

    step: float = option(1.25, low=0, open_low=True, help="length of the step", unit=_MULTIPLE)


class RSFGSM(InnerAttack):
    """One step from a random point of the ball, projected."""

    options: RSFGSMOptions

    def start(self, x_nat: Tensor, threat: ThreatModel, generator: Generator) -> Tensor:
        return threat.random_start(x_nat, generator)

    def craft(self, task: InnerTask) -> Tensor:
        return task.climb(steps=1, step_size=self.options.step * float(task.threat.eps))


@dataclass(frozen=True)
class NFGSMOptions:
    """Options of N-FGSM."""

    noise: float = option(
        2.0, low=0, open_low=True, help="radius of the ball that the start is drawn from", unit=_MULTIPLE
    )
    step: float = option(1.0, low=0, open_low=True, help="length of the step", unit=_MULTIPLE)


class NFGSM(InnerAttack):
    """One step from stronger noise, clipped to the pixels but not to the ball."""

    options: NFGSMOptions

    def start(self, x_nat: Tensor, threat: ThreatModel, generator: Generator) -> Tensor:
        return threat.scaled(self.options.noise).random_start(x_nat, generator)

    def craft(self, task: InnerTask) -> Tensor:
        # Noise and step together get no further than this set, so its projection only clips to the pixels.
        step_size = self.options.step * float(task.threat.eps)
        return task.climb(steps=1, step_size=step_size, within=self.reach(task.threat))

    def reach(self, threat: ThreatModel) -> ThreatModel:
        return threat.scaled(self.options.noise + self.options.step)


@dataclass(frozen=True)
class FreeOptions:
    """Options of free adversarial training."""

    replays: int = option(
        8, low=1, help="optimiser steps a mini-batch, each with one pass; take fewer epochs or rounds"
    )
    step: float = option(1.0, low=0, open_low=True, help="length of a step of the images", unit=_MULTIPLE)


class Free(InnerAttack):
    """Climbs the training loss. The change of one mini-batch's images is the start of the next one's, by position."""

    options: FreeOptions

    def begin_round(self, task: LocalTask) -> list[Tensor]:
        return []  # the change of the last mini-batch's images, (N, C, H, W), once there is one

    def craft(self, task: InnerTask) -> Tensor:
        return task.climb(steps=1, step_size=self.options.step * float(task.threat.eps))

    def take_steps(self, batch: TrainBatch, step: Callable[[TrainBatch], Tensor], memory: list[Tensor]) -> Tensor:
        import torch  # here, not above: recipes are checked without torch

        threat = batch.task.threat
        x_nat = batch.x_nat
        step_size = self.options.step * float(threat.eps)
        change = batch.x_adv - x_nat
        if memory:
            last = memory.pop()[: len(x_nat)]
            change = torch.cat([last, change[len(last) :]])  # the last mini-batch may have been smaller
        for _ in range(self.options.replays):
            x_adv = threat.project(x_nat + change, x_nat)
            if batch.attacked is not None:
                x_adv = torch.where(batch.attacked.view(-1, 1, 1, 1), x_adv, x_nat)
            replayed = batch.again(x_adv.requires_grad_())
            value = step(replayed)
            if x_adv.grad is None:
                raise ModelError(
                    "the training loss does not depend on x_adv: the model detaches its input, or the loss leaves the "
                    "adversarial examples out. The inner attack 'free' needs the gradient that training leaves in them."
                )
            change = threat.project(threat.ascend(x_adv.detach(), x_adv.grad, step_size), x_nat) - x_nat
        memory.append(change)
        return value


def _one_step(options: object) -> int:
    return 1


ENTRIES = (
    InnerAttackEntry(
        "pgd",
        build=InnerAttack,
        by_class=True,
        summary="projected gradient steps from the method's start",
        formula="x' <- P(x' + step_size sign(grad)), steps times",
    ),
    InnerAttackEntry(
        "rs-fgsm",
        build=RSFGSM,
        config=RSFGSMOptions,
        steps=_one_step,
        by_class=True,
        summary="one projected step from a random point of the ball",
        formula="x~ = P(x' + step eps sign(grad)), x' = x + U(-eps, eps)",
        citation=paper("wong2020fast"),
    ),
    InnerAttackEntry(
        "n-fgsm",
        build=NFGSM,
        config=NFGSMOptions,
        steps=_one_step,
        by_class=True,
        summary="one step from noise beyond the budget, clipped to the pixels but not to the ball",
        formula="x~ = x' + step eps sign(grad), x' = x + U(-noise eps, noise eps), both clipped to [0, 1]",
        citation=paper("dejorge2022make"),
    ),
    InnerAttackEntry(
        "free",
        build=Free,
        config=FreeOptions,
        steps=_one_step,
        by_class=True,
        replays=lambda options: int(options.replays),
        replaces=("craft", "take_steps", "backward", "counts_iterates"),
        summary="image and parameters step by the gradients of one pass, replayed on the same mini-batch",
        formula="x~ <- P(x~ + step eps sign(grad_x loss)), theta <- theta - lr grad_theta loss, replays times",
        citation=paper("shafahi2019adversarial"),
    ),
)
