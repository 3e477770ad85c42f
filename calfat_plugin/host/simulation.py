"""The host's single-process simulator with our parties inside.

The round loop is FedML's own ``FedAvgAPI.train``. Its simulator ignores custom trainers and aggregators, so we derive
from the API, hand in our own trainer, and override the three steps that are ours: sampling, aggregation, evaluation.
With workers, the loop asks for one client after another as ever, and gets what they have trained meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from calfat_plugin.host.launch import host_arguments, run_host  # before all else of fedml, whose import it prepares

# isort: split
from fedml.simulation.sp.fedavg.fedavg_api import FedAvgAPI

from calfat_plugin.federation.wire import Wire
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host.adapters import MessageTrainer, WorkerTrainer
from calfat_plugin.host.executors import Workers
from calfat_plugin.host.tasks import ServerTask
from calfat_plugin.results import EvaluationResult, State


class SimulationTrainer(WorkerTrainer):
    """Trains each client in this process, when the host asks for it."""

    def __init__(self, worker: Worker, args: Any, client_states: Mapping[int, State]) -> None:
        super().__init__(worker, args)
        self._kept = client_states
        self.states: dict[int, State] = {}  # new ones, which wait here until the server has used the updates

    def begin(self, round: int, clients: Sequence[int], downlink: Wire) -> None:
        self.round = round

    def train(self, train_data: Any, device: Any, args: Any) -> None:
        self.worker.client_states[self.id] = self._kept.get(self.id, {})
        super().train(train_data, device, args)
        self.states[self.id] = self.worker.client_states.pop(self.id)


class AheadTrainer(MessageTrainer):
    """Has all clients of a round trained by workers from its beginning on; otherwise as above."""

    def __init__(self, workers: Workers, args: Any, client_states: Mapping[int, State]) -> None:
        super().__init__(args)
        self._workers, self._kept = workers, client_states
        self.states: dict[int, State] = {}

    def begin(self, round: int, clients: Sequence[int], downlink: Wire) -> None:
        self._workers.submit(round, clients, downlink, self._kept)

    def train(self, train_data: Any, device: Any, args: Any) -> None:
        self._message, self.states[self.id] = self._workers.result(self.id)


class _StoppedEarly(Exception):  # noqa: N818 (it is no error)
    """The way out of the host's loop, which knows no end but the last of its rounds."""


class SimulationAPI(FedAvgAPI):
    """FedML's FedAvg simulation, driving our server; ``args.comm_round`` are the rounds to do."""

    def __init__(self, args: Any, task: ServerTask) -> None:
        self.server, self.on_round, self.client_states = task.server, task.on_round, task.client_states
        server, dataset = self.server, self.server.dataset
        self.trainer: SimulationTrainer | AheadTrainer
        if task.workers is None:
            worker = Worker(server.experiment, dataset, task.shards, server.device, server.observer)
            self.trainer = SimulationTrainer(worker, args, task.client_states)
        else:
            self.trainer = AheadTrainer(task.workers, args, task.client_states)
        self.clients: tuple[int, ...] = ()
        self.num_examples = {client: len(shard) for client, shard in task.shards.items()}
        counts = self.num_examples
        nothing = dict.fromkeys(counts)  # who trains has the data; the host only passes these around
        super().__init__(
            args,
            server.device,
            [sum(counts.values()), len(dataset.test), None, None, counts, nothing, nothing, dataset.num_classes],
            torch.nn.Identity(),  # the host builds a trainer of its own around it, which is then replaced
        )
        self.model_trainer = self.trainer
        self.trainer.set_model_params(server.downlink())
        self._begin_round()

    def _setup_clients(self, num_dict: Any, train_dict: Any, test_dict: Any, model_trainer: Any) -> None:
        super()._setup_clients(num_dict, train_dict, test_dict, self.trainer)

    def _begin_round(self) -> None:
        """The next round, if there is one; largest clients first: one that begins last keeps the others waiting."""
        server, round = self.server, self.server.round + 1
        if not server.is_over:
            clients = sorted(server.clients_of(round), key=lambda client: -self.num_examples[client])
            self.trainer.begin(round, clients, server.downlink())

    def _client_sampling(self, round_idx: int, client_num_in_total: int, client_num_per_round: int) -> list[int]:
        self.clients = self.server.start_round(self.server.round + 1)
        return list(self.clients)

    def _aggregate(self, w_locals: list[tuple[int, Mapping[str, Tensor]]]) -> Wire:
        uploads = dict(zip(self.clients, w_locals, strict=True))
        aggregated = self.server.aggregate_round(self.server.round + 1, uploads)
        for client in aggregated.clients:  # the others keep what they kept
            self.client_states[client] = self.trainer.states[client]
        self.trainer.states.clear()
        waits = self.server.evaluation_decides  # on whether there is a next round
        if not waits:
            self._begin_round()  # workers train while this process evaluates
        self.on_round(self.server.evaluate_round(aggregated), self.server.snapshot(self.client_states))
        if self.server.stop is not None:
            raise _StoppedEarly
        if waits:
            self._begin_round()
        return self.server.downlink()

    def _local_test_on_all_clients(self, round_idx: int) -> None:
        """Nothing: evaluation is part of the round, on the global model and once, not once a client."""

    #: Nothing, likewise; the host comes here for data sets whose name begins with ``stackoverflow``.
    _local_test_on_validation_set = _local_test_on_all_clients

    def run(self) -> None:
        with suppress(_StoppedEarly):
            self.train()


def simulate(task: ServerTask) -> tuple[EvaluationResult, ...]:
    server = task.server
    args = host_arguments(server.experiment)
    args.comm_round = server.experiment.num_rounds - server.round
    if not server.is_over:  # else the run was stopped in its final evaluation
        run_host(args, server.device, lambda args: SimulationAPI(args, task))
    return server.final_evaluation(task.scratch)
