"""Fed-AWP: FedPGD with adversarially perturbed weights on every client (Wu et al., NeurIPS 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import Citation, TrainerEntry
from calfat_plugin.options import option
from calfat_plugin.trainers.base import AdversarialTrainer, TrainBatch
from calfat_plugin.trainers.gradients import carrying, gradients_of
from calfat_plugin.trainers.weight_perturbation import awp_perturbation

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class FedAWPOptions:
    """The constants of adversarial weight perturbation."""

    gamma: float = option(0.005, low=0, help="length of the perturbation, relative to each layer's weights")
    warmup: int = option(
        10, low=0, help="rounds of plain adversarial training before weights are perturbed", unit="rounds"
    )


class FedAWP(AdversarialTrainer):
    """The gradient of CE(f_{w+v}(x~), y), applied to w; v climbs the same loss, layer by layer."""

    options: FedAWPOptions

    def train_loss(self, batch: TrainBatch) -> Tensor:
        if batch.task.round <= self.options.warmup:
            return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()
        model = batch.model
        with _statistics_kept(model):
            uphill = gradients_of(self._loss(batch), model)
        weights = {name: weight.detach() for name, weight in model.named_parameters() if weight.dim() > 1}
        climbed = {name: gradient for name, gradient in uphill.items() if name in weights}
        with _shifted(model, awp_perturbation(weights, climbed, gamma=self.options.gamma)):
            loss = self._loss(batch)
            gradients = gradients_of(loss, model)
        return carrying(loss, model, gradients)

    @staticmethod
    def _loss(batch: TrainBatch) -> Tensor:
        """The adversarial loss at the model's present weights; not ``logits_adv``, which is computed once."""
        return batch.loss.cross_entropy(batch.model(batch.x_adv), batch.y).mean()


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """Put buffers back on leaving: a pass that only looks must not count in normalisation statistics."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


@contextmanager
def _shifted(model: nn.Module, shifts: Mapping[str, Tensor]) -> Iterator[None]:
    """Add ``shifts`` to the named parameters, and put the very same values back on leaving."""
    named = dict(model.named_parameters())
    before = {name: named[name].detach().clone() for name in shifts}
    try:
        for name, shift in shifts.items():
            named[name].data.add_(shift)
        yield
    finally:
        for name, value in before.items():
            named[name].data.copy_(value)


ENTRY = TrainerEntry(
    "fedawp",
    build=FedAWP,
    config=FedAWPOptions,
    summary="PGD adversarial training whose gradient is taken at adversarially perturbed weights",
    formula="min CE(f_{w+v}(x~), y), v = gamma ||w|| g / ||g|| per layer, g = grad_w CE(f_w(x~), y), "
    "x~ = argmax CE(f_w(x'), y)",
    modifiers=("plain", "calibrated"),
    citation=Citation(
        "Wu et al., Adversarial Weight Perturbation Helps Robust Generalization, NeurIPS 2020",
        """@inproceedings{wu2020adversarial,
  title     = {Adversarial Weight Perturbation Helps Robust Generalization},
  author    = {Wu, Dongxian and Xia, Shu-Tao and Wang, Yisen},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {33},
  year      = {2020}
}""",
    ),
)
