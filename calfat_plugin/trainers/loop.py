"""The only local training loop: epochs or steps, batches, attack, clipping, and the check that numbers stay finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from types import MappingProxyType

import torch
from torch import Tensor, nn

from calfat_plugin import returned
from calfat_plugin.datasets.batches import Batch, batch_bounds, batches
from calfat_plugin.datasets.data import pixels
from calfat_plugin.errors import PluginError, UpdateError
from calfat_plugin.interfaces import ActiveCorrection, ClientLoss, InnerAttack, LocalTask, RoundEnd
from calfat_plugin.maths.attacks import buffers_kept
from calfat_plugin.maths.passes import PROBED, fast_passes, float32_as, passes_in
from calfat_plugin.maths.tied import state_of
from calfat_plugin.models.norms import begin_round
from calfat_plugin.observer import BatchProgress
from calfat_plugin.profiling import timed, timed_each
from calfat_plugin.results import ALIGNMENT, PASSES, LocalUpdate
from calfat_plugin.seeds import generator
from calfat_plugin.trainers.additions import class_factors, perturbed_backward, smoothed
from calfat_plugin.trainers.attacking import alignment_of, attacked, look_back
from calfat_plugin.trainers.batches import TrainBatch
from calfat_plugin.trainers.client_round import ClientRound, ForwardCount, Method
from calfat_plugin.trainers.inspection import INSPECTED, inspected
from calfat_plugin.trainers.optimizers import methods_optimizer

_REPORT_EVERY = 10  # batches between looks at the loss on a GPU, which each look makes wait
# What method and inner attack keep in a client's state; the rest is the aggregator's.
_OF_METHOD, _OF_INNER = "method/", "inner/"


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
            factors=_factors(task) if attacks else None,
        )
        if correction.wants_full_gradient:
            with timed("full gradient"):
                correction.take_full_gradient(_full_gradient(work))
        metrics = _train(work, correction)
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


def _factors(task: LocalTask) -> Tensor | None:
    """(C,) what eps is multiplied by for examples of each class; None: all have eps itself."""
    if task.by_class is None:
        return None
    factors = class_factors(task.class_counts, task.by_class, task.round, task.settings.num_rounds)
    if factors is None:
        return None
    return factors.to(task.device)


# --- the loop ---------------------------------------------------------------------------------------------------------


def _train(work: ClientRound, correction: ActiveCorrection) -> dict[str, float]:
    """Train; means per example of the last epoch, or of all local steps: the loss, and what the method recorded."""
    task = work.task
    lengths = _lengths(task)
    num_batches = sum(lengths)
    steps = _Steps(work, correction, num_batches)
    meter = LossMeter(task, num_batches)
    alignment = None
    for epoch, length in enumerate(lengths):
        meter.begin_epoch(epoch, length)
        noise = generator(task.seed, "attack", round=task.round, client=task.client, extra=epoch, device=task.device)
        for drawn in timed_each("data", islice(_one_epoch(task, "batches", epoch), length)):
            number = meter.done + 1
            before = drawn.x.clone() if number <= INSPECTED else None
            with timed("attack"):
                batch = attacked(work, drawn, noise, moving=True)
            if number == num_batches and work.attacks:
                with timed("alignment"):
                    alignment = alignment_of(work, batch)
            with timed("outer step"):
                loss = steps.take(batch, before, number)
            meter.add(loss, len(batch.y), batch.recorded)
    metrics = meter.means()
    if alignment is not None:
        metrics[ALIGNMENT] = alignment
    return metrics


class _Steps:
    """The optimiser's steps of a client's round."""

    def __init__(self, work: ClientRound, correction: ActiveCorrection, num_batches: int) -> None:
        self._work = work
        self._correction = correction
        self._optimizer, self._schedule = methods_optimizer(
            work.method, work.task, num_batches, needs_sgd=correction.needs_sgd
        )
        self._trained = False  # whether a step was taken
        self._inspecting: Callable[..., AbstractContextManager[None]] | None = None

    def take(self, batch: TrainBatch, before: Tensor | None, number: int) -> Tensor:
        """Take the steps for one mini-batch, one unless method or inner attack takes more; the loss for the record.

        Args:
            batch: the mini-batch, attacked.
            before: a copy of its clean images from before the attack, where its steps are inspected.
            number: of the mini-batch, from 1.
        """
        work = self._work
        self._inspecting = None
        if before is not None:
            self._inspecting = partial(inspected, clean=before, made=batch.x_adv, number=number)
        value = work.task.inner.take_steps(batch, partial(work.method.take_steps, step=self._step), work.memory)
        look_back(work, batch)
        if work.method.has_own_steps:  # a step has checked its own
            returned.loss(value, "take_steps returned")
        if self._schedule is not None:
            self._schedule.step()
        return value

    def _step(self, batch: TrainBatch) -> Tensor:
        """Move the parameters once; the loss for the record."""
        model = self._work.task.model
        max_norm = self._work.task.settings.max_grad_norm
        with nullcontext() if self._inspecting is None else self._inspecting(batch, trained=self._trained):
            value = _gradient(self._work, batch)
        if not self._trained and all(parameter.grad is None for parameter in model.parameters()):
            raise PluginError("backward left no gradient in any parameter; it has to call loss.backward().")
        self._trained = True
        self._correction.after_backward(model)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        self._optimizer.step()
        self._correction.after_step(model, self._optimizer.param_groups[0]["lr"])
        return value


def _gradient(work: ClientRound, batch: TrainBatch) -> Tensor:
    """Leave the gradient of the step in the parameters; the loss for the record."""
    model = work.task.model
    backward = work.method.backward
    if work.task.awp is not None:
        backward = partial(perturbed_backward, backward, awp=work.task.awp)
    model.zero_grad(set_to_none=True)
    with work.passes():
        value = returned.loss(backward(batch), "backward returned")
    if not model.training:
        raise PluginError(
            "a step left the model in evaluation mode; modes are the loop's, so call model.train() again."
        )
    return value


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


# --- the loss for the record ------------------------------------------------------------------------------------------


class LossMeter:
    """Running means of one epoch, or of a round of local steps; looks at the sums on the device now and then."""

    def __init__(self, task: LocalTask, in_round: int) -> None:
        self.task = task
        self.in_round = in_round
        self.done = 0
        self.begin_epoch(0, in_round)

    def begin_epoch(self, epoch: int, in_epoch: int) -> None:
        self.epoch = epoch
        self.in_epoch = in_epoch
        self.batches = 0
        if epoch == 0 or self.task.settings.local_steps is None:
            self.total = torch.zeros((), dtype=torch.float64, device=self.task.device)
            self.recorded: dict[str, tuple[Tensor, int]] = {}  # sum over examples, and how many
            self.examples = 0

    def add(self, loss: Tensor, count: int, recorded: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        self.total += loss.double() * count
        for name, mean in recorded.items():
            total, examples = self.recorded.get(name, (torch.zeros_like(self.total), 0))
            self.recorded[name] = total + mean.double() * count, examples + count
        self.examples += count
        self.batches += 1
        self.done += 1
        every = _REPORT_EVERY
        if self.task.device.type == "cpu":
            every = 1
        if self.batches % every == 0 or self.batches == self.in_epoch:
            self.task.on_batch(BatchProgress(self.task.client, self.done, self.in_round, self.mean()))

    def means(self) -> dict[str, float]:
        means = {name: float(total) / examples for name, (total, examples) in self.recorded.items()}
        return {**means, "loss": self.mean()}

    def mean(self) -> float:
        mean = float(self.total) / max(1, self.examples)
        if mean != mean or abs(mean) == float("inf"):
            raise UpdateError(
                f"client {self.task.client}, round {self.task.round}, epoch {self.epoch + 1}: the training loss is "
                f"{mean} by batch {self.batches} of {self.in_epoch}. Lower train_args.learning_rate "
                f"(now {self.task.settings.learning_rate:g}) or the scale of the loss."
            )
        return mean
