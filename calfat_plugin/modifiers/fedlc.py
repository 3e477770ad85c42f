"""FedLC: a margin on every logit that grows as the class gets rarer (Zhang et al., ICML 2022)."""

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
class FedLCOptions:
    """The constant of FedLC."""

    tau: float = option(1.0, low=0, help="factor of the margins; 0.5 to 1 are usual")


class FedLCLoss(ClientLoss):
    """CE(z - tau n^(-1/4), y): presses rare classes down, and missing ones out of the softmax."""

    def __init__(self, options: FedLCOptions, class_counts: Tensor) -> None:
        # A missing class counts as 1e-8 examples, a margin of 100 tau, which takes it out of the softmax.
        self.margins = (options.tau * class_counts.double().clamp_min(1e-8).pow(-0.25)).float()  # (C,)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().cross_entropy(logits - self.margins, y)


ENTRY = ModifierEntry(
    "fedlc",
    build=partial(LossOfClient, FedLCLoss),
    config=FedLCOptions,
    summary="subtract a margin that grows as a class gets rarer on the client from each logit",
    formula="CE(z_k - tau n_k^(-1/4), y)",
    citation=paper("zhang2022federated"),
)
