"""Standard federated learning: clean cross-entropy, no attack (McMahan et al. 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calfat_plugin.entries import Citation, TrainerEntry
from calfat_plugin.trainers.base import AdversarialTrainer
from calfat_plugin.trainers.batches import TrainBatch

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
    citation=Citation(
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017",
        """@inproceedings{mcmahan2017communication,
  title     = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author    = {McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and
               Ag{\\"u}era y Arcas, Blaise},
  booktitle = {Artificial Intelligence and Statistics},
  year      = {2017}
}""",
    ),
)
