"""One client's round as the training loop sees it, and what the loop asks of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from calfat_plugin.interfaces import ClientLoss, InnerAttack, InnerTask, LocalTask, RoundEnd
from calfat_plugin.trainers.batches import AttackBatch, TrainBatch
from calfat_plugin.trainers.optimizers import MakesOptimizers

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from calfat_plugin.threat import ThreatModel


class Method(MakesOptimizers, Protocol):
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
    def take_steps(self, batch: TrainBatch, step: Callable[[TrainBatch], Tensor]) -> Tensor: ...
    def attacked_rows(self, index: Tensor, task: LocalTask, generator: torch.Generator) -> Tensor | None: ...
    def start(self, x_nat: Tensor, task: LocalTask, generator: torch.Generator) -> Tensor: ...
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
        """The same: what goes through a copy of the model counts."""
        return self

    def add(self, model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """The hook, called before a forward pass; a model may say in ``passes`` that one of its own takes several."""
        images, *_ = *inputs, *named.values()
        self.images += len(images) * getattr(model, "passes", 1)
