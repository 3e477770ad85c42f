"""MixFAT: a mixture of clean and adversarial examples on every client (Zizzo et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import TrainerEntry, paper
from calfat_plugin.interfaces import LocalTask, TrainBatch
from calfat_plugin.options import option
from calfat_plugin.trainers.base import (
    ALL_MODIFIERS,
    SAMPLING_HELP,
    AdversarialTrainer,
    Sampling,
    empty_share,
    mixed_rows,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor


@dataclass(frozen=True)
class MixFATOptions:
    """The constants of MixFAT."""

    ratio: float = option(0.5, low=0, high=1, help="share of adversarial examples; CalFAT's paper does not give it")
    sampling: Sampling = option("per_batch", help=SAMPLING_HELP)


class MixFAT(AdversarialTrainer):
    """CE on a batch whose chosen rows are adversarial and whose others are clean, in one forward pass."""

    options: MixFATOptions

    def attacked_rows(self, index: Tensor, task: LocalTask, generator: Generator) -> Tensor | None:
        return mixed_rows(index, task, generator, self.options.ratio, self.options.sampling)

    def train_loss(self, batch: TrainBatch) -> Tensor:
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()


ENTRY = TrainerEntry(
    "mixfat",
    build=MixFAT,
    config=MixFATOptions,
    warn=lambda options, recipe: empty_share(recipe, options.ratio, options.sampling),
    summary="adversarial training on a share of the examples, clean training on the rest",
    formula="min (1/B) [sum_{j in A} CE(f(x~_j), y_j) + sum_{j not in A} CE(f(x_j), y_j)], |A| = floor(r B), "
    "x~ = argmax CE(f(x'), y)",
    modifiers=ALL_MODIFIERS,
    citation=paper("zizzo2020fat"),
)
