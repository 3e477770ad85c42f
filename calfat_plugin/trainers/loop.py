"""The only local training loop: epochs, batches, attack, optimiser, and the check that numbers stay finite."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from calfat_plugin.datasets.batches import batches, num_batches
from calfat_plugin.datasets.data import pixels
from calfat_plugin.errors import UpdateError
from calfat_plugin.interfaces import ActiveCorrection, ClientLoss, LocalTask
from calfat_plugin.maths.attacks import attack_mode, buffers_kept, gradient_ascent
from calfat_plugin.maths.graphs import Caller, graphs_of
from calfat_plugin.maths.passes import PROBED, fast_passes, micro_batches
from calfat_plugin.maths.precision import float32_as, passes_in
from calfat_plugin.observer import BatchProgress
from calfat_plugin.profiling import timed, timed_each
from calfat_plugin.results import LocalUpdate
from calfat_plugin.seeds import generator
from calfat_plugin.trainers.batches import AttackBatch, TrainBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

_REPORT_EVERY = 10  # batches between looks at the loss on a GPU, which each look makes wait


class Method(Protocol):
    """What the loop asks of a method; see ``trainers.base.AdversarialTrainer``."""

    @property
    def attacks(self) -> bool: ...
    @property
    def counts_iterates(self) -> bool: ...
    def bind_loss(self, class_counts: Tensor) -> ClientLoss: ...
    def attacked_rows(self, index: Tensor, task: LocalTask, generator: torch.Generator) -> Tensor | None: ...
    def start(self, x_nat: Tensor, task: LocalTask, generator: torch.Generator) -> Tensor: ...
    def attack_loss(self, batch: AttackBatch) -> Tensor: ...
    def backward(self, batch: TrainBatch) -> Tensor: ...


@dataclass(frozen=True)
class _Work:
    """One client's round as the loop sees it.

    Attributes:
        rows: examples that pass through the model at once in an attack.
        passes: makes the context of the model's passes, which sets their arithmetic.
        call: calls the attack and the step's backward, or replays a captured graph of them.
    """

    method: Method
    task: LocalTask
    loss: ClientLoss
    rows: int
    passes: Callable[[], AbstractContextManager[object]]
    call: Caller


def train_locally(method: Method, task: LocalTask) -> LocalUpdate:
    """Train ``task.model`` for one round with ``method``'s losses.

    One SGD optimiser a round, so its momentum starts at zero (methods.md 1). Attack in evaluation mode, outer loss in
    training mode.

    Returns:
        The update; ``metrics["loss"]`` is the mean training loss per example of the last epoch.

    Raises:
        UpdateError: when the loss left the finite numbers.
    """
    model = task.model
    loss = method.bind_loss(task.class_counts.to(task.device))
    model.train()
    correction = task.correction.begin(task)
    sample = pixels(task.data.x[:PROBED].to(task.device))
    with (
        float32_as(task.precision, task.device),
        fast_passes(model, sample) as rows,
        graphs_of(task.graphs, model) as call,
    ):
        work = _Work(method, task, loss, rows, passes_in(task.precision, task.device), call)
        mean_loss = _epochs(work, correction)
    extras, client_state = correction.finish(model)
    return LocalUpdate(
        state={name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()},
        num_examples=len(task.data),
        extras=extras,
        metrics={"loss": mean_loss},
        client_state=client_state,
    )


def _epochs(work: _Work, correction: ActiveCorrection) -> float:
    """Train; the mean loss per example of the last epoch."""
    task, model, settings = work.task, work.task.model, work.task.settings
    if correction.wants_full_gradient:
        with timed("full gradient"):
            correction.take_full_gradient(_full_gradient(work))
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    mean_loss = float("nan")
    for epoch in range(settings.epochs):
        meter = _LossMeter(task, epoch)
        noise = generator(task.seed, "attack", round=task.round, client=task.client, extra=epoch, device=task.device)
        for x_nat, y, index in timed_each("data", _one_epoch(task, "batches", epoch)):
            with timed("attack"):
                batch = _attacked(work, x_nat, y, index, noise)
            with timed("outer step"):
                value = _gradient(work, batch)
                correction.after_backward(model)
                optimizer.step()
                correction.after_step(model, settings.learning_rate)
            meter.add(value, len(y))
        mean_loss = meter.mean()
    return mean_loss


def _full_gradient(work: _Work) -> dict[str, Tensor]:
    """Gradient of the mean loss over all of the client's data, weight decay included, at the model's weights.

    Attacks and augmentation have streams of their own, and normalisation statistics are put back: the training that
    follows is the same with and without this pass.
    """
    task, model = work.task, work.task.model
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradient = {name: task.settings.weight_decay * parameter.detach() for name, parameter in parameters.items()}
    noise = generator(task.seed, "full gradient attack", round=task.round, client=task.client, device=task.device)
    with buffers_kept(model):
        for x_nat, y, index in _one_epoch(task, "full gradient batches", 0):
            _gradient(work, _attacked(work, x_nat, y, index, noise))
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    gradient[name].add_(parameter.grad, alpha=len(y) / len(task.data))
    model.zero_grad(set_to_none=True)
    return {name: tensor.contiguous() for name, tensor in gradient.items()}


def _one_epoch(task: LocalTask, purpose: str, epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(x_nat, y, positions in the client's data), batch by batch."""
    return batches(
        task.data,
        task.settings.batch_size,
        task.device,
        generator=generator(task.seed, purpose, round=task.round, client=task.client, extra=epoch),
        augment=task.augment,
        merge_single=_has_batch_norm(task.model),
    )


def _has_batch_norm(model: nn.Module) -> bool:
    """Whether training on a batch of one example would fail or be meaningless."""
    return any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules())


def _attacked(work: _Work, x_nat: Tensor, y: Tensor, index: Tensor, noise: torch.Generator) -> TrainBatch:
    """The batch with its adversarial examples."""
    method, task, loss, model = work.method, work.task, work.loss, work.task.model
    if not method.attacks:
        return TrainBatch(model, x_nat, x_nat, y, loss, task)
    chosen = method.attacked_rows(index, task, noise)
    if chosen is None:
        x_adv, kappa = _craft(work, x_nat, y, noise)
        return TrainBatch(model, x_nat, x_adv, y, loss, task, kappa=kappa)
    chosen, mixed = chosen.to(x_nat.device), x_nat.clone()
    where = chosen.nonzero().squeeze(1)
    if len(where):
        mixed[where], _ = _craft(work, x_nat[where], y[where], noise)
    return TrainBatch(model, x_nat, mixed, y, loss, task, attacked=chosen)


def _craft(work: _Work, x_nat: Tensor, y: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """(x_adv, kappa) by the method's inner maximisation; kappa counts iterates 0 .. steps-1, so not x_adv itself.

    The start is drawn for the whole batch, so it does not depend on how the batch is cut.
    """
    start = work.method.start(x_nat, work.task, noise)
    return work.call("attack", partial(_climb, work), x_nat, y, start)


def _climb(work: _Work, x_nat: Tensor, y: Tensor, start: Tensor) -> tuple[Tensor, Tensor | None]:
    """(x_adv, kappa) from a start. One micro-batch takes all its steps before the next one begins."""
    method, task, threat = work.method, work.task, work.task.threat
    x_adv = torch.empty_like(x_nat)
    kappa = torch.zeros_like(y) if method.counts_iterates else None
    with attack_mode(task.model):
        for part in micro_batches(len(y), work.rows):
            batch = AttackBatch(task.model, x_nat[part], y[part], work.loss)
            x_adv[part] = gradient_ascent(
                task.model,
                batch.x_nat,
                partial(_climbed, method, batch, None if kappa is None else kappa[part]),
                threat=threat,
                steps=threat.steps,
                step_size=float(threat.step_size),
                start=start[part],
                passes=work.passes,
            )
    return x_adv, kappa


def _climbed(method: Method, batch: AttackBatch, kappa: Tensor | None, logits: Tensor) -> Tensor:
    """The loss of an iterate, and one more for ``kappa`` where it is classified correctly."""
    if kappa is not None:  # on the device: nothing waits for it
        kappa.add_(logits.argmax(dim=1) == batch.y)
    batch.logits_adv = logits
    return method.attack_loss(batch)


def _gradient(work: _Work, batch: TrainBatch) -> Tensor:
    """Leave the gradient of the step in the parameters; the loss for the record."""
    inputs = batch.x_nat, batch.x_adv, batch.y, batch.attacked, batch.kappa
    value, *gradients = work.call("training step", partial(_backward, work), *inputs)
    for parameter, gradient in zip(work.task.model.parameters(), gradients, strict=True):
        parameter.grad = gradient  # where a graph was replayed, this is what it wrote
    assert value is not None
    return value


def _backward(
    work: _Work, x_nat: Tensor, x_adv: Tensor, y: Tensor, attacked: Tensor | None, kappa: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The loss, and the gradient of each parameter."""
    task = work.task
    task.model.zero_grad(set_to_none=True)
    with work.passes():
        value = work.method.backward(TrainBatch(task.model, x_nat, x_adv, y, work.loss, task, attacked, kappa))
    return value, *(parameter.grad for parameter in task.model.parameters())


class _LossMeter:
    """Running mean loss of one epoch; keeps the sum on the device and looks at it now and then."""

    def __init__(self, task: LocalTask, epoch: int) -> None:
        self.task, self.epoch = task, epoch
        self.in_epoch = num_batches(len(task.data), task.settings.batch_size, merge_single=_has_batch_norm(task.model))
        self.total = torch.zeros((), dtype=torch.float64, device=task.device)
        self.examples = 0
        self.batches = 0

    def add(self, loss: Tensor, count: int) -> None:
        self.total += loss.double() * count
        self.examples += count
        self.batches += 1
        every = 1 if self.task.device.type == "cpu" else _REPORT_EVERY
        if self.batches % every == 0 or self.batches == self.in_epoch:
            done = self.epoch * self.in_epoch + self.batches
            whole = self.task.settings.epochs * self.in_epoch
            self.task.on_batch(BatchProgress(self.task.client, done, whole, self.mean()))

    def mean(self) -> float:
        """Mean loss per example so far.

        Raises:
            UpdateError: when it is not finite.
        """
        mean = float(self.total) / max(1, self.examples)
        if mean != mean or abs(mean) == float("inf"):
            raise UpdateError(
                f"client {self.task.client}, round {self.task.round}, epoch {self.epoch + 1}: the training loss is "
                f"{mean} by batch {self.batches} of {self.in_epoch}. Lower train_args.learning_rate "
                f"(now {self.task.settings.learning_rate:g}) or the scale of the loss."
            )
        return mean
