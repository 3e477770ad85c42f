"""Fed-AWP: FedPGD with adversarially perturbed weights on every client (Wu et al., NeurIPS 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calfat_plugin.entries import TrainerEntry
from calfat_plugin.interfaces import TrainBatch
from calfat_plugin.recipe.training import AWP_PAPER, AWPOptions
from calfat_plugin.trainers.additions import perturbed_backward
from calfat_plugin.trainers.fedpgd import FedPGD

if TYPE_CHECKING:
    from torch import Tensor


class FedAWP(FedPGD):
    """The gradient of CE(f_{w+v}(x~), y), applied to w; v climbs the same loss, layer by layer."""

    options: AWPOptions

    def backward(self, batch: TrainBatch) -> Tensor:
        return perturbed_backward(super().backward, batch, self.options)


ENTRY = TrainerEntry(
    "fedawp",
    build=FedAWP,
    config=AWPOptions,
    summary="PGD adversarial training whose gradient is taken at adversarially perturbed weights",
    formula="min CE(f_{w+v}(x~), y), v = gamma ||w|| g / ||g|| per layer, g = grad_w CE(f_w(x~), y), "
    "x~ = argmax CE(f_w(x'), y)",
    modifiers=("plain", "calibrated"),
    citation=AWP_PAPER,
)
