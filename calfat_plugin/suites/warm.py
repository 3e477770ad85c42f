"""Runs of a suite as forks of a process that has imported what a run needs, so that they start at once.

It is Python's ``forkserver``, as for the workers of a run. It computes nothing, starts no thread and touches no GPU, so
a fork of it is as good as a fresh process; where it was killed, Python starts another.
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
from typing import TextIO

from calfat_plugin.errors import RunError
from calfat_plugin.runs.workers import FOR_US, prepare, without_program

SECONDS_TO_DIE = 10  # on a busy machine a killed process lives on for a moment
UNKNOWN = 255  # Python's, instead of an exit code: the process that runs are forked from was killed


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
    threading.Thread(target=_stop_without_suite, daemon=True).start()
    try:
        import_module(program).main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not


def _stop_without_suite() -> None:
    """Stop as after Ctrl-C when the suite is gone: finished rounds are kept."""
    suite = multiprocessing.parent_process()
    if suite is not None:
        suite.join()
    os.kill(os.getpid(), signal.SIGTERM)
