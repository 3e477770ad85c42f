"""What can be added to any method: label smoothing and adversarial weight perturbation (methods.md 18)."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

from calfat_plugin.awp import AWPOptions
from calfat_plugin.interfaces import ClientLoss
from calfat_plugin.maths.attacks import buffers_kept
from calfat_plugin.maths.losses import wide
from calfat_plugin.trainers.batches import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


def smoothed(loss: ClientLoss, share: float) -> ClientLoss:
    """(1 - share) of the classification loss, and share of the mean of -log softmax(z) of raw logits z, instead."""
    if share == 0:
        return loss
    found = copy(loss)

    def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
        uniform = -wide(logits).log_softmax(dim=1).mean(dim=1)
        return (1 - share) * loss.cross_entropy(logits, y) + share * uniform

    found.cross_entropy = cross_entropy  # type: ignore[method-assign]
    return found


def perturbed_backward(backward: Callable[[TrainBatch], Tensor], batch: TrainBatch, awp: AWPOptions) -> Tensor:
    """As ``backward``, but the gradient is that at w + v; v climbs the same loss from w, layer by layer."""
    import torch

    if batch.task.round <= awp.warmup:
        return backward(batch)
    model = batch.model
    with buffers_kept(model):
        backward(batch)
    shifts = {
        name: perturbation(weight.detach(), weight.grad, awp.gamma)
        for name, weight in model.named_parameters()
        if weight.grad is not None and weight.dim() > 1
    }
    model.zero_grad(set_to_none=True)
    if batch.task.inner.looks_back:
        batch.x_adv.grad = None
    named = dict(model.named_parameters())
    before = {name: named[name].detach().clone() for name in shifts}
    try:
        for name, shift in shifts.items():
            named[name].data.add_(shift)
        torch.clear_autocast_cache()  # of copies that it made of other values
        return backward(batch.again())
    finally:  # the very same values
        for name, value in before.items():
            named[name].data.copy_(value)
        torch.clear_autocast_cache()


def perturbation(weight: Tensor, gradient: Tensor, gamma: float) -> Tensor:
    """v = gamma ||w|| / ||g|| g: how far a layer is pushed up the training loss; zero where the gradient is zero."""
    # Divided by the largest entry first, so that squares of tiny gradients do not underflow.
    direction = gradient / gradient.abs().amax().clamp_min(1e-30)
    pushed: Tensor = direction * (gamma * weight.norm() / direction.norm().clamp_min(1e-30))
    return pushed
