"""The inner maximisation of training: from a mini-batch of clean images to one with adversarial examples."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from calfat_plugin import returned
from calfat_plugin.errors import PluginError
from calfat_plugin.interfaces import InnerTask
from calfat_plugin.maths.attacks import attack_mode, cosine
from calfat_plugin.maths.losses import cross_entropy
from calfat_plugin.maths.passes import micro_batches
from calfat_plugin.trainers.batches import AttackBatch, TrainBatch

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from calfat_plugin.datasets.batches import Batch, Examples
    from calfat_plugin.trainers.client_round import ClientRound

_FEW_STEPS = 3  # an attack of fewer may be overfitted
_PROBED_IMAGES, _FEWEST_PROBED = 32, 8  # images on which alignment is measured, at most and at least: it costs little


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
                some = examples.rows(where.to(examples.index.device))
                x_adv[where], _ = _crafted(work, x_nat[where], y[where], some, noise, moving=moving)
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
    kappa = torch.zeros_like(y) if method.counts_iterates else None
    with attack_mode(task.model):
        for part in micro_batches(len(y), work.rows):
            batch = AttackBatch(task.model, x_nat[part], y[part], work.loss, work.context)
            inner_task = InnerTask(
                model=task.model,
                x_nat=batch.x_nat,
                start=start[part],
                loss=partial(_loss_of_iterate, work, batch, None if kappa is None else kappa[part]),
                threat=work.threat(batch.y),
                passes=work.passes,
                memory=work.memory,
                examples=examples.rows(part),
                drawn=None if draws is None else draws[part],
            )
            points = method.craft(batch, inner_task, task.inner)
            x_adv[part] = returned.like(points, batch.x_nat, "craft returned").detach()
    return x_adv, kappa


def _loss_of_iterate(work: ClientRound, batch: AttackBatch, kappa: Tensor | None, logits: Tensor) -> Tensor:
    """What the attack climbs; adds one to ``kappa`` where the iterate is classified correctly."""
    if kappa is not None:  # on the device: nothing waits for it
        kappa.add_(logits.argmax(dim=1) == batch.y)
    batch.logits_adv = logits
    version = batch.x_nat._version
    value = returned.loss(work.method.attack_loss(batch), "attack_loss returned")
    if batch.x_nat._version != version:  # seen here, it is no mistake of the inner attack
        where = f"client {work.task.client}, round {work.task.round}"
        raise PluginError(f"{where}: attack_loss changed x_nat in place. Work on a copy: x_nat.clone().")
    return value


def alignment_of(work: ClientRound, batch: TrainBatch) -> float | None:
    """``results.ALIGNMENT`` of the batch's first images, by the logits that the attack sees; None: it is not measured.

    Images of which a gradient is zero have no direction, and do not count. A model that gives all of them one answer,
    wrong for most, has learned nothing yet, so nothing was overfitted: its loss turns anyhow.
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
    with attack_mode(task.model), torch.random.fork_rng(devices=work.gpus):  # a look draws nothing from training
        threat = work.threat(y)
        probe = InnerTask(task.model, x, x, loss, threat)
        clean = probe.gradient(x)
        moved = threat.project(threat.ascend(x, clean, float(threat.eps)), x)
        cosines = cosine(clean, probe.gradient(moved))
    work.count.images = images_before  # nor does it count
    cosines = cosines[~cosines.isnan()]
    knows_nothing = len(answers[0].unique()) < 2 and 2 * int((answers[0] == y).sum()) < len(y)
    if knows_nothing or len(cosines) < _FEWEST_PROBED:
        return None
    return float(cosines.mean())
