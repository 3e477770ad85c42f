"""The check of inner attacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from calfat_plugin.datasets.batches import Examples, batch_bounds
from calfat_plugin.experiment import Experiment
from calfat_plugin.interfaces import InnerAttack, InnerTask, TrainBatch
from calfat_plugin.maths.attacks import attack_mode
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.modifiers.counts import PLAIN
from calfat_plugin.registry import Registry
from calfat_plugin.runs.request import named_device
from calfat_plugin.testing.federation import check_federation
from calfat_plugin.testing.tiny import (
    SETTINGS,
    THREATS,
    answered,
    balanced_model,
    in_each_norm,
    one_thread,
    require,
    tiny_experiment,
    tiny_images,
    tiny_task,
    unchanged,
)
from calfat_plugin.testing.trainers import around
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers.fedpgd import FedPGD

_METHODS = ("fedpgd", "fedtrades")  # which climb a cross-entropy, and a divergence from the clean image
_SMALL = 20  # the budget's part in which a step uphill ends higher up
_TOLERANCE = 1e-6


@fresh_torch_state()
@one_thread()
def check_inner_attack(
    name: str, *, registry: Registry | None = None, device: str | torch.device = "cpu", **options: Any
) -> None:
    """Hold an inner attack to its contract.

    In each norm that it takes, with a cross-entropy and with a divergence to climb: its images lie in the set that
    ``reach`` declares and raise the loss of their start; an image does not depend on the others of its mini-batch; the
    loss is called once for each step that the entry declares; a single step starts from noise; the same stream of
    random numbers gives the same start; clean images, start, model and global random generators are left alone. What
    clients train on lies in that set as well, and their optimiser takes as many steps as the entry declares. A
    federation of two rounds goes through, and is resumed to the same bits.

    Args:
        name: as recipes name it.
        registry: where it is; None: among the built-ins and what is installed.
        device: where to compute, ``cpu``, ``cuda`` or ``cuda:N``.
        options: instead of its defaults.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        BudgetError: an image left the declared set.
        CalfatError: the framework refuses it.
    """
    inner = {"name": name, **options}
    where = named_device(str(device), "device")
    experiments = list(in_each_norm(registry, inner=inner))
    if not experiments:  # this raises the error that says why
        experiments = [tiny_experiment(registry, threat={**THREATS[0], "inner": inner})]
    for experiment in experiments:
        who = f"{name}, {experiment.threat.norm}"
        _check_crafting(experiment, "cross-entropy", where, f"{who}, cross-entropy")
        _check_crafting(experiment, "divergence", where, f"{who}, divergence")
        _check_training(experiment, where, who)
        for method in _METHODS:
            trainer = {**experiment.document.data["calfat"], "trainer": method}
            check_federation(tiny_experiment(registry, **trainer), where)


def _check_crafting(experiment: Experiment, loss_name: str, device: torch.device, who: str) -> None:
    """Attack a batch, in a ball so small that a step uphill ends higher up."""
    inner = experiment.build_inner()
    budget = experiment.threat.in_training
    threat = dataclasses.replace(budget, eps=budget.eps / _SMALL, step_size=budget.eps / _SMALL / 4)
    model = balanced_model().to(device)
    data = answered(model)
    x = data.x
    with attack_mode(model):
        before = around(model)
        loss = _loss(model, x, data.y, loss_name)
        start = _checked_start(inner, x, threat, who)
        drawn = inner.draw(x, threat, _stream(device))
        memory = inner.begin_round(tiny_task(model, data, threat=threat, round=2, device=device))
        calls = 0

        def crafted(rows: slice) -> Tensor:
            def climbed(logits: Tensor) -> Tensor:
                nonlocal calls
                calls += 1
                return loss(logits, rows)

            task = InnerTask(
                model,
                x[rows],
                start[rows],
                climbed,
                threat,
                memory=deepcopy(memory),
                examples=Examples(torch.arange(len(x), device=device)[rows]),
                drawn=None if drawn is None else drawn[rows],
            )
            return inner.craft(task)

        with unchanged(f"{who}: clean images and start", x, start):
            x_adv = crafted(slice(None))
        require(not x_adv.requires_grad, f"{who}: craft must return images without gradient; detach them.")
        inner.reach(threat).check(x_adv, x, who=who)
        require(
            calls == threat.steps,
            f"{who}: craft must call task.loss once for each of its {threat.steps} steps, as its entry declares; it "
            f"made {calls} calls. Give the InnerAttackEntry steps=lambda options: {calls}, if that is meant.",
        )
        for part, state in around(model).items():
            require(state == before[part], f"{who}: it must leave {part} as it found them.")
        in_parts = torch.cat([crafted(slice(0, 5)), crafted(slice(5, None))])
        alike = torch.allclose(x_adv, in_parts, rtol=0, atol=_TOLERANCE)
        require(alike, f"{who}: an image must not depend on the others of its mini-batch.")
        with torch.no_grad():
            at_start = float(loss(model(start), slice(None)))
            at_end = float(loss(model(x_adv), slice(None)))
        require(
            at_end > at_start,
            f"{who}: its images must cost more than their start; the loss went from {at_start:.3g} to {at_end:.3g}. "
            "Has a step the wrong sign?",
        )


def _stream(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _checked_start(inner: InnerAttack, x: Tensor, threat: ThreatModel, who: str) -> Tensor:
    """The first iterate of the attack, or a random one if it leaves the start to the method."""
    start = inner.start(x, threat, _stream(x.device))
    same_start = inner.start(x, threat, _stream(x.device))
    same = start is same_start  # which is None
    if start is not None and same_start is not None:
        same = torch.equal(start, same_start)
    require(same, f"{who}: start must draw from the generator that it is given, and from no other.")
    if start is None:
        start = threat.random_start(x, _stream(x.device))
    noisy = threat.steps > 1 or not torch.equal(start, x)
    require(noisy, f"{who}: one step must start from noise: at the clean image a divergence has no gradient.")
    return start


class _Watched(FedPGD):
    """FedPGD that keeps the images of each step."""

    def __init__(self) -> None:
        super().__init__(None, PLAIN.load()(None))
        self.batches: list[TrainBatch] = []

    def train_loss(self, batch: TrainBatch) -> Tensor:
        self.batches.append(batch)
        return super().train_loss(batch)


def _check_training(experiment: Experiment, device: torch.device, who: str) -> None:
    """What a client trains on lies in the declared set, and its optimiser takes the declared number of steps."""
    method = _Watched()
    data = tiny_images()
    threat = experiment.threat.in_training
    inner = experiment.build_inner()
    method.fit(tiny_task(data=data, threat=threat, inner=inner, device=device))
    for batch in method.batches:
        inner.reach(threat).check(batch.x_adv.detach(), batch.x_nat, who=who)
    num_batches = len(batch_bounds(len(data), SETTINGS.batch_size)) * SETTINGS.epochs
    pick = experiment.threat.inner
    expected = num_batches * pick.entry.replays(pick.options)
    steps = len(method.batches)
    require(
        steps == expected,
        f"{who}: {steps} optimiser steps for {num_batches} mini-batches; the entry's replays make it {expected}.",
    )


def _loss(model: nn.Module, x: Tensor, y: Tensor, name: str) -> Callable[[Tensor, slice], Tensor]:
    """The loss of logits (N, C) of some of the images, a sum."""
    with torch.no_grad():
        clean = model(x).softmax(dim=1)
    if name == "divergence":
        return lambda logits, rows: kl_div(logits.log_softmax(dim=1), clean[rows], reduction="sum")
    return lambda logits, rows: cross_entropy(logits, y[rows], reduction="sum")
