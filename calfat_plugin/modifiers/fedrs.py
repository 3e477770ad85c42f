"""FedRS: a softmax in which a client's missing classes count less (Li and Zhan, KDD 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from calfat_plugin.entries import ModifierEntry, paper
from calfat_plugin.interfaces import ClientLoss
from calfat_plugin.modifiers.priors import LossOfClient
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedRSOptions:
    """The constants of FedRS."""

    alpha: float = option(0.5, low=0, high=1, help="factor of a missing class's logit; 1 changes nothing")
    absent_below: int = option(3, low=1, help="a class with fewer examples counts as missing", unit="examples")


class FedRSLoss(ClientLoss):
    """CE(a z, y), a = alpha for the client's missing classes and 1 for the others."""

    def __init__(self, options: FedRSOptions, class_counts: Tensor) -> None:
        missing = (class_counts < options.absent_below).float()
        self.factors = 1.0 - (1.0 - options.alpha) * missing  # (C,)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().cross_entropy(logits * self.factors, y)


ENTRY = ModifierEntry(
    "fedrs",
    build=partial(LossOfClient, FedRSLoss),
    config=FedRSOptions,
    summary="scale the logits of classes that the client misses",
    formula="CE(a_k z_k, y), a_k = alpha for missing classes, else 1",
    citation=paper("li2021fedrs"),
)
