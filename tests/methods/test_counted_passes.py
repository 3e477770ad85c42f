"""What a round costs, counted where it is spent: how often an image goes forward through the network."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.interfaces import AttackBatch, LocalTask, TrainBatch
from calfat_plugin.recipe.training import AWPOptions
from calfat_plugin.results import ALIGNMENT, PASSES
from calfat_plugin.trainers.base import AdversarialTrainer
from tests.methods.helpers import (
    SETTINGS,
    Federation,
    build_aggregator,
    build_method,
    build_modifier,
    experiment,
    local_task,
    train,
)
from tests.methods.test_inner_attacks import build_inner

STEPS = local_task().threat.steps
PER_IMAGE = {  # clean for the attack, the attack, the training step
    "standard": 1,
    "fedpgd": STEPS + 1,
    "mixfat": STEPS / 2 + 1,  # half of the images
    "calfat": 1 + STEPS + 1,
    "fedmart": STEPS + 2,
    "fedtrades": 1 + STEPS + 2,
    "fedgairat": STEPS + 1,
    "fedrbn": STEPS + 2,
    "fedawp": STEPS + 2,
    "fedlat": 3 * (STEPS + 1),  # a linearised pass is three
}


def counted(method: Any, **task: Any) -> float:
    """Passes of an image in one epoch."""
    work = local_task(**{"round": 99, **task})
    return train(method, work).metrics[PASSES] / len(work.data) / work.settings.epochs


@pytest.mark.parametrize("name", PER_IMAGE)
def test_a_methods_passes(name: str) -> None:
    assert counted(build_method(name)) == PER_IMAGE[name]


@pytest.mark.parametrize("name", [name for name in PER_IMAGE if name != "fedawp"])
def test_perturbing_weights_repeats_the_passes_of_the_training_step(name: str) -> None:
    step = {"fedmart": 2, "fedtrades": 2, "fedrbn": 2, "fedlat": 3}.get(name, 1)
    assert counted(build_method(name), awp=AWPOptions(warmup=0)) == PER_IMAGE[name] + step


@pytest.mark.parametrize("name", ["rs-fgsm", "n-fgsm", "atas", "sora"])
def test_an_attack_of_one_step(name: str) -> None:
    """CalFAT's divergence is from the answer to the clean image, a pass that nothing else makes."""
    inner = build_inner(name)
    assert counted(build_method("fedpgd"), inner=inner) == 2
    assert counted(build_method("calfat"), inner=inner) == 3


class Taught(AdversarialTrainer):
    """A third party's method that asks a teacher about each image, by the name of its parameter."""

    attacks = False

    def begin_round(self, task: LocalTask) -> nn.Module:
        return task.frozen_copy()

    def attack_loss(self, batch: AttackBatch) -> Tensor:
        raise NotImplementedError

    def train_loss(self, batch: TrainBatch) -> Tensor:
        teacher: nn.Module = batch.context
        with torch.no_grad():
            wanted = teacher(x=batch.x_nat)
        return (batch.logits_nat - wanted).square().mean() + 0.1 * batch.logits_nat.square().mean()


def test_replays_a_full_gradient_and_a_teacher_count() -> None:
    """A pass each, an epoch, and a pass."""
    assert counted(build_method("fedpgd"), inner=build_inner("free", replays=5)) == 5
    correction = build_aggregator("scaffold", variant="I").correction()
    assert counted(build_method("fedpgd"), correction=correction) == 2 * counted(build_method("fedpgd"))
    assert counted(Taught(None, build_modifier("plain"))) == 2


def test_looks_that_train_nothing_do_not_count() -> None:
    """Round 3 looks at the gradients of a batch of ten, round 4 at its losses, too; of a batch of seven at neither."""
    threat, inner = dataclasses.replace(local_task().threat, steps=1), build_inner("n-fgsm")
    for size, looked in ((10, True), (7, False)):
        settings = dataclasses.replace(SETTINGS, batch_size=size)
        for number in (3, 4):
            task = local_task(round=number, settings=settings, threat=threat, inner=inner)
            update = train(build_method("fedpgd"), task)
            assert (ALIGNMENT in update.metrics) == looked
            assert update.metrics[PASSES] == 2 * update.num_examples * settings.epochs


def test_the_record_has_the_sum_over_clients() -> None:
    federation = Federation(experiment("fedpgd"))
    examples = sum(map(federation.worker.num_examples, range(3)))
    settings = federation.server.experiment
    assert federation.play().passes == examples * settings.train.epochs * (settings.threat.steps + 1)
