"""What every training method must keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from calfat_plugin.experiment import Experiment, defined_modifiers
from calfat_plugin.federation.ambient import seeded_world
from calfat_plugin.interfaces import LocalTask, LocalTrainer
from calfat_plugin.maths.averaging import check_update
from calfat_plugin.registry import Registry
from calfat_plugin.results import LocalUpdate
from calfat_plugin.testing.federation import check_federation
from calfat_plugin.testing.tiny import TinyModel, require, same_bits, tiny_experiment, tiny_images, tiny_task, unchanged
from calfat_plugin.trainers.base import AdversarialTrainer
from calfat_plugin.trainers.batches import TrainBatch

_PARTS = ("state", "extras", "client_state")


def check_trainer(
    name: str, *, registry: Registry | None = None, losses: tuple[str, ...] | None = None, **options: Any
) -> None:
    """Hold a training method to its contract, with each loss modifier that it composes with.

    Its update has the model's tensors, finite, and trains them; the same task gives the same bits whoever was trained
    in between; data and counts are left alone; every adversarial example lies inside the budget; a client with one
    example trains, too; a federation of two rounds goes through, and is resumed to the same bits.

    Args:
        name: as recipes name it.
        registry: where it is; None: among the built-ins and what is installed.
        losses: modifiers to check with; None: all that it supports.
        options: instead of its defaults.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        CalfatError: the framework refuses it.
    """
    first = tiny_experiment(registry, trainer={"name": name, **options})
    defined = defined_modifiers(first.registry, first.trainer.entry)
    for loss in (each for each in defined if losses is None or each in losses):
        _check(tiny_experiment(first.registry, trainer={"name": name, "loss": loss, **options}), f"{name} with {loss}")
    if not defined:
        _check(first, name)


def _check(experiment: Experiment, who: str) -> None:
    trainer = experiment.build_trainer()
    task, other = tiny_task(), tiny_task(TinyModel(1), tiny_images(1, 7), client=1, round=2)
    with unchanged("the client's data", task.data.x, task.data.y, task.class_counts), _budget_checked(trainer, who):
        update = _trained(trainer, task)
    reference = trainer.adapt_model(TinyModel()).state_dict()
    check_update(update.state, reference, who=who)
    require(update.num_examples == len(task.data), f"{who}: num_examples must be {len(task.data)}, the client's.")
    start = TinyModel().state_dict()
    moved = any(not torch.equal(update.state[key], start[key]) for key in start if key in update.state)
    require(moved, f"{who}: a round of training must change the model; no tensor changed.")
    _trained(trainer, other)
    again = _trained(trainer, tiny_task())
    for part in _PARTS:
        same = same_bits(getattr(update, part), getattr(again, part))
        require(same, f"{who}: the same task must give the same {part}, whichever client was trained in between.")
    require(update.metrics == again.metrics, f"{who}: the same task must give the same metrics.")
    one = _trained(trainer, tiny_task(data=tiny_images(2, 1)))
    check_update(one.state, reference, who=f"{who}, a client with one example")
    check_federation(experiment)


def _trained(trainer: LocalTrainer, task: LocalTask) -> LocalUpdate:
    """The update of one client, under the seeded global generators that a run trains it in."""
    with seeded_world(0):
        model = trainer.adapt_model(task.model)
    with seeded_world(task.client):
        return trainer.fit(dataclasses.replace(task, model=model, personal=trainer.personal_names(model)))


@contextmanager
def _budget_checked(trainer: LocalTrainer, who: str) -> Iterator[None]:
    """Look at every batch that a method with two losses trains on; others make their examples themselves."""
    if not isinstance(trainer, AdversarialTrainer):
        yield
        return
    seen = dict.fromkeys(("backward", "train_loss"), 0)

    def watch(name: str) -> Callable[[TrainBatch], torch.Tensor]:
        inner = getattr(trainer, name)

        def watched(batch: TrainBatch) -> torch.Tensor:
            batch.task.threat.check(batch.x_adv, batch.x_nat, who=who)
            seen[name] += len(batch.y)
            found: torch.Tensor = inner(batch)
            return found

        return watched

    for name in seen:
        setattr(trainer, name, watch(name))
    yield
    for name in seen:
        delattr(trainer, name)
    total, trained_on = len(tiny_images()), seen["backward"]
    require(trained_on >= total, f"{who}: an epoch must train on all {total} examples; it trained on {trained_on}.")
