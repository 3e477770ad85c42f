"""Processes of runs: the command of each, its share of the machine, and how it is started.

A run is a fork of a process that has imported what runs need, so it starts at once. That process is Python's
``forkserver``, as for the workers of a run. It computes nothing, starts no thread and touches no GPU, so a fork of it
is as good as a fresh process. Where it was killed, Python starts another.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import TYPE_CHECKING, TextIO

from calfat_plugin.compat import num_cores
from calfat_plugin.errors import RunError
from calfat_plugin.runs.workers import AUTO, FOR_US, asked_workers, prepare, without_program
from calfat_plugin.suites.suite import within

if TYPE_CHECKING:  # a fork imports this module, and needs none of these
    from calfat_plugin.suites.cells import SuiteRun
    from calfat_plugin.suites.plan import SuitePlan

SECONDS_TO_DIE = 10  # on a busy machine a killed process lives on for a moment
UNKNOWN = 255  # Python's, instead of an exit code: the process that runs are forked from was killed


def command(plan: SuitePlan, run: SuiteRun, workers: str | None = None) -> list[str]:
    """The ``calfat run`` of one run, without the interpreter; ``workers`` as its option, or None."""
    words = ["run", plan.suite.base_document.file]
    overrides = [*(setting.override for setting in run.cell.settings), *plan.overrides]
    keys = [override.partition("=")[0].strip() for override in overrides]
    for index, override in enumerate(overrides):
        if not any(within(keys[index], later) for later in keys[index + 1 :]):  # a later one replaces it
            words += ["--set", override]
    for file in run.experiment.plugins.values():
        words += ["--plugin", str(file.path)]
    words += ["--seed", str(run.seed), "--run-dir", str(run.directory)]
    if workers:
        words += ["--workers", workers]
    if run.state != "new":
        words.append("--resume")
    return words


# --- its share of the machine -----------------------------------------------------------------------------------------


def default_jobs(plan: SuitePlan, workers: str | None = None) -> int:
    """One run a core; where runs want a GPU, one a visible GPU when CUDA_VISIBLE_DEVICES lists them, else one.

    With workers, one run for as many cores as it has workers; where they want GPUs, or fill the machine, one.
    """
    if workers == AUTO:
        return 1
    on_gpus = any(cell.experiment is not None and cell.experiment.device.using_gpu for cell in plan.cells)
    if not on_gpus:
        return max(1, cores() // processes(workers))
    if workers:
        return 1
    return max(1, len(_gpus()))


def processes(workers: str | None) -> int:
    """How many processes of a run compute at a time, where it is known before the run starts; else 1."""
    if not workers:
        return 1
    return asked_workers(workers) or 1


def cores() -> int:
    """CPU cores of this process; an OMP_NUM_THREADS that is set says how many it may use."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdecimal() and int(limit) > 0:
        return int(limit)
    return num_cores()


def _gpus() -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [name.strip() for name in listed if name.strip() not in ("", "-1")]


def threads(jobs: int, workers: str | None = None) -> int:
    """The share of the cores that each process has, with so many runs at a time and so many workers each."""
    return max(1, cores() // (jobs * processes(workers)))


def environment(slot: int, jobs: int, workers: str | None = None) -> dict[str, str]:
    """Environment of a run: its share of the cores, and one of the GPUs where several are listed."""
    changed = {"OMP_NUM_THREADS": str(threads(jobs, workers))}
    gpus = _gpus()
    if len(gpus) > 1 and jobs > 1:
        changed["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return {**os.environ, **changed}


# --- starting ---------------------------------------------------------------------------------------------------------


def warm_up(program: str, environment: Mapping[str, str]) -> None:
    """Begin to import the module of a run, with the variables that libraries read as they are loaded."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        prepare([program])
    finally:
        os.environ.clear()
        os.environ.update(before)


def started(program: str, words: Sequence[str], environment: Mapping[str, str]) -> tuple[ForkServerProcess, TextIO]:
    """A process that calls ``main()`` of a module with these arguments, once that is imported; and what it prints.

    How it ended is told once: let one thread alone ask, and wait for it when the output has ended (:data:`UNKNOWN`).
    """
    context = multiprocessing.get_context("forkserver")
    try:
        output, printed = context.Pipe(duplex=False)
        with output, printed:
            arguments = (program, os.getcwd(), printed, list(words), dict(environment))
            process = context.Process(target=_be_the_run, args=arguments)
            _start(process)
            return process, os.fdopen(os.dup(output.fileno()), encoding="utf-8", errors="replace")
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "its server has ended"
        raise RunError(
            f"a run cannot be started ({reason}). Use fewer --jobs, or raise the system's limits of processes and open "
            "files (ulimit -u, ulimit -n)."
        ) from None


def _start(process: ForkServerProcess) -> None:
    """Start it; where the server was killed a moment ago, try until Python has seen that and has started another."""
    give_up = time.monotonic() + SECONDS_TO_DIE
    while True:
        try:
            with without_program():
                process.start()
            return
        except ConnectionRefusedError:  # it listens no more, and the system still counts it among the living
            if time.monotonic() > give_up:
                raise
        time.sleep(0.05)


def _be_the_run(
    program: str, folder: str, printed: Connection, words: Sequence[str], environment: Mapping[str, str]
) -> None:
    os.setsid()  # Ctrl-C in a terminal reaches the suite alone, which stops its runs in order
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_US)
    os.chdir(folder)
    with printed, open(os.devnull) as nothing:
        for source, target in ((nothing, 0), (printed, 1), (printed, 2)):
            os.dup2(source.fileno(), target)
    # New ones: the fork's own still belong to the files that it was started with.
    sys.stdout = os.fdopen(1, "w", 1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", closefd=False)
    os.environ.update(environment)
    sys.argv = ["calfat", *words]

    def stop_without_suite() -> None:  # as after Ctrl-C: finished rounds are kept
        suite = multiprocessing.parent_process()
        if suite is not None:
            suite.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_without_suite, daemon=True).start()
    try:
        import_module(program).main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not
