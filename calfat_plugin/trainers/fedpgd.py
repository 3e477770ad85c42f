"""FedPGD: adversarial training by PGD on every client (Madry et al. 2018 within FedAvg)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calfat_plugin.entries import TrainerEntry, paper
from calfat_plugin.interfaces import TrainBatch
from calfat_plugin.trainers.base import ALL_MODIFIERS, AdversarialTrainer

if TYPE_CHECKING:
    from torch import Tensor

MADRY = paper("madry2018towards")


class FedPGD(AdversarialTrainer):
    """CE(f(x~), y) on adversarial examples that climb the same loss from a uniform start."""

    def train_loss(self, batch: TrainBatch) -> Tensor:
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()


ENTRY = TrainerEntry(
    "fedpgd",
    build=FedPGD,
    summary="PGD adversarial training on every client",
    formula="min CE(f(x~), y), x~ = argmax CE(f(x'), y)",
    modifiers=ALL_MODIFIERS,
    citation=MADRY,
)
