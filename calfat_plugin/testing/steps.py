"""The comparison of a method's steps with those of another one, for a method that somebody implements again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from calfat_plugin.interfaces import LocalTask, LocalTrainer, TrainSettings
from calfat_plugin.registry import Registry
from calfat_plugin.results import LocalUpdate
from calfat_plugin.runs.compute import named_device
from calfat_plugin.testing.tiny import THREATS, TinyModel, replaced, require, tiny_experiment, tiny_images, tiny_task
from calfat_plugin.testing.trainers import trained
from calfat_plugin.threat import Norm, ThreatModel
from calfat_plugin.trainers.base import AdversarialTrainer
from calfat_plugin.trainers.batches import TrainBatch

_EXAMPLES = 8
_SETTINGS = TrainSettings(  # all of a client's examples in one batch: an epoch is a step
    epochs=1, batch_size=_EXAMPLES, learning_rate=0.1, momentum=0.9, weight_decay=0.1, num_rounds=200
)
_MODEL = 21  # seed of weights at which no sign of a gradient hangs on rounding, in whatever form a loss is written
_ROUNDS = (1, 100)  # before and after what a method does in its first rounds only
_CLASSES = (4, 2)  # of which the client of each number has examples


def check_same_steps(
    name: str,
    reference: str,
    *,
    registry: Registry | None = None,
    device: str | torch.device = "cpu",
    reference_options: Mapping[str, Any] | None = None,
    steps: int = 4,
    norm: Norm = "linf",
    tolerance: float = 1e-4,
    **options: Any,
) -> None:
    """Hold a method to another one: step by step the same adversarial examples and the same weights.

    The reference for a known method, written again, is a built-in one: those are held to the code that their authors
    published. Both train a client of all classes and one that lacks some, in the first round and in a late one, with
    momentum and weight decay, from the same weights, with the same streams of random numbers. Of a method that has its
    own loop (no ``AdversarialTrainer``) the weights alone are compared.

    Args:
        name: of the method, as recipes name it.
        reference: name of the method whose steps it should take, such as ``calfat`` or ``fedtrades``.
        registry: where they are; None: among the built-ins and what is installed.
        device: where to train, ``cpu``, ``cuda`` or ``cuda:N``.
        reference_options: of the reference, instead of its defaults, also its ``loss``.
        steps: how many to take, >= 1.
        norm: of the attack's ball.
        tolerance: largest difference of a pixel or a weight, > 0.
        options: of the method, instead of its defaults, also its ``loss``.

    Raises:
        AssertionError: the steps differ; the text says where first, in what, and by how much.
        CalfatError: the framework refuses one of the two.
    """
    where_to = named_device(str(device), "device")
    (threat,) = (each for each in THREATS if each.get("norm", "linf") == norm)
    pair = [
        tiny_experiment(registry, threat=threat, trainer={"name": each, **chosen})
        for each, chosen in ((name, options), (reference, reference_options or {}))
    ]
    for round in _ROUNDS:
        for client in range(len(_CLASSES)):
            own, wanted = (_steps(each.build_trainer(), each.threat, client, round, steps, where_to) for each in pair)
            for number, (found, right) in enumerate(zip(own, wanted, strict=True), start=1):
                where = f"{name}: in step {number} of client {client}, round {round},"
                _compare(found, right, where, f"those of '{reference}'", tolerance)


@dataclass(frozen=True)
class _Step:
    """A step of a client's training.

    Attributes:
        x_adv: (N, C, H, W), in the order of the client's examples; None: they were not seen.
        state: the model's tensors after it.
    """

    x_adv: Tensor | None
    state: Mapping[str, Tensor]


def _steps(
    trainer: LocalTrainer, threat: ThreatModel, client: int, round: int, count: int, device: torch.device
) -> Iterator[_Step]:
    """Each step as the last of a training, so that nothing need be known of the method's loop."""
    data = tiny_images(client, _EXAMPLES, classes=_CLASSES[client])
    for number in range(1, count + 1):
        settings = dataclasses.replace(_SETTINGS, epochs=number)
        given = {"threat": threat, "settings": settings, "client": client, "round": round, "device": device}
        task = tiny_task(TinyModel(_MODEL), data, **given)
        if isinstance(trainer, AdversarialTrainer):
            x_adv, update = _watched(trainer, task)
        else:
            x_adv, update = None, trained(trainer, task)
        yield _Step(x_adv, update.state)


def _watched(trainer: AdversarialTrainer, task: LocalTask) -> tuple[Tensor, LocalUpdate]:
    """(the last batch's adversarial examples in the order of the client's, the update)."""
    inner, seen = trainer.backward, torch.empty_like(task.data.x)

    def backward(batch: TrainBatch) -> Tensor:
        seen[batch.index] = batch.x_adv
        return inner(batch)

    with replaced(trainer, backward=backward):
        return seen, trained(trainer, task)


def _compare(found: _Step, right: _Step, where: str, whose: str, tolerance: float) -> None:
    """Hold a step to another one."""
    if found.x_adv is not None and right.x_adv is not None:
        images = {f"example {number}": pair for number, pair in enumerate(zip(found.x_adv, right.x_adv, strict=True))}
        _require_close(images, f"{where} its adversarial examples are not {whose}", tolerance, "start and attack_loss")
    names = found.state.keys() ^ right.state.keys()
    require(not names, f"{where} its tensors are not {whose}: only one of the two has '{min(names, default='')}'.")
    weights = {f"'{name}'": (found.state[name], tensor) for name, tensor in right.state.items()}
    _require_close(weights, f"{where} its weights are not {whose}", tolerance, "train_loss, backward and optimiser")


def _require_close(pairs: Mapping[str, tuple[Tensor, Tensor]], otherwise: str, tolerance: float, compare: str) -> None:
    """Hold tensors to others of their shapes; the text names the worst."""
    off = {name: float((found.double() - right.double()).abs().max()) for name, (found, right) in pairs.items()}
    worst = max(off, key=off.__getitem__)
    close = off[worst] <= tolerance
    require(
        close, f"{otherwise}: {worst} is off by up to {off[worst]:.3g}, more than {tolerance:g}. Compare {compare}."
    )
