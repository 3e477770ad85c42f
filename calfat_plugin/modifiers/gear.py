"""GEAR: a margin on the true class that is larger for rare classes (Chen et al., FL-AAAI 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from calfat_plugin.entries import ModifierEntry, paper
from calfat_plugin.interfaces import ClientLoss
from calfat_plugin.modifiers.priors import LossOfClient, rarest_present, subtract_at_label
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GEAROptions:
    """The constant of GEAR."""

    delta: float = option(0.01, low=0, help="margin of the client's rarest class")


class GEARLoss(ClientLoss):
    """CE on logits whose true class lost delta (n_min / n_y)^(1/4)."""

    def __init__(self, options: GEAROptions, class_counts: Tensor) -> None:
        counts = class_counts.double()
        rarest = rarest_present(class_counts)
        # A missing class, which is never a label, gets delta.
        self.margins = (options.delta * (rarest / counts.clamp_min(rarest)).pow(0.25)).float()  # (C,)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().cross_entropy(subtract_at_label(logits, y, self.margins), y)


ENTRY = ModifierEntry(
    "gear",
    build=partial(LossOfClient, GEARLoss),
    config=GEAROptions,
    summary="subtract a margin that is larger for the client's rare classes from the true class's logit",
    formula="CE(z_k - 1[k = y] delta (n_min / n_y)^(1/4), y)",
    citation=paper("chen2022gear"),
)
