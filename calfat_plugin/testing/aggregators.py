"""What every aggregator must keep."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from calfat_plugin.federation.global_rng import seeded_global_rng
from calfat_plugin.federation.server import Server
from calfat_plugin.federation.wire import unpack_update
from calfat_plugin.interfaces import Aggregate, AggregationTask
from calfat_plugin.maths.averaging import check_update
from calfat_plugin.registry import Registry
from calfat_plugin.results import LocalUpdate
from calfat_plugin.runs.compute import named_device
from calfat_plugin.testing.federation import TinyFederation, check_federation
from calfat_plugin.testing.tiny import NUM_CLASSES, TinyModel, require, same_bits, tiny_experiment, unchanged

_TOLERANCE = 1e-6  # of a parameter


def check_aggregator(
    name: str,
    *,
    registry: Registry | None = None,
    device: str | torch.device = "cpu",
    trainer: str = "fedpgd",
    extras: bool = False,
    unanimous: bool = True,
    **options: Any,
) -> None:
    """Hold an aggregator to its contract.

    It returns a model with the tensors of the global one, finite; leaves updates and global model alone; gives the same
    bits for the same task; weighs the round's clients with shares that sum to 1, if it states any; takes a round of one
    client; where all clients send the same model, moves towards it in every coordinate, and gives that model; a
    federation of two rounds goes through, and is resumed to the same bits.

    Args:
        name: as recipes name it.
        registry: where it is; None: among the built-ins and what is installed.
        device: where clients train and the server evaluates, ``cpu``, ``cuda`` or ``cuda:N``; models and updates are
            on the CPU all the same.
        trainer: local trainer of the federation.
        extras: whether it needs what its ``correction`` makes clients send beside their models; made-up updates lack
            that, so only the federation is played.
        unanimous: whether clients that send the same model get that model; False: the server takes a step of its own
            length towards it, as its optimisers do.
        options: instead of its defaults.

    Raises:
        AssertionError: it breaks the contract; the text says how.
        CalfatError: the framework refuses it.
    """
    where = named_device(str(device), "device")
    experiment = tiny_experiment(registry, trainer=trainer, aggregator={"name": name, **options})
    server = TinyFederation(experiment, device=where).server
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
    _check_agreement(name, TinyFederation(experiment, device=where), unanimous)
    check_federation(experiment, where)


def _check_agreement(name: str, federation: TinyFederation, unanimous: bool) -> None:
    """What the server makes of one client's model that all of the first round's clients send."""
    server, start = federation.server, federation.server.state
    clients = server.start_round(1)
    wire = federation.worker.fit(clients[0], 1, server.downlink())
    sent = unpack_update(wire, 1).state
    server.aggregate_round(1, dict.fromkeys(clients, (federation.worker.num_examples(clients[0]), wire)))
    names = [tensor for tensor in sent if sent[tensor].is_floating_point()]
    along = torch.cat([((server.state[n] - start[n]) * (sent[n] - start[n])).flatten() for n in names])
    right = bool((along >= 0).all()) and bool(along.any())
    text = "must move the model towards it in every coordinate. Has its step the wrong sign?"
    require(right, f"{name}: clients that all send the same model {text}")
    close = all(torch.allclose(server.state[tensor], sent[tensor], rtol=1e-5, atol=_TOLERANCE) for tensor in sent)
    text = "must get that model. If the server takes a step of its own length, pass unanimous=False."
    require(close or not unanimous, f"{name}: clients that all send the same model {text}")


def _task(count: int) -> AggregationTask:
    model = TinyModel()
    updates = {
        client: LocalUpdate(dict(TinyModel(client + 1).state_dict()), 10 + client, metrics={"loss": 1.0 + client})
        for client in range(count)
    }
    names = [name for name, _ in model.named_parameters()]
    return AggregationTask(
        dict(model.state_dict()), updates, {}, names, num_clients=3, round=1, num_classes=NUM_CLASSES
    )


def _combined(server: Server, task: AggregationTask) -> Aggregate:
    with seeded_global_rng(task.round):
        return server.combined(task)


def _copied(state: Any) -> dict[str, Tensor]:
    return {name: torch.clone(tensor) for name, tensor in state.items()}
