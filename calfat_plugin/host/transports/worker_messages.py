"""What workers and their server say to each other beside the host's messages: hello, progress, times, errors, end."""

from __future__ import annotations

import json
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable

import torch
from fedml.core.distributed.communication.message import Message

from calfat_plugin.errors import CalfatError, HostError
from calfat_plugin.host.transports.messages import MODEL
from calfat_plugin.observer import BatchProgress, RunObserver
from calfat_plugin.profiling import SpanRows

FINISH = 7  # as in the host's cross-silo messages; its MPI simulator has none
HELLO = 1002  # a worker is ready
PROGRESS = 1003  # where a client is inside its training
TROUBLE = 1004  # a worker ends, and why
SPENT = 1005  # where the time of a client's training went
ASIDE = (PROGRESS, SPENT)  # a worker that sends one is not done yet

_INTERVAL = 0.2  # seconds between two messages about progress
_USER, _BUG = "user", "bug"


class WorkerError(RuntimeError):
    """A bug showed in a worker; the traceback from there is this error's cause."""


class _RemoteError(Exception):
    """A traceback of another process, as text."""


class ProgressSender(RunObserver):
    """Sends a client's progress, some times a second at most, and its last batch.

    Args:
        rank: of this worker.
        send: takes a message.
    """

    def __init__(self, rank: int, send: Callable[[Message], None]) -> None:
        self._rank, self._send = rank, send
        self._next = 0.0

    def client_progress(self, progress: BatchProgress) -> None:
        now = time.monotonic()
        if now < self._next and progress.batch < progress.num_batches:
            return
        self._next = now + _INTERVAL
        message = Message(PROGRESS, self._rank, 0)
        message.add_params("client_idx", str(progress.client))
        message.add_params("batch", progress.batch)
        message.add_params("num_batches", progress.num_batches)
        message.add_params("loss", progress.loss)
        self._send(message)


def progress_in(message: Message) -> BatchProgress:
    """What a :class:`ProgressSender` sent."""
    client, loss = int(message.get("client_idx")), message.get("loss")
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
    message = _with_text(Message(TROUBLE, rank, 0), text)
    message.add_params("notice", _USER if is_users else _BUG)
    return message


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
