"""The processes that train a simulation's clients side by side on this machine: how many, their start and their end.

They are forked from a process that has imported PyTorch and FedML and does nothing else (Python's ``forkserver``), so
that they start at once, however many they are, and take over no thread, lock or GPU of this one.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from unittest import mock

from calfat_plugin.compat import num_cores
from calfat_plugin.errors import HostError, RunError
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.arguments import WorkerProcess
from calfat_plugin.host.runtimes import Runtime
from calfat_plugin.runs.request import Request

if TYPE_CHECKING:
    from calfat_plugin.federation.worker import Worker

AUTO, OPTION = "auto", "--workers"

_PRELOADED = [
    "calfat_plugin.host.launch",  # the first to import torch
    "calfat_plugin.runs.party",
    "calfat_plugin.host.mpi_simulation",
    "calfat_plugin.builtin",
]
_FOR_US = (signal.SIGINT, signal.SIGHUP)
_GRACE = 5.0  # seconds that a worker has to end after SIGTERM


def number_of_workers(text: str, experiment: Experiment, option: str = OPTION) -> int:
    """What ``--workers`` means here.

    Args:
        text: see :func:`asked_workers`; :data:`AUTO` is one for each GPU that the recipe may use, else one for each
            share of the cores that ``calfat.runtime.threads`` needs.
        experiment: at most its clients of a round.
    """
    return min(asked_workers(text, option) or _fitting(experiment), experiment.clients_per_round)


def asked_workers(text: str, option: str = OPTION) -> int | None:
    """The number that a text asks for; None for :data:`AUTO`."""
    if text == AUTO:
        return None
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise RunError(f"{option} {text}: expected a number of processes, 1 or more, or {AUTO}.")


def check_workers(runtime: Runtime, option: str = OPTION) -> None:
    """Refuse workers where there can be none."""
    if runtime.trains_elsewhere:
        raise RunError(
            f"{option} starts processes for FedML. Leave it out: Flower has its own, as many at a time as "
            "calfat.flower.client_cpus lets fit."
        )
    if runtime.is_cross_silo:
        raise RunError(
            f"{option} is for simulations: in a cross-silo run each client has a process of its own. Leave it out, or "
            "simulate with --set common_args.training_type=simulation --set comm_args.backend=sp."
        )
    if runtime.is_mpi_job:
        from calfat_plugin.host.transports import mpi_job

        if mpi_job.size() > 1:
            raise RunError(f"{option} starts its own processes. Leave it out in an MPI job, which has some already.")


def _fitting(experiment: Experiment) -> int:
    if experiment.device.using_gpu:
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    cores = num_cores()
    return max(1, cores // (experiment.runtime.threads or cores))


def elsewhere(request: Request, log: Path) -> Callable[[], Worker]:
    """What a process that the host starts calls to train any client; picklable."""
    import torch

    from calfat_plugin.runs.party import any_clients_worker

    document, threads = request.experiment.document, torch.get_num_threads()
    return partial(any_clients_worker, document, threads, log.absolute(), request.profile)


def prepare() -> None:
    """Begin to start workers: they import what they need while this process does.

    Raises:
        HostError: the system starts no more processes.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    try:
        resource_tracker.ensure_running()  # it would let the signals through again
        # What a terminal sends reaches us alone, and we end the workers; they inherit the mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_US)
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except OSError as error:
        raise _cannot_start(error) from None


@contextmanager
def running(request: Request, log: Path) -> Iterator[list[WorkerProcess]]:
    """Start workers, and end those that still run at the end.

    Raises:
        HostError: the system starts no more processes.
    """
    workers: list[WorkerProcess] = []
    try:
        for rank in range(1, request.workers + 1):
            workers.append(_start(rank, request, log))
        yield workers
    finally:
        _end(workers)


def _start(rank: int, request: Request, log: Path) -> WorkerProcess:
    import torch

    from calfat_plugin.runs.party import run_local_worker

    context = multiprocessing.get_context("forkserver")
    document, threads = request.experiment.document, torch.get_num_threads()
    try:
        ours, theirs = context.Pipe()
        # Hide the program for a while: Python would import it in each process that we start, and so run a script again.
        hidden = mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")})
        with theirs, hidden:  # our copy of it; a worker's end is seen when no process has it open any more
            arguments = (document, threads, rank, theirs, log, request.profile)
            process = context.Process(target=run_local_worker, args=arguments)
            process.start()
    except (OSError, EOFError) as error:
        raise _cannot_start(error) from None
    return WorkerProcess(process, ours)


def _cannot_start(error: Exception) -> HostError:
    reason = getattr(error, "strerror", None) or "their server has ended; see its message above"
    return HostError(
        f"worker processes cannot be started ({reason}). Use fewer workers, or raise the system's limits of processes "
        "and open files (ulimit -u, ulimit -n)."
    )


def _end(workers: list[WorkerProcess]) -> None:
    """End whoever still runs: politely, then not."""
    for process, _ in workers:
        process.terminate()
    for process, _ in workers:
        process.join(_GRACE)
        if process.exitcode is None:
            process.kill()
            process.join()
