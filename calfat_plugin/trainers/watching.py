"""What is looked at while a client trains: images of the first mini-batches, alignment on the last one, and the loss.

A look at a value makes the host wait for a GPU, so there are few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType

import torch
from torch import Tensor

from calfat_plugin import returned
from calfat_plugin.errors import BudgetError, PluginError, UpdateError
from calfat_plugin.interfaces import InnerTask, LocalTask, TrainBatch
from calfat_plugin.maths.attacks import attack_mode, cosine
from calfat_plugin.maths.losses import cross_entropy
from calfat_plugin.observer import BatchProgress
from calfat_plugin.returned import attribute_errors_to
from calfat_plugin.trainers.attacking import ClientRound

_REPORT_EVERY = 10  # batches between looks at the loss on a GPU
_FEW_STEPS = 3  # an attack of fewer may be overfitted
_PROBED_IMAGES, _FEWEST_PROBED = 32, 8  # images on which alignment is measured, at most and at least: it costs little


# --- the first mini-batches -------------------------------------------------------------------------------------------


@contextmanager
def inspected(batch: TrainBatch, clean: Tensor, crafted: Tensor, number: int, *, trained: bool) -> Iterator[None]:
    """Check that a step's images lie in the budget, and that the step inside does not write to them.

    Args:
        batch: what the step trains on.
        clean: a copy of the clean images from before the attack.
        crafted: the images that the attack gave.
        number: of the mini-batch, from 1.
        trained: whether the model took steps before. It may then have diverged, so values that are not finite are left
            to the check of the loss.
    """
    task = batch.task
    x_nat, x_adv = batch.x_nat, batch.x_adv
    where = f"client {task.client}, round {task.round}, batch {number}"
    of_inner = ""  # the inner attack, where it made x_adv
    blaming: AbstractContextManager[None] = nullcontext()
    if task.inner.who and (task.inner.has_own_steps or x_adv is crafted):
        of_inner = f" of {task.inner.who}"
        blaming = attribute_errors_to(task.inner.who, type(task.inner.options))
    with blaming:
        if not torch.equal(clean, x_nat):
            raise PluginError(
                f"{where}: x_nat was changed in place while adversarial examples were made of it. Work on a copy: "
                "x_nat.clone()."
            )
        finite = bool(returned.like(x_adv, x_nat, f"{where}: x_adv is").isfinite().all())
        if not finite and not trained:
            raise UpdateError(f"{where}: the adversarial examples{of_inner} hold nan or inf.")
        if finite:
            _check_budget(batch, where)
    tensors = {"x_nat": x_nat, "x_adv": x_adv, "y": batch.y}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        if not torch.equal(before[name], tensor):
            raise PluginError(f"{where}: the training step changed {name} in place. Work on a copy: {name}.clone().")
    if batch.x_adv is not x_adv and not trained:  # the step put other images there
        _check_budget(batch, where)


def _check_budget(batch: TrainBatch, where: str) -> None:
    try:
        batch.task.inner.reach(batch.task.threat).check(batch.x_adv.detach(), batch.x_nat, who=where)
    except BudgetError as error:
        raise PluginError(f"{error} What leaves the ball by design says how far in InnerAttack.reach.") from None


# --- the last mini-batch ----------------------------------------------------------------------------------------------


def alignment_of(work: ClientRound, batch: TrainBatch) -> float | None:
    """``results.ALIGNMENT`` of the batch's first images, by the logits that the attack sees; None: it is not measured.

    Images with a zero gradient have no direction and are left out. It is not measured for attacks of several steps, nor
    for a model that gives all images the same answer, wrong for most: that model has not learned anything yet, so it
    cannot have overfitted the attack.
    """
    task = work.task
    if task.threat.steps >= _FEW_STEPS:
        return None
    x, y = batch.x_nat, batch.y
    if batch.attacked is not None:
        x, y = x[batch.attacked], y[batch.attacked]
    x, y = x[:_PROBED_IMAGES], y[:_PROBED_IMAGES]
    answers: list[Tensor] = []

    def loss(logits: Tensor) -> Tensor:
        answers.append(logits.argmax(dim=1))
        return cross_entropy(work.loss.attack_logits(logits), y, reduction="sum")

    images_before = work.count.images
    with attack_mode(task.model), torch.random.fork_rng(devices=work.gpus):  # training draws as without this
        threat = work.threat(y)
        probe = InnerTask(task.model, x, x, loss, threat)
        gradient = probe.gradient(x)
        stepped = threat.project(threat.ascend(x, gradient, float(threat.eps)), x)
        cosines = cosine(gradient, probe.gradient(stepped))
    work.count.images = images_before  # these passes are no part of the training
    cosines = cosines[~cosines.isnan()]
    knows_nothing = len(answers[0].unique()) < 2 and 2 * int((answers[0] == y).sum()) < len(y)
    if knows_nothing or len(cosines) < _FEWEST_PROBED:
        return None
    return float(cosines.mean())


# --- the loss ---------------------------------------------------------------------------------------------------------


class LossMeter:
    """Means per example of one epoch, or of a round of local steps; looks at the sums on the device now and then."""

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
        """Add the loss of a mini-batch of ``count`` examples, and the means that the method recorded."""
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
        """The means of the loss, and of what the method recorded."""
        means = {}
        for name, (total, examples) in self.recorded.items():
            means[name] = float(total) / examples
        means["loss"] = self.mean()
        return means

    def mean(self) -> float:
        """The mean of the loss.

        Raises:
            UpdateError: it is not finite.
        """
        mean = float(self.total) / max(1, self.examples)
        if mean != mean or abs(mean) == float("inf"):
            raise UpdateError(
                f"client {self.task.client}, round {self.task.round}, epoch {self.epoch + 1}: the training loss is "
                f"{mean} by batch {self.batches} of {self.in_epoch}. Lower train_args.learning_rate "
                f"(now {self.task.settings.learning_rate:g}) or the scale of the loss."
            )
        return mean
