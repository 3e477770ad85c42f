"""FedTRADES: TRADES on every client (Zhang et al., ICML 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import TrainerEntry, paper
from calfat_plugin.interfaces import AttackBatch, TrainBatch
from calfat_plugin.maths.losses import kl_divergence
from calfat_plugin.options import option
from calfat_plugin.trainers.base import ALL_MODIFIERS, GaussianStart, start_noise_option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedTRADESOptions:
    """The constants of TRADES."""

    beta: float = option(6.0, low=0, help="weight of the divergence; 0 trains on clean examples")
    start_noise: float = start_noise_option()


class FedTRADES(GaussianStart):
    """CE(f(x), y) + beta KL(f(x) || f(x~)); the attack climbs the divergence. Gradients flow through both branches."""

    options: FedTRADESOptions

    def attack_loss(self, batch: AttackBatch) -> Tensor:
        clean = batch.loss.attack_logits(batch.logits_nat)
        adversarial = batch.loss.attack_logits(batch.logits_adv)
        return kl_divergence(clean, adversarial, reduction="sum")

    def train_loss(self, batch: TrainBatch) -> Tensor:
        natural = batch.loss.cross_entropy(batch.logits_nat, batch.y).mean()
        if self.options.beta == 0:
            return natural
        clean = batch.loss.kl_logits(batch.logits_nat)
        adversarial = batch.loss.kl_logits(batch.logits_adv)
        return natural + self.options.beta * kl_divergence(clean, adversarial)


ENTRY = TrainerEntry(
    "fedtrades",
    build=FedTRADES,
    config=FedTRADESOptions,
    summary="TRADES on every client: clean accuracy plus a divergence between clean and adversarial predictions",
    formula="min CE(f(x), y) + beta KL(f(x) || f(x~)), x~ = argmax KL(f(x) || f(x'))",
    modifiers=ALL_MODIFIERS,
    citation=paper("zhang2019theoretically"),
)
