"""The host's single-process simulator with our parties inside.

The round loop is FedML's own ``FedAvgAPI.train``. Its simulator ignores custom trainers and aggregators, so we derive
from the API, hand in our own trainer, and override the three steps that are ours: sampling, aggregation, evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from calfat_plugin.host.launch import run_host  # before all else of fedml, whose import it prepares

# isort: split
from fedml.simulation.sp.fedavg.fedavg_api import FedAvgAPI

from calfat_plugin.federation.wire import Wire
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host.adapters import WorkerTrainer
from calfat_plugin.host.arguments import ServerTask, host_arguments
from calfat_plugin.results import EvaluationResult, State


class SimulationTrainer(WorkerTrainer):
    """A trainer whose clients' new states wait in the worker until the server has used their updates."""

    def __init__(self, worker: Worker, args: Any, client_states: Mapping[int, State]) -> None:
        super().__init__(worker, args)
        self._kept = client_states

    def train(self, train_data: Any, device: Any, args: Any) -> None:
        """Train client ``self.id``."""
        self.worker.client_states[self.id] = self._kept.get(self.id, {})
        super().train(train_data, device, args)


class SimulationAPI(FedAvgAPI):
    """FedML's FedAvg simulation, driving a server and a worker of ours; ``args.comm_round`` are the rounds to do."""

    def __init__(self, args: Any, worker: Worker, task: ServerTask) -> None:
        self.server, self.worker, self.on_round = task.server, worker, task.on_round
        self.client_states = task.client_states
        dataset = self.server.dataset
        self.trainer = SimulationTrainer(worker, args, task.client_states)
        self.clients: tuple[int, ...] = ()
        counts = {client: worker.num_examples(client) for client in worker.shards}
        nothing = dict.fromkeys(counts)  # the worker has the data; the host only passes these around
        super().__init__(
            args,
            self.server.device,
            [sum(counts.values()), len(dataset.test), None, None, counts, nothing, nothing, dataset.num_classes],
            torch.nn.Identity(),  # the host builds a trainer of its own around it, which is then replaced
        )
        self.model_trainer = self.trainer
        self.trainer.set_model_params(self.server.downlink())

    def _setup_clients(self, num_dict: Any, train_dict: Any, test_dict: Any, model_trainer: Any) -> None:
        super()._setup_clients(num_dict, train_dict, test_dict, self.trainer)

    def _client_sampling(self, round_idx: int, client_num_in_total: int, client_num_per_round: int) -> list[int]:
        self.trainer.round = self.server.round + 1
        self.clients = self.server.start_round(self.trainer.round)
        return list(self.clients)

    def _aggregate(self, w_locals: list[tuple[int, Mapping[str, Tensor]]]) -> Wire:
        uploads = dict(zip(self.clients, w_locals, strict=True))
        aggregated = self.server.aggregate_round(self.trainer.round, uploads)
        for client in aggregated.clients:  # the others keep what they kept
            self.client_states[client] = self.worker.client_states[client]
        self.worker.client_states.clear()
        self.on_round(self.server.evaluate_round(aggregated), self.server.snapshot(self.client_states))
        return self.server.downlink()

    def _local_test_on_all_clients(self, round_idx: int) -> None:
        """Nothing: evaluation is part of the round, on the global model and once, not once a client."""

    #: Nothing, likewise; the host comes here for data sets whose name begins with ``stackoverflow``.
    _local_test_on_validation_set = _local_test_on_all_clients

    def run(self) -> None:
        """What ``FedMLRunner`` calls."""
        self.train()


def simulate(task: ServerTask) -> tuple[EvaluationResult, ...]:
    """Run all remaining rounds through FedML's simulator, then the final evaluation.

    Raises:
        HostError: the installed host is of an untested version.
        UpdateError: a round without a single usable update.
    """
    server = task.server
    worker = Worker(server.experiment, server.dataset, task.shards, server.device, server.observer)
    args = host_arguments(server.experiment)
    args.comm_round = server.experiment.num_rounds - server.round
    if args.comm_round > 0:  # else the run was stopped in its final evaluation
        run_host(args, server.device, lambda args: SimulationAPI(args, worker, task))
    return server.final_evaluation(task.scratch)
