"""Options of adversarial weight perturbation (AWP), as the method ``fedawp`` and as an addition to any other."""

from __future__ import annotations

from dataclasses import dataclass

from calfat_plugin.entries import paper
from calfat_plugin.options import option

AWP_PAPER = paper("wu2020adversarial")


@dataclass(frozen=True)
class AWPOptions:
    """``calfat.trainer.awp``: adversarial weight perturbation, added to a method: each training gradient is taken at
    weights that are perturbed against the training loss."""

    gamma: float = option(0.005, low=0, help="length of the perturbation, relative to each layer's weights")
    warmup: int = option(10, low=0, help="rounds of plain training before weights are perturbed", unit="rounds")
