"""The only local training loop: epochs or steps, batches, attack, optimiser.

:class:`Training` is the algorithm. Nothing in it is there for speed or safety: :func:`train_locally` sets layout and
arithmetic of the model's passes around it, ``attacking`` cuts micro-batches, and :class:`WatchedTraining` adds the
timers of a profile and the checks of plugins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from calfat_plugin import returned
from calfat_plugin.datasets.batches import Batch, batch_bounds, batches
from calfat_plugin.datasets.data import pixels
from calfat_plugin.errors import PluginError
from calfat_plugin.interfaces import ActiveCorrection, ClientLoss, InnerAttack, LocalTask, RoundEnd, TrainBatch
from calfat_plugin.maths.attacks import buffers_kept
from calfat_plugin.maths.passes import PROBED, fast_passes, float32_as, passes_in
from calfat_plugin.maths.tied import state_of
from calfat_plugin.models.norms import begin_round
from calfat_plugin.profiling import timed, timed_each
from calfat_plugin.results import ALIGNMENT, PASSES, LocalUpdate
from calfat_plugin.seeds import generator
from calfat_plugin.trainers.additions import check_optimizer, class_factors, perturbed_backward, smoothed
from calfat_plugin.trainers.attacking import ClientRound, ForwardCount, Method, attacked, look_back
from calfat_plugin.trainers.watching import LossMeter, alignment_of, inspected

# What method and inner attack keep in a client's state; the rest is the aggregator's.
_OF_METHOD, _OF_INNER = "method/", "inner/"
INSPECTED = 2  #: mini-batches of a client's round: an attack that remembers may be wrong from the second one on


class Training:
    """The mini-batches of a client's round: each is attacked, and the parameters step on what the attack gave."""

    def __init__(self, work: ClientRound, correction: ActiveCorrection) -> None:
        task = work.task
        self.work = work
        self.correction = correction
        self.lengths = _lengths(task)
        self.num_batches = sum(self.lengths)
        optimizer = work.method.make_optimizer(list(task.model.parameters()), task)
        self.optimizer = returned.instance(optimizer, Optimizer, "make_optimizer returned")
        self.schedule = work.method.make_schedule(self.optimizer, task, self.num_batches)

    def run(self) -> dict[str, float]:
        """Train; means per example of the last epoch, or of all local steps: the loss, and what the method recorded."""
        task = self.work.task
        meter = LossMeter(task, self.num_batches)
        for epoch, length in enumerate(self.lengths):
            meter.begin_epoch(epoch, length)
            noise = generator(
                task.seed, "attack", round=task.round, client=task.client, extra=epoch, device=task.device
            )
            for drawn in self.draw(epoch, length):
                batch = self.attack(drawn, noise)
                loss = self.take_steps(batch)
                meter.add(loss, len(batch.y), batch.recorded)
        return meter.means()

    def draw(self, epoch: int, length: int) -> Iterator[Batch]:
        """The mini-batches of an epoch, clean, as many as the round takes of it."""
        return islice(_one_epoch(self.work.task, "batches", epoch), length)

    def attack(self, drawn: Batch, noise: Generator) -> TrainBatch:
        """A mini-batch with its adversarial examples."""
        return attacked(self.work, drawn, noise, moving=True)

    def take_steps(self, batch: TrainBatch) -> Tensor:
        """Take the steps for a mini-batch: one, unless method or inner attack takes more. Return the loss."""
        work = self.work
        steps_of_method = partial(work.method.take_steps, step=self.step)
        loss = work.task.inner.take_steps(batch, steps_of_method, work.memory)
        look_back(work, batch)
        if self.schedule is not None:
            self.schedule.step()
        return loss

    def step(self, batch: TrainBatch) -> Tensor:
        """Move the parameters once; return the loss for the record."""
        model = self.work.task.model
        max_norm = self.work.task.settings.max_grad_norm
        loss = self.backward(batch)
        self.correction.after_backward(model)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        self.optimizer.step()
        self.correction.after_step(model, self.optimizer.param_groups[0]["lr"])
        return loss

    def backward(self, batch: TrainBatch) -> Tensor:
        """Leave the gradient of a step in the parameters; return the loss for the record."""
        return _gradient(self.work, batch)


# --- what watches it --------------------------------------------------------------------------------------------------


class WatchedTraining(Training):
    """The same with timers, and with checks of the plugins.

    The first mini-batches of a round are inspected. On the last one alignment is measured.
    """

    def __init__(self, work: ClientRound, correction: ActiveCorrection) -> None:
        super().__init__(work, correction)
        if self.schedule is not None:
            returned.instance(self.schedule, LRScheduler, "make_schedule returned")
        check_optimizer(self.optimizer, self.schedule, work.task.settings, needs_sgd=correction.needs_sgd)
        self.number = 0  # of the mini-batch, from 1
        self.clean: Tensor | None = None  # a copy of its images from before the attack, where it is inspected
        self.crafted: Tensor | None = None  # what the attack gave
        self.trained = False  # whether a step was taken
        self.alignment: float | None = None

    def run(self) -> dict[str, float]:
        metrics = super().run()
        if self.alignment is not None:
            metrics[ALIGNMENT] = self.alignment
        return metrics

    def draw(self, epoch: int, length: int) -> Iterator[Batch]:
        return timed_each("data", super().draw(epoch, length))

    def attack(self, drawn: Batch, noise: Generator) -> TrainBatch:
        self.number += 1
        self.clean = None
        if self.number <= INSPECTED:
            self.clean = drawn.x.clone()
        with timed("attack"):
            batch = super().attack(drawn, noise)
        self.crafted = batch.x_adv
        if self.number == self.num_batches and self.work.attacks:
            with timed("alignment"):
                self.alignment = alignment_of(self.work, batch)
        return batch

    def take_steps(self, batch: TrainBatch) -> Tensor:
        with timed("outer step"):
            loss = super().take_steps(batch)
        if self.work.method.has_own_steps:  # a step has checked its own
            returned.loss(loss, "take_steps returned")
        return loss

    def backward(self, batch: TrainBatch) -> Tensor:
        inspection: AbstractContextManager[None] = nullcontext()
        if self.clean is not None and self.crafted is not None:
            inspection = inspected(batch, self.clean, self.crafted, self.number, trained=self.trained)
        with inspection:
            loss = super().backward(batch)
        if not self.trained and all(parameter.grad is None for parameter in self.work.task.model.parameters()):
            raise PluginError("backward left no gradient in any parameter; it has to call loss.backward().")
        self.trained = True
        return loss


# --- a client's round -------------------------------------------------------------------------------------------------


def train_locally(method: Method, task: LocalTask) -> LocalUpdate:
    """Train ``task.model`` for one round with ``method``'s losses.

    One optimiser a round, so SGD's momentum starts at zero (methods.md 1). Attack in evaluation mode, outer loss in
    training mode. Metrics are means per example of the last epoch (of the round, where it has local steps).
    """
    model = task.model
    attacks = method.attacks and task.round > task.clean_rounds
    if not attacks:
        task = replace(task, inner=InnerAttack())
    loss = returned.instance(method.bind_loss(task.class_counts.to(task.device)), ClientLoss, "bind_loss returned")
    loss = smoothed(loss, task.label_smoothing)
    model.train()
    begin_round(model, task.round, task.settings.num_rounds)
    correction = task.correction.begin(task)
    task_of_inner = _with_state_of(task, _OF_INNER)
    task = _with_state_of(task, _OF_METHOD)
    factors = None
    if attacks and task.by_class is not None:
        factors = class_factors(task.class_counts, task.by_class, task.round, task.settings.num_rounds)
    if factors is not None:
        factors = factors.to(task.device)
    count = ForwardCount()
    with (
        float32_as(task.precision, task.device),
        fast_passes(model, pixels(task.data.x[:PROBED].to(task.device))) as rows,
        model.register_forward_pre_hook(count.add, with_kwargs=True),
    ):
        context = method.begin_round(task)
        work = ClientRound(
            method=method,
            task=task,
            loss=loss,
            context=context,
            memory=task.inner.begin_round(task_of_inner),
            attacks=attacks,
            rows=rows,
            passes=passes_in(task.precision, task.device),
            count=count,
            factors=factors,
        )
        if correction.wants_full_gradient:
            with timed("full gradient"):
                correction.take_full_gradient(_full_gradient(work))
        metrics = WatchedTraining(work, correction).run()
        end = returned.instance(method.end_round(task, context), RoundEnd, "end_round returned")
    extras, client_state = correction.finish(model)
    of_method = returned.tensors(end.state, "end_round's state holds")
    of_inner = task.inner.end_round(work.memory)
    return LocalUpdate(
        state=_copied(state_of(model)),
        num_examples=len(task.data),
        extras={**extras, **_copied(returned.tensors(end.extras, "end_round's extras hold"))},
        metrics={**returned.mapping(end.metrics, "end_round's metrics are"), **metrics, PASSES: float(count.images)},
        client_state={**client_state, **_copied(of_method, _OF_METHOD), **_copied(of_inner, _OF_INNER)},
    )


def _with_state_of(task: LocalTask, namespace: str) -> LocalTask:
    """The task with one part of what the client keeps, under the names that this part knows."""
    state = {}
    for name, tensor in task.client_state.items():
        if name.startswith(namespace):
            state[name.removeprefix(namespace)] = tensor
    return replace(task, client_state=state)


def _copied(tensors: Mapping[str, Tensor], namespace: str = "") -> dict[str, Tensor]:
    """Copies on the CPU, in the layout that files and messages have."""
    copies = {}
    for name, tensor in tensors.items():
        copies[namespace + name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return copies


# --- gradients --------------------------------------------------------------------------------------------------------


def _gradient(work: ClientRound, batch: TrainBatch) -> Tensor:
    """Leave the gradient of a step in the parameters; return the loss for the record."""
    model = work.task.model
    backward = work.method.backward
    if work.task.awp is not None:
        backward = partial(perturbed_backward, backward, awp=work.task.awp)
    model.zero_grad(set_to_none=True)
    with work.passes():
        loss = returned.loss(backward(batch), "backward returned")
    if not model.training:
        raise PluginError(
            "a step left the model in evaluation mode; modes are the loop's, so call model.train() again."
        )
    return loss


def _full_gradient(work: ClientRound) -> dict[str, Tensor]:
    """Gradient of the mean loss over all of the client's data, weight decay included, at the model's weights.

    The training that follows is the same with and without this pass: it has random streams and an attack's memory of
    its own, and puts normalisation statistics and torch's global generators (dropout) back.
    """
    work = replace(work, memory=deepcopy(work.memory))
    task = work.task
    model = task.model
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradient = {name: task.settings.weight_decay * parameter.detach() for name, parameter in parameters.items()}
    noise = generator(task.seed, "full gradient attack", round=task.round, client=task.client, device=task.device)
    with buffers_kept(model), torch.random.fork_rng(devices=work.gpus):
        for drawn in _one_epoch(task, "full gradient batches", 0):
            batch = attacked(work, drawn, noise, moving=False)
            _gradient(work, batch)
            look_back(work, batch)
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    gradient[name].add_(parameter.grad, alpha=len(batch.y) / len(task.data))
    model.zero_grad(set_to_none=True)
    return {name: tensor.contiguous() for name, tensor in gradient.items()}


# --- mini-batches -----------------------------------------------------------------------------------------------------


def _one_epoch(task: LocalTask, purpose: str, epoch: int) -> Iterator[Batch]:
    return batches(
        task.data,
        task.settings.batch_size,
        task.device,
        generator=generator(task.seed, purpose, round=task.round, client=task.client, extra=epoch),
        augment=task.augment,
        merge_single=_has_batch_norm(task.model),
    )


def _lengths(task: LocalTask) -> list[int]:
    """How many batches to take of each epoch: all, or as many as make the round's local steps together."""
    settings = task.settings
    whole_epoch = len(batch_bounds(len(task.data), settings.batch_size, merge_single=_has_batch_norm(task.model)))
    if settings.local_steps is None or not whole_epoch:  # a client without examples takes no step
        return [whole_epoch] * settings.epochs
    epochs, rest = divmod(settings.local_steps, whole_epoch)
    lengths = [whole_epoch] * epochs
    if rest:
        lengths.append(rest)
    return lengths


def _has_batch_norm(model: nn.Module) -> bool:
    """Whether training on a batch of one example would fail or be meaningless."""
    return any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules())
