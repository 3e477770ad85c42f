"""The queue of a round's clients over the workers there are, in the shape that the host's MPI simulator knows.

The host wants a process for each client of a round, and numbers them. Here these numbers are places in a queue:
whichever worker is free takes the next client, and its answer goes to the host under the place's number. What is
waiting when a worker dies, and what it was training, the other workers take over. Workers on the server's machine are
reached over a pipe each, which belongs to its two processes and to nobody else, so there is nothing to protect; and
each of the two notices at once when the other has ended, however it did.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from calfat_plugin.errors import CalfatError, HostError
from calfat_plugin.host.arguments import WorkerProcess
from calfat_plugin.host.transports.base import (
    FAILED,
    Loop,
    Outgoing,
    Transport,
    UnreachableError,
    decode,
    encode,
    read_envelope,
)
from calfat_plugin.host.transports.message import MODEL, RECEIVER, SENDER, Message
from calfat_plugin.observer import BatchProgress, RunObserver
from calfat_plugin.profiling import SpanRows

log = logging.getLogger(__name__)

FINISH = 7  # as in the host's cross-silo messages; its MPI simulator has none
HELLO = 1002  # a worker is ready
PROGRESS = 1003  # where a client is inside its training
TROUBLE = 1004  # a worker ends, and why
SPENT = 1005  # where the time of a client's training went
ASIDE = (PROGRESS, SPENT)  # a worker that sends one is not done yet

CLIENT = "client_idx"  # the host's field for the client that a message is about
_INTERVAL = 0.2  # seconds between two messages about progress
_USER, _BUG = "user", "bug"


class WorkerError(RuntimeError):
    """A bug showed in a worker; the traceback from there is this error's cause."""


class _RemoteError(Exception):
    """A traceback of another process, as text."""


class ProgressSender(RunObserver):
    """Sends a client's progress, some times a second at most, and its last batch."""

    def __init__(self, rank: int, send: Callable[[Message], None]) -> None:
        self._rank, self._send = rank, send
        self._next = 0.0

    def client_progress(self, progress: BatchProgress) -> None:
        now = time.monotonic()
        if now < self._next and progress.batch < progress.num_batches:
            return
        self._next = now + _INTERVAL
        at = {"batch": progress.batch, "num_batches": progress.num_batches, "loss": progress.loss}
        self._send(Message(PROGRESS, self._rank, 0, **{CLIENT: str(progress.client)}, **at))


def progress_in(message: Message) -> BatchProgress:
    """What a :class:`ProgressSender` sent."""
    client, loss = _client(message), message.get("loss")
    return BatchProgress(client, message.get("batch"), message.get("num_batches"), loss)


def spent(rank: int, spans: SpanRows) -> Message:
    """A message about where the time of a client's training went."""
    return _with_text(Message(SPENT, rank, 0), json.dumps([rank, spans]))


def spent_in(message: Message) -> tuple[int, SpanRows]:
    """(worker, spans) of a :func:`spent`; the message itself is passed on under another sender."""
    worker, spans = json.loads(_text_of(message))
    return worker, spans


def _with_text(message: Message, text: str) -> Message:
    """The message with a text of any length, which no field may have."""
    message.add_params(MODEL, OrderedDict(text=torch.tensor(list(text.encode()), dtype=torch.uint8)))
    return message


def _text_of(message: Message) -> str:
    return bytes(message.get(MODEL)["text"].tolist()).decode(errors="replace")


def trouble(rank: int, error: Exception) -> Message:
    """A message about an error that ends this worker: the text for the user's, the whole traceback for ours."""
    is_users = isinstance(error, CalfatError)
    text = str(error) if is_users else "".join(traceback.format_exception(error))
    return _with_text(Message(TROUBLE, rank, 0, notice=_USER if is_users else _BUG), text)


def error_in(message: Message, where: str) -> Exception:
    """The error that a :func:`trouble` is about, to be raised at the server.

    Args:
        message: as received.
        where: what the worker did, such as ``" in round 1 while it trained client 2"``.
    """
    text = _text_of(message)
    if message.get("notice") == _USER:
        return HostError(text)
    error = WorkerError(f"worker {message.get_sender_id()} failed{where}: {text.strip().splitlines()[-1]}")
    error.__cause__ = _RemoteError(f"\n{text}")
    return error


# --- the queue of clients ---------------------------------------------------------------------------------------------


class Workers(ABC):
    """The processes that train, as the server reaches them; numbered from 1."""

    @property
    @abstractmethod
    def numbers(self) -> range:
        """All of them."""

    @abstractmethod
    def send(self, worker: int, data: bytes) -> None:
        """Send a message; to a worker that has ended, nothing."""

    @abstractmethod
    def listen(self) -> Iterator[tuple[int, bytes | str]]:
        """(worker, what it sent) for every message, and (worker, how it ended) for every end, until :meth:`close`."""

    @abstractmethod
    def close(self) -> None:
        """End :meth:`listen`, at the latest with the last worker."""


class Pool(Loop):
    """The server's transport: hands the clients of a round out, longest first.

    Workers are served by a thread of its own, so they go on while the manager's loop evaluates.
    """

    def __init__(self, workers: Workers, num_examples: Mapping[int, int], warn: Callable[[str], None]) -> None:
        super().__init__(0)
        self._workers, self._num_examples, self._warn = workers, num_examples, warn
        self._lock = threading.Lock()
        self._round: list[Message] = []  # of the round that is being sent
        self._waiting: list[Message] = []
        self._idle: list[int] = []
        self._training: dict[int, Message] = {}
        self._left = set(workers.numbers)
        self._deaths: list[str] = []
        self._error: Exception | None = None
        self._listener = threading.Thread(target=self._serve, name="workers", daemon=True)
        self._listener.start()

    # --- what the manager calls ---

    def send_message(self, message: Message) -> None:
        """Keep a client's message until :meth:`begin_round`."""
        self._round.append(message)

    def begin_round(self) -> None:
        """Hand out all that was sent, longest first: else a long client that begins last keeps the others waiting."""
        with self._lock:
            self._waiting = sorted(self._round, key=lambda task: -self._num_examples[_client(task)])
            self._round = []
            self._hand_out()

    def stop_receive_message(self) -> None:
        """End the loop, and let all workers end; safe to call twice."""
        with self._lock:
            super().stop_receive_message()
            for worker in sorted(self._left):
                self._workers.send(worker, encode(Message(FINISH, 0, worker)))
            self._left.clear()
            self._workers.close()

    # --- the workers' side, in the thread ---

    def _serve(self) -> None:
        try:
            for worker, what in self._workers.listen():
                if isinstance(what, str):
                    self._on_worker_exit(worker, what)
                else:
                    self._let_in(worker, what)
        except Exception as error:  # our bug, or a terminal that takes no warning; the manager waits for us
            self._fail(error)

    def _let_in(self, worker: int, data: bytes) -> None:
        message = decode(data, read_envelope(data))
        if message.get_type() == TROUBLE:
            self._fail(error_in(message, self._work_of(worker)))
            return
        task = self._training.get(worker)
        if message.get_type() not in ASIDE:
            with self._lock:
                self._training.pop(worker, None)
                self._idle.append(worker)
                self._hand_out()
        if task is not None:
            message.add_params(SENDER, task.get_receiver_id())
            self.inbox.put(message)

    def _on_worker_exit(self, worker: int, how: str) -> None:
        """A worker has ended: another trains its client."""
        with self._lock:
            if self.stopped or self._error is not None:
                return
            death = f"worker {worker} {how}{self._work_of(worker)}"
            log.warning("%s", death)
            self._deaths.append(death)
            self._left.remove(worker)
            self._idle = [other for other in self._idle if other != worker]
            if (lost := self._training.pop(worker, None)) is not None:
                self._waiting.insert(0, lost)
            self._hand_out()
            left = len(self._left)
        if left:
            self._warn(f"{death}. The run continues with {left} worker{'s' if left > 1 else ''}, and the same result.")
        else:
            self._fail(
                HostError(
                    f"no worker is left: {'; '.join(self._deaths)}. Where the system has killed them, memory may have "
                    "run out: use fewer workers, or a smaller train_args.batch_size."
                )
            )

    def _work_of(self, worker: int) -> str:
        task = self._training.get(worker)
        return "" if task is None else f" in round {task.get('round')} while it trained client {_client(task)}"

    def _hand_out(self) -> None:
        """Give idle workers what waits; the lock is held."""
        while self._idle and self._waiting:
            worker, task = self._idle.pop(0), self._waiting.pop(0)
            self._training[worker] = task
            addressed = Message()
            addressed.get_params().update({**task.get_params(), RECEIVER: worker})
            self._workers.send(worker, encode(addressed))

    # --- errors ---

    def _fail(self, error: Exception) -> None:
        """Raise the first error in the manager's loop."""
        self._error = self._error or error
        self.inbox.put(self.local_message(FAILED))

    def _notify(self, message: Message) -> None:
        if self._error is not None:
            raise self._error
        super()._notify(message)


def _client(message: Message) -> int:
    return int(message.get(CLIENT))


_SERVER = frozenset({0})


class PipeWorkers(Workers):
    """The server's ends."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self._workers = dict(enumerate(workers, start=1))

    @property
    def numbers(self) -> range:
        return range(1, len(self._workers) + 1)

    def send(self, worker: int, data: bytes) -> None:
        with suppress(OSError):  # it has ended, which listen() reports
            self._workers[worker].pipe.send_bytes(data)

    def listen(self) -> Iterator[tuple[int, bytes | str]]:
        left = dict(self._workers)
        while left:
            ready = wait([worker.pipe for worker in left.values()])
            for number in [number for number, worker in left.items() if worker.pipe in ready]:
                try:
                    yield number, left[number].pipe.recv_bytes()
                except (EOFError, OSError):
                    yield number, _how_it_ended(left.pop(number).process)

    def close(self) -> None:
        """Nothing: the workers end, and with them their pipes."""


class PipeTransport(Transport):
    """A worker's end."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        super().__init__(rank, rank + 1)
        self._pipe = pipe
        threading.Thread(target=self._receive_all, name="pipe", daemon=True).start()

    def deliver(self, peer: int, outgoing: Outgoing) -> None:
        try:
            self._pipe.send_bytes(outgoing.data)
        except OSError as error:
            raise UnreachableError(str(error)) from None

    def _receive_all(self) -> None:
        try:
            while True:
                self.receive(self._pipe.recv_bytes(), "the server", _SERVER)
        except (EOFError, OSError):
            os._exit(1)  # the server is gone: nobody waits for what is being trained


def _how_it_ended(process: BaseProcess) -> str:
    process.join()
    code = process.exitcode or 0
    if code >= 0:
        return f"(process {process.pid}) ended with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    return f"(process {process.pid}) was killed by signal {-code} ({name})"
