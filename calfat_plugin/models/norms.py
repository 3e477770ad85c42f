"""Batch normalisation beyond torch's: statistics that are fixed after some rounds, and two sets of them (FedRBN)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from calfat_plugin.errors import ModelError

Branch = Literal["clean", "noise"]


# --- FixBN ------------------------------------------------------------------------------------------------------------


class FixBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation that goes by its running statistics from some round on, in training mode, too.

    In the first rounds it is ``nn.BatchNorm2d``. Clients with different labels have different batch statistics, so each
    of them then trains another network than the one that is evaluated. Once the statistics are fixed, all clients train
    that network. Weight and bias train all the time.

    Attributes:
        is_fixed: whether the running statistics are used, and stay as they are.
    """

    is_fixed = False

    def begin_round(self, round: int, num_rounds: int) -> None:
        """Fix the statistics in the second half of the rounds; ``round`` counts from 1."""
        self.is_fixed = round > num_rounds / 2

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the same shape."""
        if not self.is_fixed:
            return super().forward(x)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def begin_round(model: nn.Module, round: int, num_rounds: int) -> None:
    """Tell every FixBN of a model which round of how many begins."""
    for module in model.modules():
        if isinstance(module, FixBatchNorm2d):
            module.begin_round(round, num_rounds)


# --- two sets of statistics -------------------------------------------------------------------------------------------


class DualNorm(nn.Module):
    """Two branches of batch statistics without affine terms, then one shared affine pair.

    The branch in use is a switch on the module, ``noise`` unless :func:`using_branch` says otherwise: so the model is
    attacked and evaluated through one branch, and no caller has to know of two.
    """

    def __init__(self, norm: _BatchNorm) -> None:
        """norm: the layer to replace; its kind, momentum, eps and affine pair are taken over."""
        super().__init__()
        if norm.running_mean is None or norm.momentum is None:
            raise ModelError(
                "FedRBN needs batch normalisation that tracks running statistics with a constant momentum."
            )
        self.momentum = norm.momentum
        self.eps = norm.eps
        self.clean = type(norm)(norm.num_features, norm.eps, norm.momentum, affine=False)
        self.noise = type(norm)(norm.num_features, norm.eps, norm.momentum, affine=False)
        if norm.affine:  # the very parameters: they may be another layer's, too
            self.weight = norm.weight
            self.bias = norm.bias
        else:
            self.weight = nn.Parameter(torch.ones_like(norm.running_mean))
            self.bias = nn.Parameter(torch.zeros_like(norm.running_mean))
        self.branch: Branch = "noise"

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) to the same shape."""
        norm: _BatchNorm = getattr(self, self.branch)
        if norm.training and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        # One call with the shared pair does what a branch and an affine layer after it would do in two passes.
        return F.batch_norm(
            x, norm.running_mean, norm.running_var, self.weight, self.bias, norm.training, self.momentum, self.eps
        )


def with_dual_norms(model: nn.Module) -> nn.Module:
    """Make every batch normalisation of ``model`` dual, in place; without one, add one after each 2-d convolution."""
    if any(isinstance(module, nn.GroupNorm) for module in model.modules()):
        raise ModelError(
            "FedRBN keeps two sets of batch statistics, and group normalisation has none. Take a model with batch "
            "normalisation (calfat.model.norm: batch), or without any."
        )
    if any(isinstance(module, FixBatchNorm2d) for module in model.modules()):
        raise ModelError(
            "FedRBN keeps two sets of batch statistics of its own, which FixBN would fix. Take a model with "
            "calfat.model.norm: batch, or without any."
        )
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        count = _replace(model, _BatchNorm, DualNorm)
    else:
        count = _replace(model, nn.Conv2d, _with_norm_after)
    if count == 0:
        raise ModelError(f"model {type(model).__name__}: FedRBN needs batch normalisation or 2-d convolutions.")
    return model


def _with_norm_after(convolution: nn.Conv2d) -> nn.Module:
    norm = DualNorm(nn.BatchNorm2d(convolution.out_channels))
    return nn.Sequential(OrderedDict(conv=convolution, norm=norm))


def dual_norms(model: nn.Module) -> dict[str, DualNorm]:
    """Name to layer, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, DualNorm)}


@contextmanager
def using_branch(model: nn.Module, branch: Branch, *, frozen: bool = False) -> Iterator[None]:
    """Let ``model`` compute through one branch, ``frozen``: by its running statistics alone, whatever mode it is in."""
    norms = dual_norms(model).values()
    modes = []  # of the layers of this branch
    for norm in norms:
        layer = getattr(norm, branch)
        modes.append((layer, layer.training))
    try:
        for norm in norms:
            norm.branch = branch
        for layer, mode in modes:
            layer.training = mode and not frozen
        yield
    finally:
        for norm in norms:
            norm.branch = "noise"
        for layer, mode in modes:
            layer.training = mode


def _replace(model: nn.Module, kind: type[nn.Module], make: Callable[[Any], nn.Module]) -> int:
    """Replace every descendant of ``kind`` by what ``make`` builds around it; return how many there were.

    A module that the model has in several places gets one replacement, which is in all of these places.
    """
    replacements: dict[nn.Module, nn.Module] = {}
    visited = {model}
    waiting = [model]
    while waiting:
        parent = waiting.pop()
        for name, child in list(parent._modules.items()):  # named_children leaves out a child's second name
            if isinstance(child, kind):
                if child not in replacements:
                    replacements[child] = make(child)
                setattr(parent, name, replacements[child])
            elif child is not None and child not in visited:
                visited.add(child)
                waiting.append(child)
    return len(replacements)
