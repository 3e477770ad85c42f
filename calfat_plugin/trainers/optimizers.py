"""The local optimiser: the recipe's, or a method's own where that contradicts neither recipe nor aggregator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from calfat_plugin import returned
from calfat_plugin.errors import PluginError
from calfat_plugin.interfaces import LocalTask, TrainSettings

_KINDS: Mapping[str, type[SGD] | type[Adam] | type[AdamW]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


class MakesOptimizers(Protocol):
    """A method's share of this; see ``trainers.base.AdversarialTrainer``."""

    def make_optimizer(self, parameters: list[nn.Parameter], task: LocalTask) -> Optimizer: ...
    def make_schedule(self, optimizer: Optimizer, task: LocalTask, num_batches: int) -> LRScheduler | None: ...


def recipes_optimizer(parameters: Iterable[nn.Parameter], settings: TrainSettings) -> Optimizer:
    """The optimiser that ``train_args`` asks for. Adam and AdamW have torch's own betas (0.9, 0.999) and eps (1e-8)."""
    if settings.client_optimizer != "sgd":
        return _KINDS[settings.client_optimizer](
            parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
    return SGD(
        parameters,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
    )


def methods_optimizer(
    method: MakesOptimizers, task: LocalTask, num_batches: int, *, needs_sgd: bool
) -> tuple[Optimizer, LRScheduler | None]:
    """The method's optimiser of the model's parameters, and its schedule within the round."""
    optimizer = returned.instance(
        method.make_optimizer(list(task.model.parameters()), task), Optimizer, "make_optimizer returned"
    )
    makes_another = f"it makes an optimiser of its own ({type(optimizer).__name__})"
    settings = task.settings
    contradicted = _contradicted(optimizer, settings)
    if contradicted:
        raise PluginError(
            f"{makes_another}, but the recipe asks for {contradicted}. Remove that from the recipe, or let "
            "make_optimizer use task.settings."
        )
    schedule = method.make_schedule(optimizer, task, num_batches)
    if schedule is not None:
        returned.instance(schedule, LRScheduler, "make_schedule returned")
    other = ""  # why a step is not that of the recipe's SGD on unclipped gradients
    if schedule is not None or not _is_recipes_sgd(optimizer, settings):
        other = makes_another
    if settings.client_optimizer != "sgd":
        other = f"train_args.client_optimizer is {settings.client_optimizer}"
    if settings.max_grad_norm is not None:
        other = f"train_args.max_grad_norm is {settings.max_grad_norm:g}"
    if needs_sgd and other:
        raise PluginError(
            f"{other}, but this aggregator's correction of local steps holds for the recipe's SGD on unclipped "
            "gradients only. Choose another aggregator, such as fedavg."
        )
    return optimizer, schedule


def _is_recipes_sgd(optimizer: Optimizer, settings: TrainSettings) -> bool:
    if type(optimizer) is not SGD:
        return False
    expected = (settings.learning_rate, settings.momentum, settings.nesterov)
    return all((group["lr"], group["momentum"], group["nesterov"]) == expected for group in optimizer.param_groups)


def _contradicted(optimizer: Optimizer, settings: TrainSettings) -> str:
    """What the recipe asks for, beyond the defaults of ``train_args``, and an optimiser has not; empty: nothing."""
    groups = optimizer.param_groups
    kind = settings.client_optimizer
    if kind != "sgd" and type(optimizer) is not _KINDS[kind]:
        return f"train_args.client_optimizer: {kind}"
    if settings.nesterov and not all(group.get("nesterov") for group in groups):
        return "train_args.nesterov: true"
    if settings.has_schedule and all(group["lr"] != settings.learning_rate for group in groups):
        return f"the round's learning rate of {settings.learning_rate:g} (train_args.lr_schedule and warmup_rounds)"
    return ""
