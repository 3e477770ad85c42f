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

from calfat_plugin.endings import ending, likely_cause
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
_TO_END, _POLL = 5.0, 0.02  # seconds in which the processes of a broken executor end, and between two looks
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


class _Last(RunObserver):
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
            worker, observer = started(start), _Last()
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
        self._name, self._open, self._start = name, open, pickle.dumps(start)
        self._observer, self._warn = observer, warn
        self._stack = ExitStack()
        self._round = self._deaths = 0
        self._downlink = b""
        self._tasks: dict[int, bytes] = {}  # client to what it keeps, in the order in which they are to begin
        self._futures: dict[int, Future[Trained | Failed]] = {}
        self._trained: dict[int, Trained] = {}
        self._processes: list[BaseProcess] = []  # of the executor, where it has processes of this machine

    def __enter__(self) -> Workers:
        self._executor = self._stack.enter_context(self._open())
        return self

    def __exit__(self, *problem: object) -> None:
        self._stack.close()

    def submit(
        self, round: int, clients: Sequence[int], downlink: Mapping[str, Tensor], states: Mapping[int, State]
    ) -> None:
        """Begin a round; clients begin in the order given, each with the server's message and what it keeps."""
        from calfat_plugin.host.transports.message import bytes_of

        self._round, self._downlink = round, bytes_of(downlink)
        self._tasks = {client: bytes_of(states.get(client, {})) for client in clients}
        self._submit()

    def result(self, client: int) -> tuple[Wire, State]:
        """Wait for a client of the round: its message and what it keeps."""
        from calfat_plugin.host.transports.message import tensors_in

        while client not in self._trained:
            self._wait()
        wire, state, _ = self._trained.pop(client)
        return Wire(tensors_in(wire)), tensors_in(state)

    def _submit(self) -> None:
        try:
            for client, state in self._tasks.items():
                task = (self._start, this_process(), client, self._round, self._downlink, state)
                self._futures[client] = self._executor.submit(train_client, *task)
            if isinstance(self._executor, ProcessPoolExecutor):  # once it is broken, it no longer has them
                self._processes = list((self._executor._processes or {}).values())
        except BrokenExecutor:
            self._begin_anew()

    def _wait(self) -> None:
        """Wait until one client more is trained."""
        done = wait(self._futures.values(), return_when=FIRST_COMPLETED).done
        broken = False
        for client in [client for client, future in self._futures.items() if future in done]:
            where = f"round {self._round}: client {client}"
            try:
                outcome = self._futures.pop(client).result()
            except BrokenExecutor:
                broken = True
                continue
            except Exception as error:  # of whatever executor
                raise HostError(
                    f"{where} was not trained: calfat.runtime.executor {self._name}: {error_text(error)}."
                ) from error
            if isinstance(outcome, Failed) and outcome.is_users:
                raise HostError(outcome.text)
            if isinstance(outcome, Failed):
                raise WorkerError(f"{where}: {outcome.text.strip().splitlines()[-1]}") from _RemoteError(
                    f"\n{outcome.text}"
                )
            if outcome.last is not None:
                self._observer.client_progress(outcome.last)
            self._trained[client] = outcome
            del self._tasks[client]
            self._deaths = 0
        if broken:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """A worker has died, and its executor with it: another one trains the clients that are left of the round."""
        self._deaths += 1
        left = f"client{'s' * (len(self._tasks) > 1)} {', '.join(map(str, sorted(self._tasks)))}"
        self._stack.close()
        code = _code_of_death(self._processes)
        of = "" if code is None else f" of {ending(code)}"
        if self._deaths == _DEATHS:
            raise HostError(
                f"round {self._round}: {_DEATHS} times in a row a worker has died{of} before one client more was "
                f"trained; {left} waited. {_what_to_do(code)}"
            )
        self._warn(f"round {self._round}: a worker has died{of}. New ones train {left}, with the same result.")
        self._futures.clear()
        self._executor = self._stack.enter_context(self._open())
        self._submit()


def _code_of_death(processes: Sequence[BaseProcess]) -> int | None:
    """The exit code of the worker that died first; None where it is not known.

    When one dies, Python's executor ends the others by SIGTERM, and those that have lost their leader exit with 1.
    """
    until = time.monotonic() + _TO_END
    for process in processes:
        while process.exitcode is None and time.monotonic() < until:
            time.sleep(_POLL)
    codes = [process.exitcode for process in processes if process.exitcode is not None]
    own = [code for code in codes if code not in (0, LOST_LEADER, -signal.SIGTERM)]
    if own:
        return own[0]
    return -signal.SIGTERM if -signal.SIGTERM in codes else None


def _what_to_do(code: int | None) -> str:
    fewer = "use fewer workers, or a smaller train_args.batch_size."
    if code is None:
        return f"Where the system kills them, memory may have run out: {fewer}"
    cause = likely_cause(code)
    if -code == signal.SIGKILL:
        return f"{cause} If so, {fewer}"
    return cause or "Nobody of ours ends them so; the log of the run may say more."
