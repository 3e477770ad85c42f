"""The host's cross-silo runtime with our parties inside: one call for the server's process, one for each client's."""

from __future__ import annotations

import logging
from collections.abc import Callable

from calfat_plugin.host.launch import run_host  # before all else of fedml, whose import it prepares

# isort: split
from calfat_plugin.errors import HostError
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.wire import num_bytes
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host.arguments import fingerprint, silo_arguments
from calfat_plugin.host.silo.client import SiloClient
from calfat_plugin.host.silo.server import SiloServer
from calfat_plugin.host.silo.shutdown import TO_ASK, Shutdown
from calfat_plugin.host.task import ClientTask, ServerTask
from calfat_plugin.host.transports.base import Transport
from calfat_plugin.observer import RunObserver
from calfat_plugin.results import EvaluationResult

log = logging.getLogger(__name__)

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
    rounds_left = server.round < experiment.num_rounds
    try:
        transport = open_transport(0, limit)
    except HostError as error:
        if rounds_left:
            raise
        log.warning("evaluating without informing clients that the rounds are done: %s", error)
        return server.final_evaluation(task.scratch)
    with transport:
        shutdown = Shutdown(transport, fingerprint(experiment))
        if rounds_left:
            arguments = silo_arguments(experiment, rank=0)
            run_host(arguments, task.device, lambda args: SiloServer(args, server, transport, task, shutdown))
        else:
            patience = experiment.silo.start_deadline if all_come else TO_ASK
            shutdown.say({}, range(1, experiment.num_clients + 1), patience)
        evaluations = server.final_evaluation(task.scratch)
        shutdown.wait()
    return evaluations


def work(task: ClientTask, open_transport: OpenTransport) -> None:
    """Be a client until the server says that the run is over.

    Raises:
        HostError: the port is taken, the server does not come, stays away or refuses this client, or its model does
            not fit.
    """
    experiment, rank = task.experiment, task.rank
    worker = Worker(experiment, task.dataset, {rank - 1: task.data}, task.device, RunObserver())
    with open_transport(rank, _max_message(experiment, worker.model_bytes)) as transport:
        transport.patience = experiment.silo.server_deadline
        run_host(
            silo_arguments(experiment, rank=rank), task.device, lambda args: SiloClient(args, worker, transport, task)
        )


def _max_message(experiment: Experiment, model_bytes: int) -> int:
    limit = experiment.silo.max_message_mb
    return _LIMIT_FACTOR * model_bytes + _LIMIT_FLOOR if limit is None else limit * 1_000_000
