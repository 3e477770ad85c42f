"""The host's cross-silo runtime with our parties inside: one call for the server's process, one for each client's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from calfat_plugin.host.launch import run_host  # before all else of fedml, whose import it prepares

# isort: split
from fedml.cross_silo.client.fedml_trainer_dist_adapter import TrainerDistAdapter

from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.errors import HostError
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.wire import num_bytes
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host.arguments import fingerprint, silo_arguments
from calfat_plugin.host.silo.client import ClientStates, SiloClient
from calfat_plugin.host.silo.server import SiloServer, dismiss_all
from calfat_plugin.host.task import ServerTask
from calfat_plugin.host.trainer import WorkerTrainer
from calfat_plugin.host.transports.base import Transport
from calfat_plugin.observer import RunObserver
from calfat_plugin.results import EvaluationResult

__all__ = ["ClientStates", "serve", "work"]

log = logging.getLogger(__name__)

_GOODBYE = 5.0  # seconds to inform clients that the run is over
_LIMIT_FACTOR = 8  # an update may bring control variates, several sets of statistics and the like
_LIMIT_FLOOR = 1_000_000


#: Opens this process's transport from its rank and the largest message that it accepts, in bytes.
OpenTransport = Callable[[int, int], Transport]


def serve(task: ServerTask, open_transport: OpenTransport, *, all_come: bool) -> tuple[EvaluationResult, ...]:
    """Be the server: run all remaining rounds with the clients that come, then the final evaluation.

    Args:
        task: what to do.
        open_transport: the backend.
        all_come: whether every client is sure to come, also to a run with only its evaluation left (an MPI job).

    Raises:
        HostError: the port is taken, too few clients come or answer, or the host is of an untested version.
        UpdateError: a round without a single usable update.
    """
    experiment, server = task.experiment, task.start_server()
    limit = _max_message(experiment, num_bytes(server.downlink()))
    if server.round == experiment.num_rounds:
        patience = experiment.recipe.silo.settings.start_deadline if all_come else 0.0
        with _dismissing_clients(lambda: open_transport(0, limit), patience):
            return server.final_evaluation(task.scratch)
    transport = open_transport(0, limit)
    try:
        run_host(
            silo_arguments(experiment, rank=0),
            task.device,
            lambda args: SiloServer(
                args,
                server,
                transport,
                experiment.recipe.silo,
                fingerprint=fingerprint(experiment),
                used=task.used,
                on_round=task.on_round,
            ),
        )
    finally:
        transport.stop_receive_message()
    return server.final_evaluation(task.scratch)


@contextmanager
def _dismissing_clients(open_transport: Callable[[], Transport], patience: float) -> Iterator[None]:
    """For a run that was stopped in its final evaluation: clients that were started again must not wait for it.

    Args:
        open_transport: opens the server's transport.
        patience: seconds to wait for all clients to come, after the evaluation.
    """
    try:
        transport = open_transport()
    except HostError as error:
        log.warning("evaluating without informing clients that the rounds are done: %s", error)
        yield
        return
    try:
        all_informed = dismiss_all(transport)
        yield
        all_informed.wait(patience)
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
    open_transport: OpenTransport,
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
        open_transport: the backend.
        observer: is informed of progress.
        states: what this client keeps between rounds.
        on_round: called for each round with (number, what happens).

    Raises:
        HostError: the port is taken, the server does not come, stays away or refuses this client, or its model does
            not fit.
    """
    client = rank - 1
    worker = Worker(experiment, dataset, {client: data}, device, observer)
    transport = open_transport(rank, _max_message(experiment, worker.model_bytes))
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


def _max_message(experiment: Experiment, model_bytes: int) -> int:
    limit = experiment.recipe.silo.settings.max_message_mb
    return _LIMIT_FACTOR * model_bytes + _LIMIT_FLOOR if limit is None else limit * 1_000_000
