"""Fed-AWP: FedPGD with adversarially perturbed weights on every client (Wu et al., NeurIPS 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import Citation, TrainerEntry
from calfat_plugin.maths.attacks import buffers_kept
from calfat_plugin.options import option
from calfat_plugin.trainers.base import AdversarialTrainer
from calfat_plugin.trainers.batches import TrainBatch

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
        """The adversarial loss at the model's present weights; not ``logits_adv``, which is computed once."""
        return batch.loss.cross_entropy(batch.model(batch.x_adv), batch.y).mean()

    def backward(self, batch: TrainBatch) -> Tensor:
        if batch.task.round <= self.options.warmup:
            return super().backward(batch)
        with _perturbed(batch.model, self._perturbation(batch)):
            return super().backward(batch)

    def _perturbation(self, batch: TrainBatch) -> dict[str, Tensor]:
        """v for every trainable tensor of two or more dimensions that the loss depends on, by name."""
        import torch

        named = {name: parameter for name, parameter in batch.model.named_parameters() if parameter.requires_grad}
        with buffers_kept(batch.model):
            gradients = torch.autograd.grad(self.train_loss(batch), list(named.values()), allow_unused=True)
        return {
            name: perturbation(weight.detach(), gradient, self.options.gamma)
            for (name, weight), gradient in zip(named.items(), gradients, strict=True)
            if gradient is not None and weight.dim() > 1
        }


def perturbation(weight: Tensor, gradient: Tensor, gamma: float) -> Tensor:
    """v = gamma ||w|| / ||g|| g: how far a layer is pushed up the adversarial loss; zero where the gradient is zero."""
    # Divided by the largest entry first, so that squares of tiny gradients do not underflow.
    direction = gradient / gradient.abs().amax().clamp_min(1e-30)
    pushed: Tensor = direction * (gamma * weight.norm() / direction.norm().clamp_min(1e-30))
    return pushed


@contextmanager
def _perturbed(model: nn.Module, shifts: Mapping[str, Tensor]) -> Iterator[None]:
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
