"""LogitAdj: logits adjusted by the client's class prior in the classification loss only (Menon et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from calfat_plugin.entries import ModifierEntry, paper
from calfat_plugin.interfaces import ClientLoss
from calfat_plugin.modifiers.priors import LossOfClient, floor_option, log_frequencies
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LogitAdjOptions:
    """The constants of LogitAdj."""

    tau: float = option(1.0, low=0, help="factor of the log prior; 0 changes nothing")
    delta: float | None = floor_option()
    calibrate_inner: bool = option(False, help="adjust the logits that the attack climbs, too")


class LogitAdjLoss(ClientLoss):
    """CE(z + tau log pi, y); divergences, probabilities and (unless asked for) attacks stay on raw logits."""

    def __init__(self, options: LogitAdjOptions, class_counts: Tensor) -> None:
        self.options = options
        self.log_prior = log_frequencies(class_counts, delta=options.delta)  # (C,)

    def attack_logits(self, logits: Tensor) -> Tensor:
        if not self.options.calibrate_inner:
            return logits
        return self._adjusted(logits)

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().cross_entropy(self._adjusted(logits), y)

    def _adjusted(self, logits: Tensor) -> Tensor:
        return logits + self.options.tau * self.log_prior


ENTRY = ModifierEntry(
    "logitadj",
    build=partial(LossOfClient, LogitAdjLoss),
    config=LogitAdjOptions,
    summary="add the client's log class prior to the logits of the classification loss, not of attack or divergence",
    formula="CE(z + tau log pi, y)",
    citation=paper("menon2021longtail"),
)
