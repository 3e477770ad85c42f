"""The host's single-process simulator with our parties inside.

The round loop is FedML's own ``FedAvgAPI.train``. Its simulator ignores custom trainers and aggregators. So our class
derives from the API, brings a trainer of its own, and overrides three steps: sampling, aggregation and evaluation.
With workers, the loop still asks for one client after another, and gets what the workers have trained meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from calfat_plugin.host.launch import (  # before all else of fedml, whose import it prepares
    MessageTrainer,
    WorkerTrainer,
    host_arguments,
    run_host,
)

# isort: split
from fedml.simulation.sp.fedavg.fedavg_api import FedAvgAPI

from calfat_plugin.federation.wire import Wire
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host.executors import Workers
from calfat_plugin.host.tasks import ServerTask
from calfat_plugin.results import EvaluationResult, State


class SimulationTrainer(WorkerTrainer):
    """Trains each client in this process, when the host asks for it."""

    def __init__(self, worker: Worker, args: Any, client_states: Mapping[int, State]) -> None:
        super().__init__(worker, args)
        self._client_states = client_states  # after the last round
        self.new_states: dict[int, State] = {}  # of this round, until the server has used the updates

    def begin(self, round: int, clients: Sequence[int], downlink: Wire) -> None:
        self.round = round

    def train(self, train_data: Any, device: Any, args: Any) -> None:
        self.worker.client_states[self.id] = self._client_states.get(self.id, {})
        super().train(train_data, device, args)
        self.new_states[self.id] = self.worker.client_states.pop(self.id)


class AheadTrainer(MessageTrainer):
    """Has all clients of a round trained by workers from its beginning on; otherwise as above."""

    def __init__(self, workers: Workers, args: Any, client_states: Mapping[int, State]) -> None:
        super().__init__(args)
        self._workers = workers
        self._client_states = client_states
        self.new_states: dict[int, State] = {}

    def begin(self, round: int, clients: Sequence[int], downlink: Wire) -> None:
        self._workers.submit(round, clients, downlink, self._client_states)

    def train(self, train_data: Any, device: Any, args: Any) -> None:
        self._message, self.new_states[self.id] = self._workers.result(self.id)


class _StoppedEarly(Exception):  # noqa: N818 (it is no error)
    """Leaves the host's loop, which otherwise ends after the last of its rounds only."""


class SimulationAPI(FedAvgAPI):
    """FedML's FedAvg simulation, driving our server; ``args.comm_round`` are the rounds to do."""

    def __init__(self, args: Any, task: ServerTask) -> None:
        self.server = task.server
        self.on_round = task.on_round
        self.client_states = task.client_states
        self.clients: tuple[int, ...] = ()  # of the round under way
        self.num_examples = {client: len(shard) for client, shard in task.shards.items()}
        self.trainer: SimulationTrainer | AheadTrainer
        dataset = self.server.dataset
        if task.workers is not None:
            self.trainer = AheadTrainer(task.workers, args, task.client_states)
        else:
            worker = Worker(self.server.experiment, dataset, task.shards, self.server.device, self.server.observer)
            self.trainer = SimulationTrainer(worker, args, task.client_states)
        no_data = dict.fromkeys(self.num_examples)  # who trains has the data; the host only passes these around
        counts = self.num_examples
        super().__init__(
            args,
            self.server.device,
            [sum(counts.values()), len(dataset.test), None, None, counts, no_data, no_data, dataset.num_classes],
            torch.nn.Identity(),  # the host builds a trainer of its own around it, which is then replaced
        )
        self.model_trainer = self.trainer
        self.trainer.set_model_params(self.server.downlink())
        self._begin_round()

    def _setup_clients(self, num_dict: Any, train_dict: Any, test_dict: Any, model_trainer: Any) -> None:
        super()._setup_clients(num_dict, train_dict, test_dict, self.trainer)

    def _begin_round(self) -> None:
        """Begin the next round, if there is one."""
        if self.server.is_over:
            return
        round = self.server.round + 1
        # The largest clients first: a large one that begins last would keep the others waiting.
        clients = sorted(self.server.clients_of(round), key=self.num_examples.__getitem__, reverse=True)
        self.trainer.begin(round, clients, self.server.downlink())

    def _client_sampling(self, round_idx: int, client_num_in_total: int, client_num_per_round: int) -> list[int]:
        self.clients = self.server.start_round(self.server.round + 1)
        return list(self.clients)

    def _aggregate(self, w_locals: list[tuple[int, Mapping[str, Tensor]]]) -> Wire:
        uploads = dict(zip(self.clients, w_locals, strict=True))
        aggregated = self.server.aggregate_round(self.server.round + 1, uploads)
        for client in aggregated.clients:  # the server did not use the others, so they keep their states
            self.client_states[client] = self.trainer.new_states[client]
        self.trainer.new_states.clear()
        is_next_round_certain = not self.server.evaluation_decides
        if is_next_round_certain:
            self._begin_round()  # workers train while this process evaluates
        record = self.server.evaluate_round(aggregated)
        self.on_round(record, self.server.snapshot(self.client_states))
        if self.server.stop is not None:
            raise _StoppedEarly
        if not is_next_round_certain:
            self._begin_round()
        return self.server.downlink()

    def _local_test_on_all_clients(self, round_idx: int) -> None:
        """Not used: evaluation is part of the round, on the global model and once, not once a client."""

    def _local_test_on_validation_set(self, round_idx: int) -> None:
        """Not used either; the host calls it for data sets whose name begins with ``stackoverflow``."""

    def run(self) -> None:
        with suppress(_StoppedEarly):
            self.train()


def simulate(task: ServerTask) -> tuple[EvaluationResult, ...]:
    """Run all remaining rounds in FedML's simulation, then the final evaluation."""
    server = task.server
    if not server.is_over:  # else the run was stopped in its final evaluation
        args = host_arguments(server.experiment)
        args.comm_round = server.experiment.num_rounds - server.round
        run_host(args, server.device, lambda args: SimulationAPI(args, task))
    return server.final_evaluation(task.scratch)
