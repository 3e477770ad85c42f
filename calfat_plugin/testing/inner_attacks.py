"""The check of inner attacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from calfat_plugin.datasets.batches import Examples, batch_bounds
from calfat_plugin.experiment import Experiment
from calfat_plugin.interfaces import InnerTask
from calfat_plugin.maths.attacks import attack_mode
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.modifiers.plain import ENTRY as PLAIN
from calfat_plugin.registry import Registry
from calfat_plugin.runs.compute import named_device
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
from calfat_plugin.trainers.batches import TrainBatch
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
    inner, where = {"name": name, **options}, named_device(str(device), "device")
    first = {**THREATS[0], "inner": inner}
    for experiment in list(in_each_norm(registry, inner=inner)) or [tiny_experiment(registry, threat=first)]:
        for what in ("cross-entropy", "divergence"):
            _check(experiment, what, where, f"{name}, {experiment.threat.norm}, {what}")
        _check_training(experiment, where, f"{name}, {experiment.threat.norm}")
        for method in _METHODS:
            trainer = {**experiment.document.data["calfat"], "trainer": method}
            check_federation(tiny_experiment(registry, **trainer), where)


def _check(experiment: Experiment, what: str, device: torch.device, who: str) -> None:
    inner, budget = experiment.build_inner(), experiment.threat.in_training
    threat = dataclasses.replace(budget, eps=budget.eps / _SMALL, step_size=budget.eps / _SMALL / 4)
    model = balanced_model().to(device)
    data = answered(model)
    x, y = data.x, data.y
    with attack_mode(model):
        before, loss, calls = around(model), _loss(model, x, y, what), []

        def stream() -> torch.Generator:
            return torch.Generator(device).manual_seed(0)

        own, again = (inner.start(x, threat, stream()) for _ in range(2))
        same = own is again is None or (own is not None and again is not None and torch.equal(own, again))
        require(same, f"{who}: start must draw from the generator that it is given, and from no other.")
        start = threat.random_start(x, stream()) if own is None else own
        drawn = inner.draw(x, threat, stream())
        memory = inner.begin_round(tiny_task(model, data, threat=threat, round=2, device=device))
        noisy = threat.steps > 1 or not torch.equal(start, x)
        require(noisy, f"{who}: one step must start from noise: at the clean image a divergence has no gradient.")

        def crafted(rows: slice) -> Tensor:
            def climbed(logits: Tensor) -> Tensor:
                calls.append(rows)
                return loss(logits, rows)

            known = deepcopy(memory), Examples(torch.arange(len(x), device=device)[rows])
            own = *known, None if drawn is None else drawn[rows]
            return inner.craft(InnerTask(model, x[rows], start[rows], climbed, threat, nullcontext, *own))

        with unchanged(f"{who}: clean images and start", x, start):
            found = crafted(slice(None))
        steps = len(calls)
        require(not found.requires_grad, f"{who}: craft must return images without gradient; detach them.")
        inner.reach(threat).check(found, x, who=who)
        wanted = threat.steps
        require(
            steps == wanted,
            f"{who}: craft must call task.loss once for each of its {wanted} steps, as its entry declares; it made "
            f"{steps} calls. Give the InnerAttackEntry steps=lambda options: {steps}, if that is meant.",
        )
        for part, state in around(model).items():
            require(state == before[part], f"{who}: it must leave {part} as it found them.")
        alone = torch.cat([crafted(slice(0, 5)), crafted(slice(5, None))])
        alike = torch.allclose(found, alone, rtol=0, atol=_TOLERANCE)
        require(alike, f"{who}: an image must not depend on the others of its mini-batch.")
        with torch.no_grad():
            low, high = (float(loss(model(images), slice(None))) for images in (start, found))
        require(
            high > low,
            f"{who}: its images must cost more than their start; the loss went from {low:.3g} to {high:.3g}. Has a "
            "step the wrong sign?",
        )


class _Watched(FedPGD):
    """Keeps the images of each step."""

    def __init__(self) -> None:
        super().__init__(None, PLAIN.load()(None))
        self.seen: list[TrainBatch] = []

    def train_loss(self, batch: TrainBatch) -> Tensor:
        self.seen.append(batch)
        return super().train_loss(batch)


def _check_training(experiment: Experiment, device: torch.device, who: str) -> None:
    pick, method, data = experiment.threat.inner, _Watched(), tiny_images()
    threat = experiment.threat.in_training
    method.fit(tiny_task(data=data, threat=threat, inner=experiment.build_inner(), device=device))
    for batch in method.seen:
        experiment.build_inner().reach(threat).check(batch.x_adv.detach(), batch.x_nat, who=who)
    batches = len(batch_bounds(len(data), SETTINGS.batch_size)) * SETTINGS.epochs
    wanted = batches * pick.entry.replays(pick.options)
    require(
        len(method.seen) == wanted,
        f"{who}: {len(method.seen)} optimiser steps for {batches} mini-batches; the entry's replays make it {wanted}.",
    )


def _loss(model: nn.Module, x: Tensor, y: Tensor, what: str) -> Callable[[Tensor, slice], Tensor]:
    """The loss of logits (N, C) of some of the images, a sum."""
    with torch.no_grad():
        clean = model(x).softmax(dim=1)
    if what == "divergence":
        return lambda logits, rows: kl_div(logits.log_softmax(dim=1), clean[rows], reduction="sum")
    return lambda logits, rows: cross_entropy(logits, y[rows], reduction="sum")
