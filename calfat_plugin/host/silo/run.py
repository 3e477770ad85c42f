"""The host's cross-silo runtime with our parties inside: one call for the server's process, one for each client's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from calfat_plugin.host.launch import fedml, run_host  # before all else of fedml, whose import it prepares

# isort: split
from fedml.cross_silo.client.fedml_trainer_dist_adapter import TrainerDistAdapter

from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.errors import HostError
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.server import Server, Snapshot
from calfat_plugin.federation.wire import num_bytes
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host import patches
from calfat_plugin.host.arguments import fingerprint, silo_arguments
from calfat_plugin.host.silo.client import ClientStates, SiloClient
from calfat_plugin.host.silo.server import SiloServer, dismiss_all
from calfat_plugin.host.trainer import WorkerTrainer
from calfat_plugin.host.transports.base import Transport
from calfat_plugin.interfaces import RunObserver
from calfat_plugin.results import EvaluationResult, RoundRecord

__all__ = ["ClientStates", "serve", "work"]

log = logging.getLogger(__name__)

_GOODBYE = 5.0  # seconds to tell clients that the run is over
_LIMIT_FACTOR = 8  # an update may bring control variates, several sets of statistics and the like
_LIMIT_FLOOR = 1_000_000


def serve(
    experiment: Experiment,
    dataset: Dataset,
    device: torch.device,
    *,
    observer: RunObserver,
    on_round: Callable[[RoundRecord, Snapshot], None],
    resume_from: Snapshot | None = None,
    used: Mapping[int, int] | None = None,
    scratch: Path | None = None,
) -> tuple[EvaluationResult, ...]:
    """Be the server: run all remaining rounds with the clients that come, then the final evaluation.

    Args:
        experiment: what to run.
        dataset: only its test split is used.
        device: where to evaluate.
        observer: hears of progress.
        on_round: called with each record and a snapshot to save.
        resume_from: where to go on.
        used: client to the last round in which its update was used.
        scratch: where the final evaluation keeps what it has done, to go on there after a stop.

    Raises:
        HostError: the port is taken, too few clients come or answer, or the host is of an untested version.
        UpdateError: a round without a single usable update.
    """
    patches.check_version(fedml.__version__)
    server = Server(experiment, dataset, device, observer)
    if resume_from is not None:
        server.restore(resume_from)
    if server.round == experiment.num_rounds:
        with _sending_clients_home(experiment, server):
            return server.final_evaluation(scratch)
    transport = _transport(experiment, 0, num_bytes(server.downlink()))
    try:
        run_host(
            silo_arguments(experiment, rank=0),
            device,
            lambda args: SiloServer(
                args,
                server,
                transport,
                experiment.recipe.silo,
                fingerprint=fingerprint(experiment),
                used=used or {},
                on_round=on_round,
            ),
        )
    finally:
        transport.stop_receive_message()
    return server.final_evaluation(scratch)


@contextmanager
def _sending_clients_home(experiment: Experiment, server: Server) -> Iterator[None]:
    """For a run that was stopped in its final evaluation: clients that were started again, too, must not wait for it.

    They may as well not have been; only an MPI job has all of them.
    """
    try:
        transport = _transport(experiment, 0, num_bytes(server.downlink()))
    except HostError as error:
        log.warning("evaluating without telling clients that the rounds are done: %s", error)
        yield
        return
    try:
        all_told = dismiss_all(transport)
        yield
        if experiment.recipe.comm.backend == "MPI":
            all_told.wait(experiment.recipe.silo.settings.start_deadline)
        transport.flush(_GOODBYE)
    finally:
        transport.stop_receive_message()


def work(
    experiment: Experiment,
    dataset: Dataset,
    data: ImageData,
    rank: int,
    device: torch.device,
    *,
    observer: RunObserver,
    states: ClientStates,
    on_round: Callable[[int, str], None],
) -> None:
    """Be client ``rank - 1``: train whenever the server asks, until it says that the run is over.

    Args:
        experiment: what to run; the server's must be the same.
        dataset: for shapes and augmentation.
        data: this client's training examples, on ``device``.
        rank: 1 to the number of clients.
        device: where to train.
        observer: hears of progress.
        states: what this client keeps between rounds.
        on_round: told of each round: (number, what happens).

    Raises:
        HostError: the port is taken, the server does not come, stays away or refuses this client, or its model does
            not fit.
    """
    patches.check_version(fedml.__version__)
    client = rank - 1
    worker = Worker(experiment, dataset, {client: data}, device, observer)
    transport = _transport(experiment, rank, worker.model_bytes)
    settings = experiment.recipe.silo.settings
    transport.patience = settings.server_deadline

    def manager(args: Any) -> SiloClient:
        adapter = TrainerDistAdapter(
            args,
            device,
            rank,
            torch.nn.Identity(),  # the worker has the model; the host only wants to move one to the device
            len(data),
            {client: len(data)},
            {client: None},
            None,
            WorkerTrainer(worker, args),
        )
        return SiloClient(
            args,
            adapter,
            transport,
            states,
            fingerprint=fingerprint(experiment),
            deadlines=(settings.start_deadline, settings.server_deadline),
            on_round=on_round,
        )

    try:
        run_host(silo_arguments(experiment, rank=rank), device, manager)
    finally:
        transport.stop_receive_message()


def _transport(experiment: Experiment, rank: int, model_bytes: int) -> Transport:
    limit = experiment.recipe.silo.settings.max_message_mb
    max_message = _LIMIT_FACTOR * model_bytes + _LIMIT_FLOOR if limit is None else limit * 1_000_000
    backend, num_parties = experiment.recipe.comm.backend, experiment.num_clients + 1
    if backend == "MPI":
        from calfat_plugin.host.transports.mpi import MPITransport

        return MPITransport(rank, num_parties, max_message)
    if backend == "MQTT_S3":
        from calfat_plugin.host.transports.mqtt import MQTTTransport

        return MQTTTransport(rank, num_parties, experiment.recipe.silo, max_message)
    from calfat_plugin.host.transports.grpc import GRPCTransport

    return GRPCTransport(rank, experiment.recipe.silo, max_message)
