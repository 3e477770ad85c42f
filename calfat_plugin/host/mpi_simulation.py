"""The host's MPI simulator with our parties inside: a server, and workers that train whichever client comes next.

Messages, their order and who waits for whom are FedML's own (``simulation/mpi/fedavg``). It never calls a custom
aggregator's ``aggregate`` and its workers count rounds to find their end, which a single round does not have; so we
derive from its managers, trainer and aggregator, and its server says when the run is over. The processes are those of
an MPI job, or were started by the server on its own machine; :class:`Pool` spreads a round's clients over them.

A client's state is kept by the server, as in a simulation of one process. It travels with the model to the worker that
trains the client, and back with its update. While the server evaluates a round, the workers train the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from calfat_plugin.host.launch import run_host  # before all else of fedml, whose import it prepares

# isort: split
from fedml.simulation.mpi.fedavg.FedAVGAggregator import FedAVGAggregator
from fedml.simulation.mpi.fedavg.FedAvgClientManager import FedAVGClientManager
from fedml.simulation.mpi.fedavg.FedAvgServerManager import FedAVGServerManager
from fedml.simulation.mpi.fedavg.FedAVGTrainer import FedAVGTrainer
from fedml.simulation.mpi.fedavg.message_define import MyMessage

from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.wire import Wire, add_client_state, take_client_state
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host.adapters import OnTransport, WorkerTrainer
from calfat_plugin.host.arguments import ServerTask, host_arguments
from calfat_plugin.host.transports.base import Transport
from calfat_plugin.host.transports.message import Message
from calfat_plugin.host.transports.pool import (
    FINISH,
    HELLO,
    PROGRESS,
    SPENT,
    Pool,
    ProgressSender,
    Workers,
    progress_in,
    spent,
    spent_in,
)
from calfat_plugin.profiling import add_share, begin_part, take_part
from calfat_plugin.results import EvaluationResult, RoundRecord, State

_MODEL = MyMessage.MSG_ARG_KEY_MODEL_PARAMS
_MODEL_TYPES = (MyMessage.MSG_TYPE_S2C_INIT_CONFIG, MyMessage.MSG_TYPE_S2C_SYNC_MODEL_TO_CLIENT)


class Rounds(FedAVGAggregator):
    """The host's bookkeeping of who has answered, around our server's arithmetic.

    Attributes:
        aggregated: the record of a round whose evaluation is to come.
    """

    def __init__(self, args: Any, task: ServerTask) -> None:
        self.server, self.client_states, self.on_round = task.server, task.client_states, task.on_round
        self.clients: tuple[int, ...] = ()
        self.aggregated: RoundRecord | None = None
        super().__init__(None, None, 0, {}, {}, {}, args.client_num_per_round, self.server.device, args, None)

    def get_global_model_params(self) -> Wire:
        """The message to every client of the next round."""
        return self.server.downlink()

    def client_sampling(self, round_idx: int, client_num_in_total: int, client_num_per_round: int) -> list[int]:
        """Clients of the next round; the host would draw by ``round_idx`` alone."""
        self.clients = self.server.clients_of(self.server.round + 1)
        return list(self.clients)

    def aggregate(self) -> Wire:
        """Combine what the clients sent; returns the next message to every client."""
        uploads: dict[int, tuple[int, Wire]] = {}
        states: dict[int, State] = {}
        for index, client in enumerate(self.clients):
            update, states[client] = take_client_state(self.model_dict[index])
            uploads[client] = self.sample_num_dict[index], update
        server = self.server
        self.aggregated = server.aggregate_round(server.round + 1, uploads)
        for client in self.aggregated.clients:  # the others keep what they kept, which may be nothing
            self.client_states[client] = states[client]
        return server.downlink()

    def finish_round(self, aggregated: RoundRecord) -> None:
        """Evaluate and record the round that was aggregated."""
        self.aggregated = None
        self.on_round(self.server.evaluate_round(aggregated), self.server.snapshot(self.client_states))

    def start_round(self) -> None:
        """Inform observers of the round that the workers have begun, and take its time."""
        self.server.start_round(self.server.round + 1)

    def test_on_server_for_all_clients(self, round_idx: int) -> None:
        """Nothing: :meth:`finish_round` does it, once the workers have the next round."""

    def _generate_validation_set(self, num_samples: int = 10000) -> None:
        """Nothing, likewise; the host makes one for data sets whose name begins with ``stackoverflow``."""


class SimulationServer(OnTransport, FedAVGServerManager):
    """The host's server: its messages say, too, which round they are of, and bring what the client keeps.

    In the pool the host sees a process for each client of a round.
    """

    com_manager: Pool

    def __init__(self, args: Any, rounds: Rounds, pool: Pool) -> None:
        super().__init__(args, rounds, pool, 0, args.client_num_per_round + 1, args.backend)

    def run(self) -> None:
        """What ``FedMLRunner`` calls; the host does the same with a manager of its own."""
        self.send_init_msg()
        self.com_manager.begin_round()
        self.aggregator.start_round()
        super().run()

    def register_message_receive_handlers(self) -> None:
        super().register_message_receive_handlers()
        self.register_message_receive_handler(PROGRESS, self.handle_message_progress)
        self.register_message_receive_handler(SPENT, self.handle_message_spent)

    def handle_message_receive_model_from_client(self, msg_params: Message) -> None:
        """Take an update. After a round's last one the host sends out the next round; then this one is evaluated."""
        super().handle_message_receive_model_from_client(msg_params)
        if self.aggregator.aggregated is not None:
            self.com_manager.begin_round()
            self.aggregator.finish_round(self.aggregator.aggregated)
            if self.args.round_idx < self.round_num:
                self.aggregator.start_round()

    def handle_message_progress(self, msg_params: Message) -> None:
        self.aggregator.server.observer.client_progress(progress_in(msg_params))

    def handle_message_spent(self, msg_params: Message) -> None:
        add_share(*spent_in(msg_params))

    def send_message(self, message: Message) -> None:
        """Send it; a model becomes that of its client."""
        if message.get_type() in _MODEL_TYPES:
            client = int(message.get(MyMessage.MSG_ARG_KEY_CLIENT_INDEX))
            kept = self.aggregator.client_states.get(client, {})
            message.add_params("round", self.aggregator.server.round + 1)
            message.add_params(_MODEL, add_client_state(message.get(_MODEL), kept))
        super().send_message(message)


class TravellingTrainer(WorkerTrainer):
    """A worker's trainer whose clients keep nothing here: their states come and go with the messages.

    Where the time is measured, the server is sent where it went.
    """

    def __init__(self, worker: Worker, args: Any, transport: Transport) -> None:
        super().__init__(worker, args)
        self._transport = transport

    def train(self, train_data: Any, device: Any, args: Any) -> None:
        """Train client ``self.id``."""
        self._message, state = take_client_state(self._message)
        self.worker.client_states[self.id] = state
        begin_part(f"round {self.round}")
        super().train(train_data, device, args)
        if spans := take_part():
            self._transport.send_message(spent(self._transport.rank, spans))
        self._message = add_client_state(self._message, self.worker.client_states.pop(self.id))


class AnyClientsTrainer(FedAVGTrainer):
    """The host's trainer, which would train the data of the client that it gets under its own process's number."""

    def update_dataset(self, client_index: int) -> None:
        """Be this client for a round."""
        super().update_dataset(client_index)
        self.trainer.set_id(client_index)


class SimulationWorker(OnTransport, FedAVGClientManager):
    """The host's client: trains whenever a model comes, until the server says that the run is over."""

    def __init__(self, args: Any, worker: Worker, transport: Transport) -> None:
        counts = {client: worker.num_examples(client) for client in worker.shards}
        nothing = dict.fromkeys(counts)  # the worker has the data; the host only passes these around
        ours, total = TravellingTrainer(worker, args, transport), sum(counts.values())
        trainer = AnyClientsTrainer(0, nothing, counts, nothing, total, worker.device, args, ours)
        super().__init__(args, trainer, transport, transport.rank, transport.num_parties, args.backend)

    def run(self) -> None:
        self.send_message(Message(HELLO, self.rank, 0))
        super().run()

    def register_message_receive_handlers(self) -> None:
        super().register_message_receive_handlers()
        self.register_message_receive_handler(FINISH, self.handle_message_finish)

    def handle_message_init(self, msg_params: Message) -> None:
        self.trainer.trainer.round = msg_params.get("round")
        super().handle_message_init(msg_params)

    def handle_message_receive_model_from_server(self, msg_params: Message) -> None:
        """As the first model: the host would count here, and end itself by the count."""
        self.handle_message_init(msg_params)

    def handle_message_finish(self, msg_params: Message) -> None:
        self.finish()


def run_server(task: ServerTask, workers: Workers) -> tuple[EvaluationResult, ...]:
    """Run all remaining rounds with these workers, then the final evaluation.

    Raises:
        HostError: the installed host is of an untested version, or no worker is left.
        UpdateError: a round without a single usable update.
        WorkerError: a bug showed in a worker.
    """
    server = task.server
    args = host_arguments(server.experiment)
    args.comm_round = server.experiment.num_rounds - server.round
    with Pool(workers, {client: len(shard) for client, shard in task.shards.items()}, task.warn) as pool:
        if args.comm_round > 0:  # else the run was stopped in its final evaluation
            run_host(args, server.device, lambda args: SimulationServer(args, Rounds(args, task), pool))
    return server.final_evaluation(task.scratch)


def run_worker(
    experiment: Experiment,
    dataset: Dataset,
    shards: Mapping[int, ImageData],
    device: torch.device,
    transport: Transport,
) -> None:
    """Be a worker: train the clients that the server names, until it says that the run is over; see :class:`Worker`."""
    worker = Worker(experiment, dataset, shards, device, ProgressSender(transport.rank, transport.send_message))
    run_host(host_arguments(experiment), device, lambda args: SimulationWorker(args, worker, transport))
