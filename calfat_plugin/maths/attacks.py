"""The one gradient-ascent loop: every PGD-like attack, in training and in evaluation, is a setting of it.

FGSM is ``steps=1, step_size=eps, start=x``; BIM starts at x; PGD at :meth:`ThreatModel.random_start`; CW climbs a
margin; MI-FGSM steers by :func:`momentum`; TRADES and CalFAT climb a divergence from logits computed before the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from calfat_plugin.errors import ModelError
from calfat_plugin.profiling import timed
from calfat_plugin.threat import unit_length

if TYPE_CHECKING:
    from torch import Tensor, nn

    from calfat_plugin.threat import ThreatModel

Steering = Callable[["Tensor"], "Tensor"]  #: of one climb: each step's gradient, (N, ...), to the direction to climb


def gradient_ascent(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    threat: ThreatModel,
    steps: int,
    step_size: float,
    start: Tensor,
    passes: Callable[[], AbstractContextManager[object]] = nullcontext,
    steering: Steering | None = None,
) -> Tensor:
    """Climb ``loss`` inside the budget by projected steps.

    Only x_adv gets a gradient: no parameter's ``.grad`` is touched. Put the model under :func:`attack_mode` around the
    call, so that batch statistics stay put and no gradients of parameters are prepared. ``loss``, summed over the batch
    (a mean only risks underflow), is called for iterates 0 .. steps-1: the start is seen, the returned point is not.

    From the second step on the model and the loss are called in a context of ``passes``. The first step stays as
    precise as x: near the start a divergence is at the level of rounding, and without its sign an attack in bfloat16 is
    up to three times weaker. The result is inside the budget, detached, and shares no storage with x or start.
    """
    import torch  # here, not above: recipes are checked without torch

    if steps == 0:
        return threat.project(start.detach(), x)
    project = threat.projection(x)
    x_adv = start.detach()
    for step in range(steps):
        x_adv.requires_grad_()
        arithmetic = nullcontext() if step == 0 else passes()
        with torch.enable_grad(), timed("forward"), arithmetic:
            logits = model(x_adv)
            objective = loss(logits)
        direction = input_gradient(objective, x_adv)
        if steering is not None:
            direction = steering(direction)
        x_adv = project(threat.ascend(x_adv.detach(), direction, step_size))
    return x_adv


def input_gradient(objective: Tensor, x_adv: Tensor) -> Tensor:
    """The gradient of a scalar with respect to x_adv."""
    import torch

    if not objective.requires_grad:
        raise ModelError(
            "the attack's loss does not depend on x_adv: the model detaches its input or "
            "computes without gradients. Gradient attacks need a differentiable model."
        )
    with timed("backward"):
        (grad,) = torch.autograd.grad(objective, x_adv)
    return grad


def cosine(grad: Tensor, other: Tensor) -> Tensor:
    """Of each example's two gradients, (N, ...) to (N,), in [-1, 1]; nan where one is zero."""
    unit = unit_length(grad)
    other_unit = unit_length(other)
    cosines = (unit * other_unit).flatten(1).sum(dim=1).clamp(-1, 1)
    return cosines.masked_fill(_is_zero(unit) | _is_zero(other_unit), math.nan)


def _is_zero(x: Tensor) -> Tensor:
    """Whether all values of an example are zero: (N, ...) to (N,) bool."""
    return x.flatten(1).abs().amax(dim=1) == 0


def momentum(decay: float) -> Steering:
    """MI-FGSM (Dong et al. 2018): ``decay`` times the last direction, plus the gradient made 1 long in L1."""
    direction: Tensor | None = None

    def steer(grad: Tensor) -> Tensor:
        nonlocal direction
        unit = unit_length(grad, order=1)
        if direction is None:
            direction = unit
        else:
            direction = unit.add(direction, alpha=decay)
        return direction

    return steer


def modes_of(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Each submodule that has a mode, and whether it trains; TorchScript that was frozen has none."""
    return [(module, module.training) for module in model.modules() if hasattr(module, "training")]


@contextmanager
def attack_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Evaluation mode for every submodule and no parameter gradients; on leaving, each module's own mode is back."""
    training = modes_of(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        if any(mode for _, mode in training):  # a module whose mode cannot change may refuse the call
            model.eval()
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield model
    finally:
        for module, mode in training:
            module.training = mode
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put buffers back on leaving: a pass that only looks must not count in normalisation statistics."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
