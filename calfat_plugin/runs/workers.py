"""The executors that train a simulation's clients side by side: how many processes, their start and their end.

Those of this machine are forked from a process that has imported PyTorch and FedML and does nothing else (Python's
``forkserver``), so that they start at once, however many they are, and take over no thread, lock or GPU of this one.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from calfat_plugin.compat import num_cores
from calfat_plugin.errors import HostError, RunError, one_line
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.executors import LOST_LEADER, OpenExecutor, Workers, started
from calfat_plugin.host.runtimes import EXECUTOR, Runtime, Simulation, runtime_of
from calfat_plugin.observer import RunObserver
from calfat_plugin.peer_text import error_text
from calfat_plugin.recipe.schema import DASK, MPI, PROCESSES
from calfat_plugin.report.numbers import counted
from calfat_plugin.runs.request import Request

if TYPE_CHECKING:
    from calfat_plugin.federation.worker import Worker

AUTO, OPTION = "auto", "--workers"

_PRELOADED = [
    "calfat_plugin.host.launch",  # the first to import torch
    "calfat_plugin.runs.party",
    "calfat_plugin.trainers.loop",
    "calfat_plugin.builtin",
]
FOR_US = (signal.SIGINT, signal.SIGHUP)
_TO_CONNECT = 30  # seconds


def with_workers(
    request: Request, runtime: Runtime, text: str, warn: Callable[[str], None], option: str = OPTION
) -> Request:
    """The request with the number of workers that ``--workers`` asks for; ``warn`` shows what the user should know."""
    check_workers(runtime, option)
    experiment = request.experiment
    number = number_of_workers(text, experiment, option)
    workers, cores = counted(number, "worker"), num_cores()
    threads = experiment.runtime.threads or cores
    per_worker = counted(threads, "thread")
    if text != AUTO and int(text) > number:
        warn(f"{option} {text}: a round has {counted(number, 'client')}; starting {workers}.")
    on_cores = not experiment.device.using_gpu
    if on_cores and number > 1 and number * threads > cores:
        remedy = "Fewer workers are as fast."
        if threads > 1:
            remedy = (
                "A smaller calfat.runtime.threads is faster for a new run (it changes the last bits of the result)."
            )
        warn(f"{option} {text}: {workers} of {per_worker} share {counted(cores, 'core')}. {remedy}")
    elif on_cores and text == AUTO and number < min(cores, experiment.clients_per_round):
        warn(
            f"{option} {text}: {workers} of {per_worker} on {counted(cores, 'core')}. With a smaller "
            "calfat.runtime.threads, a new run gets more workers (it changes the last bits of the result)."
        )
    return replace(request, workers=number)


def number_of_workers(text: str, experiment: Experiment, option: str = OPTION) -> int:
    """What ``--workers`` means here, at most the clients of a round.

    :data:`AUTO` is one for each GPU that the recipe may use, else one for each share of the cores that
    ``calfat.runtime.threads`` needs.
    """
    number = asked_workers(text, option)
    if number is None and experiment.device.using_gpu:
        import torch

        if torch.cuda.is_available():
            number = torch.cuda.device_count()
    if not number:
        cores = num_cores()
        number = max(1, cores // (experiment.runtime.threads or cores))
    return min(number, experiment.clients_per_round)


def asked_workers(text: str, option: str = OPTION) -> int | None:
    """The number that a text asks for; None for :data:`AUTO`."""
    if text == AUTO:
        return None
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise RunError(f"{option} {text}: expected a number of processes, 1 or more, or {AUTO}.")


def check_workers(runtime: Runtime, option: str = OPTION) -> None:
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


def worker_starter(request: Request, log: Path) -> Callable[[], Worker]:
    """What a process of an executor calls first, to get a worker that trains any client; picklable."""
    import torch

    from calfat_plugin.runs.party import any_clients_worker

    return partial(any_clients_worker, request.experiment.document, torch.get_num_threads(), log.absolute())


def running(
    request: Request, start: Callable[[], Worker], observer: RunObserver
) -> AbstractContextManager[Workers | None]:
    """The workers that a simulation is to have, from their start to their end; None: this process trains."""
    runtime, executor = runtime_of(request.experiment), request.experiment.executor
    open_executor: OpenExecutor  # starts the executor, and ends it
    if request.workers:
        executor, open_executor = PROCESSES, partial(_processes, request.workers, start)
    elif executor == PROCESSES or not isinstance(runtime, Simulation):
        return nullcontext()
    elif executor == MPI:
        open_executor = _mpi
    elif executor == DASK:
        open_executor = partial(_dask, request.experiment)
    else:
        open_executor = partial(_of_factory, runtime)
    return Workers(executor, open_executor, start, observer, observer.warn)


# --- processes of this machine ----------------------------------------------------------------------------------------


def prepare(modules: list[str] = _PRELOADED) -> None:
    """Begin to start processes of our own: they import these modules while this process does something else."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    try:
        resource_tracker.ensure_running()  # it would let the signals through again
        # What a terminal sends reaches us alone, and we end the workers; they inherit the mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_US)
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except OSError as error:
        raise _cannot_start(error) from None


@contextmanager
def without_program() -> Iterator[None]:
    """Keep a process that is started meanwhile from importing the program of this one: a script would run again."""
    program, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


class _Pool(ProcessPoolExecutor):
    """Starts its processes when tasks come."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            with without_program():
                return super().submit(fn, *args, **kwargs)
        except (OSError, EOFError) as error:
            raise _cannot_start(error) from None


@contextmanager
def _processes(number: int, start: Callable[[], Worker]) -> Iterator[Executor]:
    """So many processes, which end with this one, however it ends."""
    context = multiprocessing.get_context("forkserver")
    try:
        read_end, write_end = context.Pipe(duplex=False)  # the workers wait until this process's end is closed
        pool = _Pool(number, context, initializer=_end_with, initargs=(read_end,))
    except OSError as error:
        raise _cannot_start(error) from None
    try:
        for _ in range(number):  # they get ready while this process does
            pool.submit(_get_ready, pickle.dumps(start))
        yield pool
    finally:
        write_end.close()
        pool.shutdown()
        read_end.close()


def _end_with(leader: Connection) -> None:
    """End this process at once when nobody has the other end of this pipe open any more."""

    def wait() -> None:
        with suppress(EOFError, OSError):
            leader.recv()
        os._exit(LOST_LEADER)

    threading.Thread(target=wait, name="leader", daemon=True).start()


def _get_ready(start: bytes) -> None:
    with suppress(Exception):  # the first client will say what is wrong
        started(start)


def _cannot_start(error: Exception) -> HostError:
    reason = getattr(error, "strerror", None) or "their server has ended; see its message above"
    return HostError(
        f"worker processes cannot be started ({reason}). Use fewer workers, or raise the system's limits of processes "
        "and open files (ulimit -u, ulimit -n)."
    )


# --- executors of MPI, Dask and the user ------------------------------------------------------------------------------


def mpi_workers() -> int:
    import mpi4py.MPI

    others = int(mpi4py.MPI.COMM_WORLD.Get_size()) - 1
    if others < 1 or "mpi4py.futures" not in sys.orig_argv:
        raise HostError(
            f"calfat.runtime.executor {MPI}: this process leads no workers of an MPI job. For 2 workers: mpiexec -n 3 "
            "python -m mpi4py.futures -m calfat_plugin.cli.main run RECIPE, or without MPI: calfat run RECIPE "
            "--workers 2."
        )
    return others


@contextmanager
def _mpi() -> Iterator[Executor]:
    from mpi4py.futures import MPIPoolExecutor

    mpi_workers()
    with _released(MPIPoolExecutor()) as executor:
        yield executor


@contextmanager
def _dask(experiment: Experiment) -> Iterator[Executor]:
    from distributed import Client

    address = experiment.runtime.scheduler
    try:
        client = Client(address, timeout=_TO_CONNECT, set_as_default=False)
    except (OSError, ValueError) as error:
        raise experiment.document.error(
            ("calfat", "runtime", "scheduler"), f"no scheduler of Dask answers at '{address}' ({error})."
        ) from error
    with client:
        yield client.get_executor(pure=False)


@contextmanager
def _of_factory(runtime: Simulation) -> Iterator[Executor]:
    """The executor that the factory of the recipe makes: ``package.module:factory``."""
    name, factory = runtime.experiment.executor, runtime.executor_factory()
    fail = partial(runtime.experiment.document.error, EXECUTOR)
    try:
        executor = factory()
    except Exception as error:  # somebody else's
        raise fail(f"'{name}' has made no executor ({error_text(error)}).") from error
    if not isinstance(executor, Executor):
        raise fail(f"'{name}' returned {one_line(executor)}; expected a concurrent.futures.Executor.")
    with _released(executor):
        yield executor


@contextmanager
def _released(executor: Executor) -> Iterator[Executor]:
    try:
        yield executor
    finally:  # a stopped run does not wait for the clients under way
        executor.shutdown(wait=False, cancel_futures=True)
