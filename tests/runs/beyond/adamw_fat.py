"""AdamW-FAT: adversarial training by AdamW, its learning rate a cosine over each round and over the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin import AdversarialTrainer, LocalTask, TrainBatch, TrainerEntry, hookimpl, option

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import AdamW, Optimizer
    from torch.optim.lr_scheduler import CosineAnnealingLR


@dataclass(frozen=True)
class AdamWFATOptions:
    """Options of AdamW-FAT."""

    peak: float = option(1e-3, low=0, open_low=True, help="learning rate of the first round's first step")


class AdamWFAT(AdversarialTrainer):
    """CE(f(x~), y)."""

    options: AdamWFATOptions

    def make_optimizer(self, parameters: list[nn.Parameter], task: LocalTask) -> AdamW:
        from torch.optim import AdamW

        over_the_run = (1 + math.cos(math.pi * (task.round - 1) / task.settings.num_rounds)) / 2
        return AdamW(parameters, lr=self.options.peak * over_the_run, weight_decay=task.settings.weight_decay)

    def make_schedule(self, optimizer: Optimizer, task: LocalTask, num_batches: int) -> CosineAnnealingLR:
        from torch.optim.lr_scheduler import CosineAnnealingLR

        return CosineAnnealingLR(optimizer, T_max=num_batches)

    def train_loss(self, batch: TrainBatch) -> Tensor:
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()


@hookimpl
def calfat_local_trainers() -> list[TrainerEntry]:
    return [TrainerEntry("adamw-fat", build=AdamWFAT, config=AdamWFATOptions)]
