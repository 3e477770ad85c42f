"""PGD, and attacks of one step from noise: N-FGSM and RS-FGSM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import Citation, InnerAttackEntry
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
        citation=Citation(
            "Wong et al., Fast is better than free: Revisiting adversarial training, ICLR 2020",
            """@inproceedings{wong2020fast,
  title     = {Fast is better than free: Revisiting adversarial training},
  author    = {Wong, Eric and Rice, Leslie and Kolter, J. Zico},
  booktitle = {International Conference on Learning Representations},
  year      = {2020}
}""",
        ),
    ),
    InnerAttackEntry(
        "n-fgsm",
        build=NFGSM,
        config=NFGSMOptions,
        steps=lambda options: 1,
        by_class=True,
        summary="one step from noise beyond the budget, clipped to the pixels but not to the ball",
        formula="x~ = x' + step eps sign(grad), x' = x + U(-noise eps, noise eps), both clipped to [0, 1]",
        citation=Citation(
            "de Jorge et al., Make Some Noise: Reliable and Efficient Single-Step Adversarial Training, NeurIPS 2022",
            """@inproceedings{dejorge2022make,
  title     = {Make Some Noise: Reliable and Efficient Single-Step Adversarial Training},
  author    = {de Jorge, Pau and Bibi, Adel and Volpi, Riccardo and Sanyal, Amartya and Torr, Philip H. S. and
               Rogez, Gr{\\'e}gory and Dokania, Puneet K.},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {35},
  year      = {2022}
}""",
        ),
    ),
)
