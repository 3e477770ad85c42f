"""A whole federation in this process, as a runtime would drive it; the checks of aggregators and attackers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from calfat_plugin.datasets import Dataset
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.server import Server, Snapshot
from calfat_plugin.federation.side_effects import seeded_global_rng
from calfat_plugin.federation.updates import Attackers, build_attacker
from calfat_plugin.federation.wire import unpack_update
from calfat_plugin.federation.worker import Worker
from calfat_plugin.interfaces import Aggregate, AggregationTask
from calfat_plugin.maths.averaging import check_update
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.observer import RunObserver
from calfat_plugin.registry import Registry
from calfat_plugin.results import LocalUpdate, RoundRecord
from calfat_plugin.runs.loaded_run import model_loader
from calfat_plugin.runs.request import named_device
from calfat_plugin.testing.tiny import (
    CPU,
    NUM_CLASSES,
    TinyModel,
    one_thread,
    require,
    same_bits,
    tiny_dataset,
    tiny_experiment,
    tiny_images,
    unchanged,
)

_TOLERANCE = 1e-6  # of a parameter


class TinyFederation:
    """All clients of an experiment, on images that are sorted by label, so that each client misses classes."""

    def __init__(
        self,
        experiment: Experiment,
        snapshot: Snapshot | None = None,
        dataset: Dataset | None = None,
        device: torch.device = CPU,
    ) -> None:
        if dataset is None:
            dataset = tiny_dataset()
        by_label = torch.argsort(dataset.train.y, stable=True)
        parts = torch.tensor_split(by_label, experiment.num_clients)
        shards = {client: dataset.train.subset(part.tolist()).to(device) for client, part in enumerate(parts)}
        loading = model_loader(experiment.dataset.name, dataset, device)
        self.server = Server(experiment, dataset, device, RunObserver(), lambda: self.worker, loading)
        self.worker = Worker(experiment, dataset, shards, device, RunObserver())
        if snapshot is not None:
            self.server.begin(snapshot)
            self.worker.client_states.update(snapshot.client_states)

    def play(self) -> RoundRecord:
        """One round."""
        number = self.server.round + 1
        clients = self.server.start_round(number)
        downlink = self.server.downlink()
        uploads = {}
        for client in clients:
            message = self.worker.fit(client, number, downlink)
            uploads[client] = (self.worker.num_examples(client), message)
        return self.server.finish_round(number, uploads)

    def snapshot(self) -> Snapshot:
        """What a checkpoint has."""
        return self.server.snapshot(dict(self.worker.client_states))


def check_federation(experiment: Experiment, device: torch.device = CPU) -> None:
    """Two rounds go through, no update is refused, and a run that is resumed between them ends with the same bits."""
    straight = TinyFederation(experiment, device=device)
    first_round = straight.play()
    resumed = TinyFederation(experiment, straight.snapshot(), device=device)
    second_round = straight.play()
    refused = {**first_round.refused, **second_round.refused}
    require(not refused, f"every update must be of use, but the server refused some: {refused}.")
    resumed.play()
    must = "a run that is resumed after round 1 must end with the same"
    for name in ("state", "average", "server_state", "broadcast"):
        same = same_bits(getattr(straight.server, name), getattr(resumed.server, name))
        require(same, f"{must} {name}; keep no state in objects.")
    states = straight.worker.client_states
    resumed_states = resumed.worker.client_states
    same = states.keys() == resumed_states.keys()
    same = same and all(same_bits(states[client], resumed_states[client]) for client in states)
    require(same, f"{must} client states; keep no state in objects.")


@fresh_torch_state()
@one_thread()
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
    if not extras:
        _check_combine(name, server, 3)
        _check_combine(name, server, 1)
    _check_agreement(name, TinyFederation(experiment, device=where), unanimous)
    check_federation(experiment, where)


def _check_combine(name: str, server: Server, num_clients: int) -> None:
    """Combine made-up updates of so many clients."""
    model = TinyModel()
    global_state = dict(model.state_dict())
    tensors = list(global_state.values())
    updates = {}
    for client in range(num_clients):
        state = dict(TinyModel(client + 1).state_dict())
        updates[client] = LocalUpdate(state, 10 + client, metrics={"loss": 1.0 + client})
        tensors += state.values()
    names = [key for key, _ in model.named_parameters()]
    task = AggregationTask(global_state, updates, {}, names, num_clients=3, round=1, num_classes=NUM_CLASSES)
    with unchanged(f"{name}: what combine is given", *tensors):
        aggregate = _combined(server, task)
    check_update(aggregate.state, task.global_state, who=f"{name}, a round of {num_clients}")
    complete = not aggregate.weights or set(aggregate.weights) == set(task.updates)
    require(complete, f"{name}: weights must be of the round's clients, each once.")
    server_state = {key: tensor.clone() for key, tensor in aggregate.server_state.items()}
    _combined(server, dataclasses.replace(task, round=2, server_state=server_state))
    same_aggregate = _combined(server, task)
    for part in ("state", "server_state", "broadcast"):
        same = same_bits(getattr(aggregate, part), getattr(same_aggregate, part))
        require(same, f"{name}: the same task must give the same {part}, whichever round came in between.")


def _check_agreement(name: str, federation: TinyFederation, unanimous: bool) -> None:
    """What the server makes of one client's model that all of the first round's clients send."""
    server = federation.server
    start = server.state
    clients = server.start_round(1)
    message = federation.worker.fit(clients[0], 1, server.downlink())
    sent = unpack_update(message, 1).state
    num_examples = federation.worker.num_examples(clients[0])
    server.aggregate_round(1, dict.fromkeys(clients, (num_examples, message)))
    products = []
    for key, tensor in sent.items():
        if tensor.is_floating_point():
            product = (server.state[key] - start[key]) * (tensor - start[key])
            products.append(product.flatten())
    along = torch.cat(products)  # below 0: this coordinate moves away from the sent model
    right = bool((along >= 0).all()) and bool(along.any())
    text = "must move the model towards it in every coordinate. Has its step the wrong sign?"
    require(right, f"{name}: clients that all send the same model {text}")
    close = all(torch.allclose(server.state[key], sent[key], rtol=1e-5, atol=_TOLERANCE) for key in sent)
    text = "must get that model. If the server takes a step of its own length, pass unanimous=False."
    require(close or not unanimous, f"{name}: clients that all send the same model {text}")


def _combined(server: Server, task: AggregationTask) -> Aggregate:
    with seeded_global_rng(task.round):
        return server.combined(task)


@fresh_torch_state()
@one_thread()
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
    where = named_device(str(device), "device")
    clients = [{"ids": [1], "attacker": {"name": name, **options}}]
    experiment = tiny_experiment(registry, trainer="fedpgd", clients=clients)
    (group,) = experiment.clients
    data = tiny_images().to(where)
    classes = int(data.y.max()) + 1
    with unchanged(f"{name}: what poisoned is given", data.x, data.y):
        build_attacker(experiment, group).poisoned(data, classes)
    start = dict(TinyModel().state_dict())
    names = [parameter for parameter, _ in TinyModel().named_parameters()]
    updates = {client: LocalUpdate(dict(TinyModel(client + 1).state_dict()), 10) for client in range(3)}
    tensors = list(start.values())
    for update in updates.values():
        tensors += update.state.values()
    attackers = Attackers(experiment, {1: group}, names)
    with unchanged(f"{name}: what sent is given", *tensors), torch.random.fork_rng():
        sent = [attackers.send(round, updates, start)[1].state for round in (1, 2, 1)]
    for state in sent:
        check_update(state, start, who=name)
    same = same_bits(sent[0], sent[2])
    require(same, f"{name}: the same round must give the same model, whatever came in between.")
    check_federation(experiment, where)
