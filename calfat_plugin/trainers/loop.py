"""The only local training loop: epochs or steps, batches, attack, clipping, and the check that numbers stay finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from calfat_plugin import returned
from calfat_plugin.datasets.batches import Batch, Examples, batch_bounds, batches
from calfat_plugin.datasets.data import pixels
from calfat_plugin.errors import PluginError, UpdateError
from calfat_plugin.interfaces import ActiveCorrection, ClientLoss, InnerAttack, InnerTask, LocalTask, RoundEnd
from calfat_plugin.maths.attacks import attack_mode, buffers_kept, cosine
from calfat_plugin.maths.losses import cross_entropy
from calfat_plugin.maths.passes import PROBED, fast_passes, micro_batches
from calfat_plugin.maths.precision import float32_as, passes_in
from calfat_plugin.maths.tied import state_of
from calfat_plugin.models.fix_norm import begin_round
from calfat_plugin.observer import BatchProgress
from calfat_plugin.profiling import timed, timed_each
from calfat_plugin.results import ALIGNMENT, PASSES, LocalUpdate
from calfat_plugin.seeds import generator
from calfat_plugin.trainers.additions import class_factors, perturbed_backward, smoothed
from calfat_plugin.trainers.batches import AttackBatch, TrainBatch
from calfat_plugin.trainers.inspection import INSPECTED, inspected
from calfat_plugin.trainers.optimizers import MakesOptimizers, methods_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from calfat_plugin.threat import ThreatModel

_FEW_STEPS = 3  # an attack of fewer may be overfitted
_PROBED_IMAGES, _FEWEST_PROBED = 32, 8  # at most and at least: it costs little
_REPORT_EVERY = 10  # batches between looks at the loss on a GPU, which each look makes wait
_KEPT, _REMEMBERED = "method/", "inner/"  # what method and inner attack keep in a client's state; the rest is the
# aggregator's


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
class _Work:
    """One client's round as the loop sees it."""

    method: Method
    task: LocalTask
    loss: ClientLoss
    context: Any  # what the method's ``begin_round`` returned
    memory: Any  # what the inner attack's ``begin_round`` returned
    attacks: bool  # whether there are adversarial examples in this round
    rows: int  # examples that pass through the model at once in an attack
    passes: Callable[[], AbstractContextManager[object]]  # makes contexts that set the arithmetic of the model's passes
    count: _Count
    factors: Tensor | None  # (C,) of eps by class, where each example has its own

    def threat(self, y: Tensor) -> ThreatModel:
        """The budget of examples with these labels."""
        threat, factors = self.task.threat, self.factors
        return threat if factors is None else replace(threat, factors=factors[y.to(factors.device)])


class _Count:
    """How often an image went forward through a model and its copies so far."""

    def __init__(self) -> None:
        self.images = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Count:
        """The same: what goes through a copy of the model counts."""
        return self

    def add(self, model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """The hook, called before a forward pass; a model may say in ``passes`` that one of its own takes several."""
        images, *_ = *inputs, *named.values()
        self.images += len(images) * getattr(model, "passes", 1)


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
    remembered, task = _keeping(task, _REMEMBERED), _keeping(task, _KEPT)
    sample = pixels(task.data.x[:PROBED].to(task.device))
    count = _Count()
    with (
        float32_as(task.precision, task.device),
        fast_passes(model, sample) as rows,
        model.register_forward_pre_hook(count.add, with_kwargs=True),
    ):
        context, memory = method.begin_round(task), task.inner.begin_round(remembered)
        factors = None
        if task.by_class is not None and attacks:
            factors = class_factors(task.class_counts, task.by_class, task.round, task.settings.num_rounds)
            factors = None if factors is None else factors.to(task.device)
        passes = passes_in(task.precision, task.device)
        work = _Work(method, task, loss, context, memory, attacks, rows, passes, count, factors)
        metrics = _epochs(work, correction)
        end = returned.instance(method.end_round(task, context), RoundEnd, "end_round returned")
    extras, client_state = correction.finish(model)
    own = {_KEPT + name: tensor for name, tensor in returned.tensors(end.state, "end_round's state holds").items()}
    own |= {_REMEMBERED + name: tensor for name, tensor in task.inner.end_round(memory).items()}
    return LocalUpdate(
        state=_copied(state_of(model)),
        num_examples=len(task.data),
        extras={**extras, **_copied(returned.tensors(end.extras, "end_round's extras hold"))},
        metrics={**returned.mapping(end.metrics, "end_round's metrics are"), **metrics, PASSES: float(count.images)},
        client_state={**client_state, **_copied(own)},
    )


def _keeping(task: LocalTask, namespace: str) -> LocalTask:
    """The task with one part of what the client keeps."""
    kept = task.client_state
    return replace(task, client_state={n.removeprefix(namespace): kept[n] for n in kept if n.startswith(namespace)})


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, in the layout that files and messages have."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }


def _epochs(work: _Work, correction: ActiveCorrection) -> dict[str, float]:
    """Train; means per example of the last epoch, or of all local steps: the loss, and what the method recorded."""
    method, task, model = work.method, work.task, work.task.model
    if correction.wants_full_gradient:
        with timed("full gradient"):
            correction.take_full_gradient(_full_gradient(work))
    lengths, max_norm = _lengths(task), task.settings.max_grad_norm
    optimizer, schedule = methods_optimizer(method, task, sum(lengths), needs_sgd=correction.needs_sgd)

    meter, trained = LossMeter(task, sum(lengths)), False
    inspecting: Callable[..., AbstractContextManager[None]] | None = None

    def step(batch: TrainBatch) -> Tensor:
        nonlocal trained
        with nullcontext() if inspecting is None else inspecting(batch, trained=trained):
            value = _gradient(work, batch)
        if not trained and all(parameter.grad is None for parameter in model.parameters()):
            raise PluginError("backward left no gradient in any parameter; it has to call loss.backward().")
        trained = True
        correction.after_backward(model)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        correction.after_step(model, optimizer.param_groups[0]["lr"])
        return value

    last, alignment = sum(lengths) - 1, None
    for epoch, length in enumerate(lengths):
        meter.begin_epoch(epoch, length)
        noise = generator(task.seed, "attack", round=task.round, client=task.client, extra=epoch, device=task.device)
        for drawn in timed_each("data", islice(_one_epoch(task, "batches", epoch), length)):
            clean = drawn.x.clone() if meter.done < INSPECTED else None
            with timed("attack"):
                batch = _attacked(work, drawn, noise, moving=True)
            inspecting = None
            if clean is not None:
                inspecting = partial(inspected, clean=clean, made=batch.x_adv, number=meter.done + 1)
            if meter.done == last and work.attacks:
                with timed("alignment"):
                    alignment = _alignment(work, batch)
            with timed("outer step"):
                value = task.inner.take_steps(batch, partial(method.take_steps, step=step), work.memory)
                _look_back(work, batch)
                if method.has_own_steps:  # a step has checked its own
                    returned.loss(value, "take_steps returned")
                if schedule is not None:
                    schedule.step()
            meter.add(value, len(drawn.y), batch.recorded)
    return meter.means() | ({} if alignment is None else {ALIGNMENT: alignment})


class LossMeter:
    """Running means of one epoch, or of a round of local steps; looks at the sums on the device now and then."""

    def __init__(self, task: LocalTask, in_round: int) -> None:
        self.task, self.in_round, self.done = task, in_round, 0
        self.begin_epoch(0, in_round)

    def begin_epoch(self, epoch: int, in_epoch: int) -> None:
        self.epoch, self.in_epoch, self.batches = epoch, in_epoch, 0
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
        every = 1 if self.task.device.type == "cpu" else _REPORT_EVERY
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


def _lengths(task: LocalTask) -> list[int]:
    """How many batches to take of each epoch: all, or as many as make the round's local steps together."""
    settings = task.settings
    whole = len(batch_bounds(len(task.data), settings.batch_size, merge_single=_has_batch_norm(task.model)))
    if settings.local_steps is None or not whole:  # a client without examples takes no step
        return [whole] * settings.epochs
    passes, rest = divmod(settings.local_steps, whole)
    return [*[whole] * passes, *([rest] if rest else [])]


def _full_gradient(work: _Work) -> dict[str, Tensor]:
    """Gradient of the mean loss over all of the client's data, weight decay included, at the model's weights.

    The training that follows is the same with and without this pass: it has random streams and an attack's memory of
    its own, and puts normalisation statistics and torch's global generators (dropout) back.
    """
    work = replace(work, memory=deepcopy(work.memory))
    task, model = work.task, work.task.model
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradient = {name: task.settings.weight_decay * parameter.detach() for name, parameter in parameters.items()}
    noise = generator(task.seed, "full gradient attack", round=task.round, client=task.client, device=task.device)
    with buffers_kept(model), torch.random.fork_rng(devices=_gpus(task)):
        for drawn in _one_epoch(task, "full gradient batches", 0):
            batch = _attacked(work, drawn, noise, moving=False)
            _gradient(work, batch)
            _look_back(work, batch)
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    gradient[name].add_(parameter.grad, alpha=len(drawn.y) / len(task.data))
    model.zero_grad(set_to_none=True)
    return {name: tensor.contiguous() for name, tensor in gradient.items()}


def _one_epoch(task: LocalTask, purpose: str, epoch: int) -> Iterator[Batch]:
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


def _attacked(work: _Work, drawn: Batch, noise: torch.Generator, *, moving: bool) -> TrainBatch:
    """The batch with its adversarial examples; ``moving``: whether steps follow, where the attack may have its own."""
    (x_nat, y, examples), method, task = drawn, work.method, work.task
    index, x_adv, kappa, chosen = examples.index, x_nat, None, None
    if work.attacks:
        chosen = method.attacked_rows(index, task, noise)
        if chosen is None:
            x_adv, kappa = _crafted(work, x_nat, y, examples, noise, moving=moving)
        else:
            chosen, x_adv = returned.rows(chosen, len(y), "attacked_rows returned").to(x_nat.device), x_nat.clone()
            where = chosen.nonzero().squeeze(1)
            if len(where):
                rows = examples.rows(where.to(index.device))
                x_adv[where], _ = _crafted(work, x_nat[where], y[where], rows, noise, moving=moving)
    if work.attacks and task.inner.looks_back:
        x_adv = x_adv.detach().requires_grad_()
    task = task if work.factors is None else replace(task, threat=work.threat(y))
    return TrainBatch(task.model, x_nat, x_adv, y, work.loss, task, chosen, kappa, work.context, index)


def _look_back(work: _Work, batch: TrainBatch) -> None:
    """Show the inner attack the gradient that it asked for."""
    if work.attacks and work.task.inner.looks_back:
        work.task.inner.after_step(batch, batch.x_adv.grad, work.memory)


def _crafted(
    work: _Work, x_nat: Tensor, y: Tensor, examples: Examples, noise: torch.Generator, *, moving: bool
) -> tuple[Tensor, Tensor | None]:
    """(x_adv, kappa) by the method's inner maximisation, or its start where the attack has its own steps.

    The start is drawn for the whole batch, so it does not depend on how the batch is cut. One micro-batch takes all its
    steps before the next one begins. kappa counts iterates 0 .. steps-1, so not x_adv itself.
    """
    method, task = work.method, work.task
    task = task if work.factors is None else replace(task, threat=work.threat(y))
    start = task.inner.start(x_nat, task.threat, noise)
    drawn = task.inner.draw(x_nat, task.threat, noise)
    if start is None:
        start = returned.like(method.start(x_nat, task, noise), x_nat, "start returned")
    if moving and task.inner.has_own_steps:
        return start, None
    x_adv = torch.empty_like(x_nat)
    kappa = torch.zeros_like(y) if method.counts_iterates else None
    with attack_mode(task.model):
        for part in micro_batches(len(y), work.rows):
            batch = AttackBatch(task.model, x_nat[part], y[part], work.loss, work.context)
            loss = partial(_climbed, work, batch, None if kappa is None else kappa[part])
            images = task.model, batch.x_nat, start[part]
            own = work.memory, examples.rows(part), None if drawn is None else drawn[part]
            inner = InnerTask(*images, loss, work.threat(batch.y), work.passes, *own)
            x_adv[part] = returned.like(method.craft(batch, inner, task.inner), batch.x_nat, "craft returned").detach()
    return x_adv, kappa


def _alignment(work: _Work, batch: TrainBatch) -> float | None:
    """``results.ALIGNMENT`` of the batch's first images, by the logits that the attack sees; None: it is not measured.

    Images of which a gradient is zero have no direction, and do not count. A model that gives all of them one answer,
    wrong for most, has learned nothing yet, so nothing was overfitted: its loss turns anyhow.
    """
    task, rows = work.task, slice(None) if batch.attacked is None else batch.attacked
    if task.threat.steps >= _FEW_STEPS:
        return None
    x, y = batch.x_nat[rows][:_PROBED_IMAGES], batch.y[rows][:_PROBED_IMAGES]
    answers: list[Tensor] = []

    def loss(logits: Tensor) -> Tensor:
        answers.append(logits.argmax(dim=1))
        return cross_entropy(work.loss.attack_logits(logits), y, reduction="sum")

    passed = work.count.images
    with attack_mode(task.model), torch.random.fork_rng(devices=_gpus(task)):  # a look draws nothing from training
        threat = work.threat(y)
        probe = InnerTask(task.model, x, x, loss, threat)
        clean = probe.gradient(x)
        moved = threat.project(threat.ascend(x, clean, float(threat.eps)), x)
        cosines = cosine(clean, probe.gradient(moved))
    work.count.images = passed  # nor does it count
    cosines = cosines[~cosines.isnan()]
    knows_nothing = len(answers[0].unique()) < 2 and 2 * int((answers[0] == y).sum()) < len(y)
    return None if knows_nothing or len(cosines) < _FEWEST_PROBED else float(cosines.mean())


def _gpus(task: LocalTask) -> list[torch.device]:
    """The GPU whose global generator training draws from, if any."""
    return [task.device] if task.device.type == "cuda" else []


def _climbed(work: _Work, batch: AttackBatch, kappa: Tensor | None, logits: Tensor) -> Tensor:
    """The loss of an iterate, and one more for ``kappa`` where it is classified correctly."""
    if kappa is not None:  # on the device: nothing waits for it
        kappa.add_(logits.argmax(dim=1) == batch.y)
    batch.logits_adv, version = logits, batch.x_nat._version
    value = returned.loss(work.method.attack_loss(batch), "attack_loss returned")
    if batch.x_nat._version != version:  # seen here, it is no mistake of the inner attack
        where = f"client {work.task.client}, round {work.task.round}"
        raise PluginError(f"{where}: attack_loss changed x_nat in place. Work on a copy: x_nat.clone().")
    return value


def _gradient(work: _Work, batch: TrainBatch) -> Tensor:
    """Leave the gradient of the step in the parameters; the loss for the record."""
    backward, awp, model = work.method.backward, work.task.awp, work.task.model
    model.zero_grad(set_to_none=True)
    with work.passes():
        value = backward(batch) if awp is None else perturbed_backward(backward, batch, awp)
        value = returned.loss(value, "backward returned")
    if not model.training:
        raise PluginError(
            "a step left the model in evaluation mode; modes are the loop's, so call model.train() again."
        )
    return value
