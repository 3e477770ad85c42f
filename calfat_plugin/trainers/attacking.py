"""The inner maximisation of training: from a mini-batch of clean images to one with adversarial examples.

Also here: what stays the same in a client's round, and what the loop asks of a method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from calfat_plugin import returned
from calfat_plugin.errors import PluginError
from calfat_plugin.interfaces import AttackBatch, ClientLoss, InnerAttack, InnerTask, LocalTask, RoundEnd, TrainBatch
from calfat_plugin.maths.attacks import attack_mode
from calfat_plugin.maths.passes import micro_batches

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from calfat_plugin.datasets.batches import Batch, Examples
    from calfat_plugin.threat import ThreatModel


class Method(Protocol):
    """What the loop asks of a method; see ``trainers.base.AdversarialTrainer``."""

    @property
    def attacks(self) -> bool: ...
    @property
    def counts_iterates(self) -> bool: ...
    @property
    def has_own_steps(self) -> bool: ...
    def bind_loss(self, class_counts: Tensor) -> ClientLoss: ...
    def begin_round(self, task: LocalTask) -> Any: ...
    def end_round(self, task: LocalTask, context: Any) -> RoundEnd: ...
    def make_optimizer(self, parameters: list[nn.Parameter], task: LocalTask) -> Optimizer: ...
    def make_schedule(self, optimizer: Optimizer, task: LocalTask, num_batches: int) -> LRScheduler | None: ...
    def take_steps(self, batch: TrainBatch, step: Callable[[TrainBatch], Tensor]) -> Tensor: ...
    def attacked_rows(self, index: Tensor, task: LocalTask, generator: Generator) -> Tensor | None: ...
    def start(self, x_nat: Tensor, task: LocalTask, generator: Generator) -> Tensor: ...
    def attack_loss(self, batch: AttackBatch) -> Tensor: ...
    def craft(self, batch: AttackBatch, task: InnerTask, inner: InnerAttack) -> Tensor: ...
    def backward(self, batch: TrainBatch) -> Tensor: ...


@dataclass(frozen=True)
class ClientRound:
    """What stays the same from the first mini-batch of a client's round to the last.

    Attributes:
        method: its losses and hooks.
        task: the client's work.
        loss: the client's loss operators.
        context: what the method's ``begin_round`` returned.
        memory: what the inner attack's ``begin_round`` returned.
        attacks: whether there are adversarial examples in this round.
        rows: how many examples pass through the model at once in an attack.
        passes: makes contexts that set the arithmetic of the model's passes.
        count: of images that went forward through the model.
        factors: (C,) what eps is multiplied by for examples of each class; None: all have eps itself.
    """

    method: Method
    task: LocalTask
    loss: ClientLoss
    context: Any
    memory: Any
    attacks: bool
    rows: int
    passes: Callable[[], AbstractContextManager[object]]
    count: ForwardCount
    factors: Tensor | None

    def threat(self, y: Tensor) -> ThreatModel:
        """The budget of examples with these labels."""
        if self.factors is None:
            return self.task.threat
        return replace(self.task.threat, factors=self.factors[y.to(self.factors.device)])

    def task_of(self, y: Tensor) -> LocalTask:
        """The task with the budget of examples with these labels."""
        if self.factors is None:
            return self.task
        return replace(self.task, threat=self.threat(y))

    @property
    def gpus(self) -> list[torch.device]:
        """The GPU whose global generator training draws from, if any."""
        if self.task.device.type != "cuda":
            return []
        return [self.task.device]


class ForwardCount:
    """How often an image went forward through a model and its copies so far."""

    def __init__(self) -> None:
        self.images = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardCount:
        """The same object: passes through a copy of the model count, too."""
        return self

    def add(self, model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """The hook, called before a forward pass; a model may say in ``passes`` that one of its own takes several."""
        images, *_ = *inputs, *named.values()
        self.images += len(images) * getattr(model, "passes", 1)


# --- the attack -------------------------------------------------------------------------------------------------------


def attacked(work: ClientRound, drawn: Batch, noise: Generator, *, moving: bool) -> TrainBatch:
    """The mini-batch to train on.

    Args:
        work: the client's round.
        drawn: the clean mini-batch.
        noise: of the attack.
        moving: whether steps follow. An attack with steps of its own then looks for its images during these.
    """
    x_nat, y, examples = drawn
    x_adv = x_nat
    kappa = None
    rows = None  # (N,) bool, which are attacked; None: all
    if work.attacks:
        rows = work.method.attacked_rows(examples.index, work.task, noise)
        if rows is None:
            x_adv, kappa = _crafted(work, x_nat, y, examples, noise, moving=moving)
        else:
            rows = returned.rows(rows, len(y), "attacked_rows returned").to(x_nat.device)
            x_adv = x_nat.clone()
            where = rows.nonzero().squeeze(1)
            if len(where):
                there = examples.rows(where.to(examples.index.device))
                x_adv[where], _ = _crafted(work, x_nat[where], y[where], there, noise, moving=moving)
        if work.task.inner.looks_back:
            x_adv = x_adv.detach().requires_grad_()
    return TrainBatch(
        work.task.model, x_nat, x_adv, y, work.loss, work.task_of(y), rows, kappa, work.context, examples.index
    )


def look_back(work: ClientRound, batch: TrainBatch) -> None:
    """Show the inner attack the gradient that training left in its images, if it asked for it."""
    if work.attacks and work.task.inner.looks_back:
        work.task.inner.after_step(batch, batch.x_adv.grad, work.memory)


def _crafted(
    work: ClientRound, x_nat: Tensor, y: Tensor, examples: Examples, noise: Generator, *, moving: bool
) -> tuple[Tensor, Tensor | None]:
    """(x_adv, kappa) by the method's inner maximisation, or its start where the attack has its own steps.

    The start is drawn for the whole batch, so it does not depend on how the batch is cut. One micro-batch takes all its
    steps before the next one begins. kappa counts iterates 0 .. steps-1, so not x_adv itself.
    """
    method = work.method
    task = work.task_of(y)
    start = task.inner.start(x_nat, task.threat, noise)
    draws = task.inner.draw(x_nat, task.threat, noise)
    if start is None:
        start = returned.like(method.start(x_nat, task, noise), x_nat, "start returned")
    if moving and task.inner.has_own_steps:
        return start, None
    x_adv = torch.empty_like(x_nat)
    kappa = torch.zeros_like(y)
    with attack_mode(task.model):
        for part in micro_batches(len(y), work.rows):
            batch = AttackBatch(task.model, x_nat[part], y[part], work.loss, work.context)
            drawn = None
            if draws is not None:
                drawn = draws[part]
            inner_task = InnerTask(
                model=task.model,
                x_nat=batch.x_nat,
                start=start[part],
                loss=partial(_loss_of_iterate, work, batch, kappa[part]),
                threat=work.threat(batch.y),
                passes=work.passes,
                memory=work.memory,
                examples=examples.rows(part),
                drawn=drawn,
            )
            points = method.craft(batch, inner_task, task.inner)
            x_adv[part] = returned.like(points, batch.x_nat, "craft returned").detach()
    if not method.counts_iterates:
        return x_adv, None
    return x_adv, kappa


def _loss_of_iterate(work: ClientRound, batch: AttackBatch, kappa: Tensor, logits: Tensor) -> Tensor:
    """What the attack climbs; adds one to ``kappa`` where a method that asks for it classifies correctly."""
    if work.method.counts_iterates:  # on the device: nothing waits for it
        kappa.add_(logits.argmax(dim=1) == batch.y)
    batch.logits_adv = logits
    version = batch.x_nat._version
    loss = returned.loss(work.method.attack_loss(batch), "attack_loss returned")
    if batch.x_nat._version != version:  # seen here, it is no mistake of the inner attack
        where = f"client {work.task.client}, round {work.task.round}"
        raise PluginError(f"{where}: attack_loss changed x_nat in place. Work on a copy: x_nat.clone().")
    return loss
