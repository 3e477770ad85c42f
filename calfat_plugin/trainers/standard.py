"""Standard federated learning: clean cross-entropy, no attack (McMahan et al. 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calfat_plugin.entries import TrainerEntry, paper
from calfat_plugin.interfaces import TrainBatch
from calfat_plugin.trainers.base import AdversarialTrainer

if TYPE_CHECKING:
    from torch import Tensor


class Standard(AdversarialTrainer):
    """CE(f(x), y) on clean examples."""

    attacks = False

    def train_loss(self, batch: TrainBatch) -> Tensor:
        return batch.loss.cross_entropy(batch.logits_nat, batch.y).mean()


ENTRY = TrainerEntry(
    "standard",
    build=Standard,
    summary="standard federated learning on clean examples",
    formula="min CE(f(x), y)",
    modifiers=("plain", "logitadj", "calibrated", "fedlc", "fedrs"),
    citation=paper("mcmahan2017communication"),
)
