"""The clients of a simulation's rounds, trained side by side by the workers of any ``concurrent.futures.Executor``.

A task is one client of one round, with all it needs: the server's message and what the client keeps go out with it, and
come back with its update. So it does not matter which worker trains which client, nor whether one does it twice.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from calfat_plugin.compat import ending, likely_cause
from calfat_plugin.errors import CalfatError, HostError
from calfat_plugin.federation.wire import Wire
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.observer import BatchProgress, RunObserver
from calfat_plugin.peer_text import error_text

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch import Tensor

    from calfat_plugin.federation.worker import Worker
    from calfat_plugin.results import State

_DEATHS = 3  # of executors in a row, without a client that was trained between them, end the run
LOST_LEADER = 1  #: exit code of a worker whose leader has gone
_END_SECONDS = 5.0  # in which the processes of a broken executor end
_POLL_SECONDS = 0.02  # between two looks whether they have ended
_PROCESS = uuid.uuid4().hex
_TRAINING = threading.Lock()  # of this process: its one model and its global generators serve one client at a time


class WorkerError(RuntimeError):
    """A bug showed in a worker; the traceback from there is this error's cause."""


class _RemoteError(Exception):
    """A traceback of another process, as text."""


class Trained(NamedTuple):
    """What a worker has made of a client: its message, what it keeps, and its last batch."""

    wire: bytes
    state: bytes
    last: BatchProgress | None


class Failed(NamedTuple):
    """Why a worker could not train a client: the text of a user's error, or a bug's traceback."""

    text: str
    is_users: bool


class _LastProgress(RunObserver):
    """Keeps the last progress of a client, for the leader."""

    progress: BatchProgress | None = None

    def client_progress(self, progress: BatchProgress) -> None:
        self.progress = progress


def this_process() -> tuple[str, int]:
    """Tells processes apart, also those of other machines and those that are forked."""
    return _PROCESS, os.getpid()


@lru_cache(maxsize=1)
def started(start: bytes) -> Worker:
    """This process's worker, made when it is first asked for; ``start`` is a pickled function that makes it."""
    worker: Worker = pickle.loads(start)()
    return worker


def train_client(
    start: bytes, leader: tuple[str, int], client: int, round: int, downlink: bytes, state: bytes
) -> Trained | Failed:
    """Train one client of a round, in any process but the ``leader``: the task of an executor."""
    from calfat_plugin.host.transports.message import bytes_of, tensors_in

    try:
        if leader == this_process():
            raise HostError(
                "calfat.runtime.executor: this one trains in threads of the leading process, whose random generators "
                "serve one thread at a time. Take an executor that has processes of its own."
            )
        with _TRAINING, fresh_torch_state():
            worker = started(start)
            observer = _LastProgress()
            worker.observer = observer
            worker.client_states[client] = tensors_in(state)
            wire = worker.fit(client, round, Wire(tensors_in(downlink)))
            return Trained(bytes_of(wire), bytes_of(worker.client_states.pop(client)), observer.progress)
    except CalfatError as error:
        return Failed(str(error), is_users=True)
    except Exception:  # as text: another process may not be able to read the error itself
        return Failed(traceback.format_exc(), is_users=False)


OpenExecutor: TypeAlias = "Callable[[], AbstractContextManager[Executor]]"


class Workers:
    """Trains the clients of a round ahead of the host, which asks for one after another. Use it as a context manager.

    ``open`` makes an executor, and another one after it broke; ``start``, which is picklable, makes what trains any
    client in a worker's process.
    """

    def __init__(
        self,
        name: str,
        open: OpenExecutor,
        start: Callable[[], Worker],
        observer: RunObserver,
        warn: Callable[[str], None],
    ) -> None:
        self._name = name
        self._open = open
        self._start = pickle.dumps(start)
        self._observer = observer
        self._warn = warn
        self._at_end = ExitStack()  # ends the executor
        self._executor: Executor
        self._processes: list[BaseProcess] = []  # of the executor, where it has processes of this machine
        self._deaths = 0  # of executors, since a client was trained
        self._round = 0
        self._downlink = b""
        self._tasks: dict[int, bytes] = {}  # client to what it keeps, in the order in which they are to begin
        self._futures: dict[int, Future[Trained | Failed]] = {}
        self._trained: dict[int, Trained] = {}

    def __enter__(self) -> Workers:
        self._executor = self._at_end.enter_context(self._open())
        return self

    def __exit__(self, *problem: object) -> None:
        self._at_end.close()

    def submit(
        self, round: int, clients: Sequence[int], downlink: Mapping[str, Tensor], states: Mapping[int, State]
    ) -> None:
        """Begin a round; clients begin in the order given, each with the server's message and what it keeps."""
        from calfat_plugin.host.transports.message import bytes_of

        self._round = round
        self._downlink = bytes_of(downlink)
        self._tasks = {client: bytes_of(states.get(client, {})) for client in clients}
        self._submit_tasks()

    def result(self, client: int) -> tuple[Wire, State]:
        """Wait for a client of the round: its message and what it keeps."""
        from calfat_plugin.host.transports.message import tensors_in

        while client not in self._trained:
            self._wait()
        trained = self._trained.pop(client)
        return Wire(tensors_in(trained.wire)), tensors_in(trained.state)

    def _submit_tasks(self) -> None:
        leader = this_process()
        try:
            for client, state in self._tasks.items():
                self._futures[client] = self._executor.submit(
                    train_client, self._start, leader, client, self._round, self._downlink, state
                )
            if isinstance(self._executor, ProcessPoolExecutor):  # once it is broken, it no longer has them
                self._processes = list((self._executor._processes or {}).values())
        except BrokenExecutor:
            self._begin_anew()

    def _wait(self) -> None:
        """Wait until one client more is trained, or the executor is replaced."""
        done, _ = wait(self._futures.values(), return_when=FIRST_COMPLETED)
        finished = [client for client, future in self._futures.items() if future in done]
        is_broken = False
        for client in finished:
            try:
                outcome = self._futures.pop(client).result()
            except BrokenExecutor:
                is_broken = True
                continue
            except Exception as error:  # of whatever executor
                raise HostError(
                    f"round {self._round}: client {client} was not trained: calfat.runtime.executor {self._name}: "
                    f"{error_text(error)}."
                ) from error
            if isinstance(outcome, Failed):
                if outcome.is_users:
                    raise HostError(outcome.text)
                last_line = outcome.text.strip().splitlines()[-1]
                traceback_there = _RemoteError(f"\n{outcome.text}")
                raise WorkerError(f"round {self._round}: client {client}: {last_line}") from traceback_there
            if outcome.last is not None:
                self._observer.client_progress(outcome.last)
            self._trained[client] = outcome
            del self._tasks[client]
            self._deaths = 0
        if is_broken:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """A worker has died, and its executor with it: another one trains the clients that are left of the round."""
        self._deaths += 1
        self._at_end.close()
        code = _code_of_death(self._processes)
        cause = ""
        if code is not None:
            cause = f" of {ending(code)}"
        numbers = ", ".join(map(str, sorted(self._tasks)))
        left = f"client {numbers}"
        if len(self._tasks) > 1:
            left = f"clients {numbers}"
        if self._deaths == _DEATHS:
            raise HostError(
                f"round {self._round}: {_DEATHS} times in a row a worker has died{cause} before one client more was "
                f"trained; {left} waited. {_advice_after(code)}"
            )
        self._warn(f"round {self._round}: a worker has died{cause}. New ones train {left}, with the same result.")
        self._futures.clear()
        self._executor = self._at_end.enter_context(self._open())
        self._submit_tasks()


def _code_of_death(processes: Sequence[BaseProcess]) -> int | None:
    """The exit code of the worker that died first; None where it is not known.

    When one dies, Python's executor ends the others by SIGTERM, and those that have lost their leader exit with 1.
    """
    until = time.monotonic() + _END_SECONDS
    for process in processes:
        while process.exitcode is None and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
    codes = [process.exitcode for process in processes if process.exitcode is not None]
    for code in codes:
        if code not in (0, LOST_LEADER, -signal.SIGTERM):
            return code
    if -signal.SIGTERM in codes:  # then it is also that of the first
        return -signal.SIGTERM
    return None


def _advice_after(code: int | None) -> str:
    """What a user can do against deaths with this exit code."""
    fewer = "use fewer workers, or a smaller train_args.batch_size."
    if code is None:
        return f"Where the system kills them, memory may have run out: {fewer}"
    cause = likely_cause(code)
    if -code == signal.SIGKILL:
        return f"{cause} If so, {fewer}"
    return cause or "calfat_plugin ends no worker in this way; the log of the run may say more."
