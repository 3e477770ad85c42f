"""Memory-FAT: each client remembers how hard its examples have been, and weighs them by it; two steps a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin import AdversarialTrainer, LocalTask, RoundEnd, TrainBatch, TrainerEntry, hookimpl, option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MemoryFATOptions:
    """Options of Memory-FAT."""

    decay: float = option(0.5, low=0, high=1, help="share of an example's memory that a look at it leaves")


class MemoryFAT(AdversarialTrainer):
    """mean_j w_j CE(f(x~_j), y_j), w the softmax of remembered losses."""

    options: MemoryFATOptions

    def begin_round(self, task: LocalTask) -> Tensor:
        import torch

        known = task.client_state.get("losses", torch.zeros(len(task.data)))
        return known.to(task.device, copy=True)

    def train_loss(self, batch: TrainBatch) -> Tensor:
        losses = batch.loss.cross_entropy(batch.logits_adv, batch.y)
        known: Tensor = batch.context
        known[batch.index] = known[batch.index].lerp(losses.detach(), 1 - self.options.decay)
        weights = len(losses) * known[batch.index].softmax(dim=0)
        batch.record("hardest", weights.max())
        return (weights * losses).mean()

    def take_steps(self, batch: TrainBatch, step: Callable[[TrainBatch], Tensor]) -> Tensor:
        step(batch)
        return step(batch.again())

    def end_round(self, task: LocalTask, context: Tensor) -> RoundEnd:
        return RoundEnd(state={"losses": context}, metrics={"remembered": float(context.mean())})


@hookimpl
def calfat_local_trainers() -> list[TrainerEntry]:
    metrics = {"hardest": "largest weight of a batch", "remembered": "mean of the remembered losses"}
    return [TrainerEntry("memory-fat", build=MemoryFAT, config=MemoryFATOptions, metrics=metrics)]
