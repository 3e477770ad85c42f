"""What every aggregator must keep."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from calfat_plugin.federation.global_rng import seeded_global_rng
from calfat_plugin.federation.server import Server
from calfat_plugin.interfaces import Aggregate, AggregationTask
from calfat_plugin.maths.averaging import check_update
from calfat_plugin.registry import Registry
from calfat_plugin.results import LocalUpdate
from calfat_plugin.testing.federation import TinyFederation, check_federation
from calfat_plugin.testing.tiny import TinyModel, require, same_bits, tiny_experiment, unchanged


def check_aggregator(
    name: str, *, registry: Registry | None = None, trainer: str = "fedpgd", extras: bool = False, **options: Any
) -> None:
    """Hold an aggregator to its contract.

    It returns a model with the tensors of the global one, finite; leaves updates and global model alone; gives the same
    bits for the same task; weighs the round's clients with shares that sum to 1, if it states any; takes a round of one
    client; a federation of two rounds goes through, and is resumed to the same bits.

    Args:
        name: as recipes name it.
        registry: where it is; None: among the built-ins and what is installed.
        trainer: local trainer of the federation.
        extras: whether it needs what its ``correction`` makes clients send beside their models; made-up updates lack
            that, so only the federation is played.
        options: instead of its defaults.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        CalfatError: the framework refuses it.
    """
    experiment = tiny_experiment(registry, trainer=trainer, aggregator={"name": name, **options})
    server = TinyFederation(experiment).server
    for count in (3, 1) if not extras else ():
        task = _task(count)
        states = [task.global_state, *(update.state for update in task.updates.values())]
        with unchanged(f"{name}: what combine is given", *(tensor for state in states for tensor in state.values())):
            found = _combined(server, task)
        check_update(found.state, task.global_state, who=f"{name}, a round of {count}")
        complete = not found.weights or set(found.weights) == set(task.updates)
        require(complete, f"{name}: weights must be of the round's clients, each once.")
        later = dataclasses.replace(task, round=2, server_state=_copied(found.server_state))
        _combined(server, later)
        again = _combined(server, task)
        for part in ("state", "server_state", "broadcast"):
            same = same_bits(getattr(found, part), getattr(again, part))
            require(same, f"{name}: the same task must give the same {part}, whichever round came in between.")
    check_federation(experiment)


def _task(count: int) -> AggregationTask:
    model = TinyModel()
    updates = {
        client: LocalUpdate(dict(TinyModel(client + 1).state_dict()), 10 + client, metrics={"loss": 1.0 + client})
        for client in range(count)
    }
    names = [name for name, _ in model.named_parameters()]
    return AggregationTask(dict(model.state_dict()), updates, {}, names, num_clients=3, round=1)


def _combined(server: Server, task: AggregationTask) -> Aggregate:
    with seeded_global_rng(task.round):
        return server.combined(task)


def _copied(state: Any) -> dict[str, Tensor]:
    return {name: torch.clone(tensor) for name, tensor in state.items()}
