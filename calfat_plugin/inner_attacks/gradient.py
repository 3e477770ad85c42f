"""PGD, and attacks of one step from noise: N-FGSM and RS-FGSM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import InnerAttackEntry, paper
from calfat_plugin.interfaces import InnerAttack, InnerTask
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
        steps=lambda options: 1,
        by_class=True,
        summary="one projected step from a random point of the ball",
        formula="x~ = P(x' + step eps sign(grad)), x' = x + U(-eps, eps)",
        citation=paper("wong2020fast"),
    ),
    InnerAttackEntry(
        "n-fgsm",
        build=NFGSM,
        config=NFGSMOptions,
        steps=lambda options: 1,
        by_class=True,
        summary="one step from noise beyond the budget, clipped to the pixels but not to the ball",
        formula="x~ = x' + step eps sign(grad), x' = x + U(-noise eps, noise eps), both clipped to [0, 1]",
        citation=paper("dejorge2022make"),
    ),
)
