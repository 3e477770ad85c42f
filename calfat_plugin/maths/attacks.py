"""The one gradient-ascent loop: every PGD-like attack, in training and in evaluation, is a setting of it.

FGSM is ``steps=1, step_size=eps, start=x``; BIM starts at x; PGD at :meth:`ThreatModel.random_start`; CW climbs a
margin; MI-FGSM steers by :func:`momentum`; TRADES and CalFAT climb a divergence from logits computed before the loop.
"""

from __future__ import annotations

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
    call, so that batch statistics stay put and no gradients of parameters are prepared.

    Args:
        model: (N, ...) to logits (N, C), differentiable.
        x: (N, ...) float inside ``threat.bounds``; never changed.
        loss: logits of the running x_adv to the scalar to climb, summed over the batch (a mean only
            risks underflow). Called for iterates 0 .. steps-1: the start is seen, the returned point is not.
        threat: norm, eps and pixel range.
        steps: gradient steps; 0 returns the projected start.
        step_size: length of a step in ``threat.norm``, a fraction of the pixel range.
        start: (N, ...), first iterate; need not lie in the budget, the first projection sees to it.
        passes: makes the context in which the model and the loss are called, from the second step on. The first step
            stays as precise as x: near the start a divergence is at the level of rounding, and without its sign an
            attack in bfloat16 is up to three times weaker.
        steering: None: along the gradient.

    Returns:
        x_adv: same shape and dtype as x, inside the budget, detached, sharing no storage with x or start.
    """
    import torch  # here, not above: recipes are checked without torch

    if steps == 0:
        return threat.project(start.detach(), x)
    project = threat.projection(x)
    x_adv = start.detach()
    for step in range(steps):
        x_adv.requires_grad_()
        with torch.enable_grad(), timed("forward"), passes() if step else nullcontext():
            logits = model(x_adv)
            objective = loss(logits)
        grad = input_gradient(objective, x_adv)
        direction = grad if steering is None else steering(grad)
        x_adv = project(threat.ascend(x_adv.detach(), direction, step_size))
    return x_adv


def input_gradient(objective: Tensor, x_adv: Tensor, *, keep_graph: bool = False) -> Tensor:
    """The gradient of a scalar with respect to x_adv, (N, ...) as x_adv.

    Args:
        objective: computed from x_adv, summed over the batch.
        x_adv: requires its gradient.
        keep_graph: whether another objective of the same forward pass follows.
    """
    import torch

    if not objective.requires_grad:
        raise ModelError(
            "the attack's loss does not depend on x_adv: the model detaches its input or "
            "computes without gradients. Gradient attacks need a differentiable model."
        )
    with timed("backward"):
        (grad,) = torch.autograd.grad(objective, x_adv, retain_graph=keep_graph)
    return grad


def momentum(decay: float) -> Steering:
    """MI-FGSM (Dong et al. 2018): ``decay`` times the last direction, plus the gradient made 1 long in L1.

    Args:
        decay: >= 0; 0 is the gradient alone.
    """
    direction: Tensor | None = None

    def steer(grad: Tensor) -> Tensor:
        nonlocal direction
        unit = unit_length(grad, order=1)
        direction = unit if direction is None else unit.add(direction, alpha=decay)
        return direction

    return steer


@contextmanager
def attack_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Evaluation mode for every submodule and no parameter gradients, both restored exactly on leaving.

    Restored per module and per parameter, also after an exception: a model whose normalisation
    layers the user froze comes back with those frozen and the rest in training.
    """
    training = [(module, module.training) for module in model.modules()]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.eval()
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield model
    finally:
        for module, flag in training:
            module.training = flag
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
