"""The processes that train a simulation's clients side by side on this machine: how many, their start and their end.

They are forked from a process that has imported PyTorch and FedML and does nothing else (Python's ``forkserver``), so
that they start at once, however many they are, and take over no thread, lock or GPU of this one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from calfat_plugin.errors import HostError, RunError
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.task import WorkerProcess
from calfat_plugin.recipe.document import Document

AUTO = "auto"

_PRELOADED = [
    "calfat_plugin.runs.party",
    "calfat_plugin.host.mpi_simulation",
    "calfat_plugin.builtin",
    "calfat_plugin.host.transports.pipes",
]
_FOR_US = (signal.SIGINT, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGINT,)
_GRACE = 5.0  # seconds that a worker has to end after SIGTERM


def number_of_workers(text: str, experiment: Experiment) -> int:
    """What ``--workers`` means here.

    Args:
        text: a number, or :data:`AUTO`: one for each GPU that the recipe may use, else one for each share of the cores
            that ``calfat.runtime.threads`` needs.
        experiment: at most its clients of a round.

    Raises:
        RunError: it is neither.
    """
    if text == AUTO:
        number = _fitting(experiment)
    elif text.isdecimal() and int(text) >= 1:
        number = int(text)
    else:
        raise RunError(f"--workers {text}: expected a number of processes, 1 or more, or {AUTO}.")
    return min(number, experiment.recipe.clients_per_round)


def _fitting(experiment: Experiment) -> int:
    if experiment.recipe.device.using_gpu:
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    cores = num_cores()
    return max(1, cores // (experiment.recipe.runtime.threads or cores))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare() -> None:
    """Begin to start workers: they import what they need while this process does.

    Raises:
        HostError: this system has no such processes.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise HostError("--workers needs Linux or macOS. Here a run has one process, or those of an MPI job (mpiexec).")
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
def running(number: int, experiment: Experiment, log: Path) -> Iterator[list[WorkerProcess]]:
    """Start workers, and end those that still run at the end.

    Args:
        number: how many; none for 0.
        experiment: what to run.
        log: file for their log, which several processes may write.

    Raises:
        HostError: the system starts no more processes.
    """
    workers: list[WorkerProcess] = []
    try:
        for rank in range(1, number + 1):
            workers.append(_start(rank, experiment.recipe.document, log))
        yield workers
    finally:
        _end(workers)


def _start(rank: int, document: Document, log: Path) -> WorkerProcess:
    from calfat_plugin.runs.party import run_local_worker

    context = multiprocessing.get_context("forkserver")
    try:
        ours, theirs = context.Pipe()
        with theirs:  # our copy of it; a worker's end is seen when no process has it open any more
            process = context.Process(target=run_local_worker, args=(document, rank, theirs, log))
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
