"""What every attacker must keep."""

from __future__ import annotations

from typing import Any

import torch

from calfat_plugin.datasets import ImageData
from calfat_plugin.federation.attack import Attackers, build_attacker
from calfat_plugin.maths.averaging import check_update
from calfat_plugin.registry import Registry
from calfat_plugin.results import LocalUpdate
from calfat_plugin.runs.compute import named_device
from calfat_plugin.testing.federation import check_federation
from calfat_plugin.testing.tiny import TinyModel, require, same_bits, tiny_experiment, tiny_images, unchanged


def check_attacker(
    name: str, *, registry: Registry | None = None, device: str | torch.device = "cpu", **options: Any
) -> None:
    """Hold an attacker to its contract.

    It leaves data and models that it is given alone; sends the tensors of the global model, finite, and the same bits
    for the same round; gives images and labels of the data set's shapes to train on; a federation of three clients, of
    which it is one, goes through two rounds, and is resumed to the same bits.

    Args:
        name: as recipes name it.
        registry: where it is; None: among the built-ins and what is installed.
        device: where clients have their images and train, ``cpu``, ``cuda`` or ``cuda:N``.
        options: instead of its defaults.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        CalfatError: the framework refuses it.
    """
    attacker, where = {"name": name, **options}, named_device(str(device), "device")
    experiment = tiny_experiment(registry, trainer="fedpgd", clients=[{"ids": [1], "attacker": attacker}])
    (group,) = experiment.clients
    data = tiny_images().to(where)
    classes = int(data.y.max()) + 1
    with unchanged(f"{name}: what poisoned is given", data.x, data.y):
        poisoned = build_attacker(experiment, group).poisoned(data, classes)
    require(isinstance(poisoned, ImageData), f"{name}: poisoned must return ImageData.")
    require(poisoned.x.shape[1:] == data.x.shape[1:], f"{name}: poisoned must keep the images' shape.")
    right = len(poisoned.y) == len(poisoned.x) > 0 and 0 <= int(poisoned.y.min()) <= int(poisoned.y.max()) < classes
    require(right, f"{name}: poisoned must return a label in [0, {classes}) for each image, and at least one.")
    start = dict(TinyModel().state_dict())
    names = [parameter for parameter, _ in TinyModel().named_parameters()]
    updates = {client: LocalUpdate(dict(TinyModel(client + 1).state_dict()), 10) for client in range(3)}
    tensors = [tensor for update in updates.values() for tensor in update.state.values()]
    sends = Attackers(experiment, {1: group}, names)
    with unchanged(f"{name}: what sent is given", *start.values(), *tensors), torch.random.fork_rng():
        found = [sends.send(round, updates, start)[1].state for round in (1, 2, 1)]
    for state in found:
        check_update(state, start, who=name)
    require(
        same_bits(found[0], found[2]), f"{name}: the same round must give the same model, whatever came in between."
    )
    check_federation(experiment, where)
