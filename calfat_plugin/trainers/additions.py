"""What a recipe sets for any method: optimiser, label smoothing, perturbed weights, eps by class (methods.md 18)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import TYPE_CHECKING

from calfat_plugin.errors import PluginError
from calfat_plugin.interfaces import ClientLoss, TrainBatch, TrainSettings
from calfat_plugin.maths.attacks import buffers_kept
from calfat_plugin.maths.losses import wide

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from calfat_plugin.recipe.training import AWPOptions, ByClassOptions

# torch is imported inside functions: recipes are checked without it.


# --- the optimiser ----------------------------------------------------------------------------------------------------


def recipes_optimizer(parameters: Iterable[nn.Parameter], settings: TrainSettings) -> Optimizer:
    """The optimiser that ``train_args`` asks for. Adam and AdamW have torch's own betas (0.9, 0.999) and eps (1e-8)."""
    from torch.optim import SGD, Adam, AdamW

    if settings.client_optimizer == "adam":
        return Adam(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    if settings.client_optimizer == "adamw":
        return AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    return SGD(
        parameters,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
    )


def check_optimizer(
    optimizer: Optimizer, schedule: LRScheduler | None, settings: TrainSettings, *, needs_sgd: bool
) -> None:
    """Refuse a method's optimiser, or its schedule within the round, that contradicts the recipe or the aggregator.

    Args:
        optimizer: of the model's parameters.
        schedule: of its learning rate.
        settings: what the recipe asks for.
        needs_sgd: whether the aggregator's correction holds for the recipe's SGD on unclipped gradients only.
    """
    from torch.optim import SGD

    makes_another = f"it makes an optimiser of its own ({type(optimizer).__name__})"
    contradicted = _contradicted(optimizer, settings)
    if contradicted:
        raise PluginError(
            f"{makes_another}, but the recipe asks for {contradicted}. Remove that from the recipe, or let "
            "make_optimizer use task.settings."
        )
    if not needs_sgd:
        return
    expected = (settings.learning_rate, settings.momentum, settings.nesterov)
    is_recipes_sgd = type(optimizer) is SGD and all(
        (group["lr"], group["momentum"], group["nesterov"]) == expected for group in optimizer.param_groups
    )
    problem = ""
    if schedule is not None or not is_recipes_sgd:
        problem = makes_another
    if settings.client_optimizer != "sgd":
        problem = f"train_args.client_optimizer is {settings.client_optimizer}"
    if settings.max_grad_norm is not None:
        problem = f"train_args.max_grad_norm is {settings.max_grad_norm:g}"
    if problem:
        raise PluginError(
            f"{problem}, but this aggregator's correction of local steps holds for the recipe's SGD on unclipped "
            "gradients only. Choose another aggregator, such as fedavg."
        )


def _contradicted(optimizer: Optimizer, settings: TrainSettings) -> str:
    """What the recipe asks for, beyond the defaults of ``train_args``, and an optimiser has not; empty: nothing."""
    from torch.optim import Adam, AdamW

    groups = optimizer.param_groups
    kind = settings.client_optimizer
    if kind != "sgd" and type(optimizer) is not {"adam": Adam, "adamw": AdamW}[kind]:
        return f"train_args.client_optimizer: {kind}"
    if settings.nesterov and not all(group.get("nesterov") for group in groups):
        return "train_args.nesterov: true"
    if settings.has_schedule and all(group["lr"] != settings.learning_rate for group in groups):
        return f"the round's learning rate of {settings.learning_rate:g} (train_args.lr_schedule and warmup_rounds)"
    return ""


# --- label smoothing, perturbed weights, eps by class -----------------------------------------------------------------


def smoothed(loss: ClientLoss, share: float) -> ClientLoss:
    """The losses with label smoothing: (1 - share) CE + share mean_k(-log softmax(z)_k), where z are raw logits."""
    if share == 0:
        return loss
    smoothed_loss = copy(loss)

    def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
        uniform = -wide(logits).log_softmax(dim=1).mean(dim=1)
        return (1 - share) * loss.cross_entropy(logits, y) + share * uniform

    smoothed_loss.cross_entropy = cross_entropy  # type: ignore[method-assign]
    return smoothed_loss


def perturbed_backward(backward: Callable[[TrainBatch], Tensor], batch: TrainBatch, awp: AWPOptions) -> Tensor:
    """Call ``backward`` at w + v, and leave that gradient at w; v climbs the same loss from w, layer by layer."""
    import torch

    if batch.task.round <= awp.warmup:
        return backward(batch)
    model = batch.model
    with buffers_kept(model):
        backward(batch)
    weights = [weight for weight in model.parameters() if weight.grad is not None and weight.dim() > 1]
    shifts = []
    for weight in weights:
        assert weight.grad is not None
        shifts.append(perturbation(weight.detach(), weight.grad, awp.gamma))
    model.zero_grad(set_to_none=True)
    if batch.task.inner.looks_back:
        batch.x_adv.grad = None
    values_before = [weight.detach().clone() for weight in weights]
    try:
        for weight, shift in zip(weights, shifts, strict=True):
            weight.data.add_(shift)
        torch.clear_autocast_cache()  # it holds copies of w in another type
        return backward(batch.again())
    finally:  # copied back, since w + v - v would be rounded
        for weight, value in zip(weights, values_before, strict=True):
            weight.data.copy_(value)
        torch.clear_autocast_cache()


def perturbation(weight: Tensor, gradient: Tensor, gamma: float) -> Tensor:
    """v = gamma ||w|| / ||g|| g: how far a layer is pushed up the training loss; zero where the gradient is zero."""
    # Divided by the largest entry first, so that squares of tiny gradients do not underflow.
    direction = gradient / gradient.abs().amax().clamp_min(1e-30)
    pushed: Tensor = direction * (gamma * weight.norm() / direction.norm().clamp_min(1e-30))
    return pushed


def class_factors(class_counts: Tensor, options: ByClassOptions, round: int, num_rounds: int) -> Tensor | None:
    """What eps is multiplied by for the examples of each class, (C,) float64; None: all have eps itself.

    1 - alpha + tau sqrt(log(n_max / n_c)), times the warm-up's share. tau makes the mean over examples 1; where all
    classes have equally many examples there is no such tau, and all have the same factor. A class without examples has
    the factor 0.

    Args:
        class_counts: (C,) training examples of the client.
        round: counted from 1.
    """
    counts = class_counts.double()
    share = 1.0
    if options.warmup:
        share = min((round - 1) / (options.warmup * num_rounds), 1.0)
    has_examples = counts > 0
    most = counts.max().clamp_min(1.0)
    rarity = (most / counts.where(has_examples, most)).log().sqrt()  # 0 also for classes that are left out
    mean = (counts * rarity).sum() / counts.sum().clamp_min(1.0)
    if options.alpha > 0 and mean > 0:
        factors: Tensor = 1 - options.alpha + options.alpha / mean * rarity
        return share * factors * has_examples
    if share < 1:
        return share * has_examples.double()
    return None
