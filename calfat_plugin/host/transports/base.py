"""What all our backends share: messages, for each peer a queue that retries what it sends, and a check of what arrives.

The host pickles its ``Message`` objects, so whoever reaches its port runs code in its process. Here nothing that
arrives is ever executed, and nothing is believed: a message is one safetensors file with typed fields in its header,
the header is checked against the bytes that are there before a single tensor is made, and only fields of the table
below are read. The host's own backends die with their lock held on one bad message, and let a send to a dead peer end
the run. Here bad messages never reach the party's loop, and sending never blocks it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from calfat_plugin.host.transports.message import MODEL, READY, RECEIVER, SENDER, TYPE, Message
from calfat_plugin.peer_text import peer_text

log = logging.getLogger(__name__)

#: Names of the fields that a message may have, and their types. The first block is the host's, the second ours.
FIELDS: Mapping[str, type] = {
    "msg_type": int,
    "sender": int,
    "receiver": int,
    "num_samples": int,
    "client_idx": str,
    "client_status": str,
    "client_os": str,
    "round": int,  # 1-based round that a model or an update belongs to
    "used": int,  # last round in which the receiver's update was used; 0: none yet
    "ticket": str,  # given out with the model of a round; the update has to show it
    "session": str,  # chosen by a client when it starts; the server's messages have to show it
    "notice": str,  # of the server, for the user of a client
    "recipe": str,  # fingerprint of what the sender runs
}
_REQUIRED = (TYPE, SENDER, RECEIVER)
_MAX_HEADER = 16_000_000
_MAX_TEXT = 200
_MAX_NAME = 1000  # of a tensor, which joins the names of the modules around it
_KEY = "calfat"
_LENGTH = 8  # safetensors: the header's length, little endian


class RefusedError(Exception):
    """A message that is not let in. The text says why, for the log and for the sender."""


class PostponedError(RefusedError):
    """A message that is not let in now; the sender should try again."""


class AnothersError(RefusedError):
    """A message for another process of this rank. Where both hear it, that one has the last word."""


def encode(message: Message) -> bytes:
    """Write a message; ``read_envelope`` and ``decode`` are the inverse."""
    params = dict(message.get_params())
    tensors: Mapping[str, Tensor] = params.pop(MODEL, None) or {}
    for name, value in params.items():
        if type(value) is not FIELDS.get(name):
            raise TypeError(f"message field '{name}' = {value!r} cannot be sent")
    return bytes_of(tensors, {_KEY: json.dumps(params)})


def bytes_of(tensors: Mapping[str, Tensor], fields: dict[str, str] | None = None) -> bytes:
    """A safetensors file of these tensors, wherever they are; :func:`tensors_in` is the inverse."""
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return safetensors.torch.save(copies, fields)


def read_envelope(data: bytes) -> Message:
    """Check the structure of what arrived, and read its fields: a message without tensors, none of which is made."""
    metadata = _checked_metadata(data)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_KEY), str):
        raise RefusedError("not a message of calfat_plugin (its header has no fields)")
    fields = _json(metadata[_KEY], "its fields")
    for name, value in fields.items():
        if name not in FIELDS:
            raise RefusedError(f"unknown field {name[:_MAX_TEXT]!r}")
        if type(value) is not FIELDS[name]:
            raise RefusedError(f"field '{name}' is of type {type(value).__name__}, expected {FIELDS[name].__name__}")
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            raise RefusedError(f"field '{name}' is {len(value)} characters long")
        if isinstance(value, str) and not (value.isascii() and value.isprintable()):
            raise RefusedError(f"field '{name}' holds other signs than printable ASCII")
    for name in _REQUIRED:
        if name not in fields:
            raise RefusedError(f"field '{name}' is missing")
    return Message(fields.pop(TYPE), fields.pop(SENDER), fields.pop(RECEIVER), **fields)


def decode(data: bytes, envelope: Message) -> Message:
    """Add the tensors to what :func:`read_envelope` has read of the same bytes."""
    envelope.add_params(MODEL, _tensors(data))
    return envelope


def tensors_in(data: bytes) -> OrderedDict[str, Tensor]:
    """The tensors of a safetensors file that somebody else wrote, sorted by name: the reader's order is by chance."""
    _checked_metadata(data)
    return _tensors(data)


def _tensors(data: bytes) -> OrderedDict[str, Tensor]:
    try:
        return OrderedDict(sorted(safetensors.torch.load(data).items()))
    except (SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise RefusedError(f"its tensors cannot be read ({error})") from None


def _checked_metadata(data: bytes) -> Any:
    """The header's metadata. One that claims more bytes than there are is refused, before anyone believes it."""
    length = int.from_bytes(data[:_LENGTH], "little")
    if len(data) < _LENGTH or length > _MAX_HEADER or length > len(data) - _LENGTH:
        raise RefusedError(f"{len(data)} bytes that claim a header of {length}")
    header = _json(data[_LENGTH : _LENGTH + length], "its header")
    metadata = header.pop("__metadata__", None)
    for name, entry in header.items():
        if len(name) > _MAX_NAME:
            raise RefusedError(f"a tensor's name is {len(name)} characters long")
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(end) is int for end in offsets)):
            raise RefusedError(f"tensor {name[:_MAX_TEXT]!r} is not described")
        if not 0 <= offsets[0] <= offsets[1] <= len(data):
            raise RefusedError(f"tensor {name[:_MAX_TEXT]!r} claims bytes {offsets[0]} to {offsets[1]} of {len(data)}")
    return metadata


def _json(text: bytes | str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise RefusedError(f"{what} cannot be read") from None
    if not isinstance(value, dict):
        raise RefusedError(f"{what} cannot be read")
    return value


T = TypeVar("T", bound="Loop")

ALARM = 1000  # message types of our own, delivered within a process and never sent
FAILED = 1001


# --- the loop ---------------------------------------------------------------------------------------------------------


class Inbox:
    """Messages that wait for the loop. A newer message of the same sender and type replaces the one that waits.

    So the inbox is never larger than the federation, whatever arrives, and a client that was busy finds the newest
    model, not all that it missed.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[tuple[int, int], Message] = OrderedDict()
        self._changed = threading.Condition()

    def put(self, message: Message) -> None:
        """Add a message; callable from any thread."""
        with self._changed:
            self._waiting[message.get_sender_id(), message.get_type()] = message
            self._changed.notify()

    def get(self, until: float | None) -> Message | None:
        """The oldest message; None when there is none before the monotonic time ``until``."""
        with self._changed:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not self._changed.wait_for(lambda: self._waiting, left):
                return None
            return self._waiting.popitem(last=False)[1]

    def holds(self, types: frozenset[int]) -> bool:
        """Whether a message of one of these types waits."""
        with self._changed:
            return any(type_ in types for _, type_ in self._waiting)


class Loop:
    """A backend of the host as its managers see it, except for sending. As a context manager it ends with its block.

    Attributes:
        inbox: what the loop delivers; filled by receiving threads.
        wake_at: when the loop delivers an ``ALARM`` next (monotonic); None for never.
        stopped: whether the backend has ended, for whatever reason.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.wake_at: float | None = None
        self.inbox = Inbox()
        self._observer: Any = None
        self.stopped = self._over = False

    def handle_receive_message(self) -> None:
        """The loop, until :meth:`leave_loop` or :meth:`stop_receive_message`."""
        self._notify(self.local_message(READY))
        while not self._over:
            message = self.inbox.get(self.wake_at)
            if message is None:
                self.wake_at, message = None, self.local_message(ALARM)
            self._notify(message)

    def local_message(self, type: int, **fields: Any) -> Message:
        """A message of this process to itself."""
        return Message(type, self.rank, self.rank, **fields)

    def leave_loop(self) -> None:
        """End the loop, from within it. Messages are still sent and let in."""
        self._over = True

    def stop_receive_message(self) -> None:
        """End the loop, and with it the backend; safe to call twice."""
        self.stopped = self._over = True

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop_receive_message()

    def add_observer(self, observer: Any) -> None:
        """Deliver to this manager of the host."""
        self._observer = observer

    def _notify(self, message: Message) -> None:
        self._observer.receive_message(message.get_type(), message)


# --- the log of refusals ----------------------------------------------------------------------------------------------


_WINDOW = 60.0  # seconds
_PER_ADDRESS = 40  # lines a window: one that floods the log must not hide what the others did
_IN_ALL = 200


class RefusalLog:
    """Logs refused messages, a limited number a minute; those left out are counted. Callable from any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._begun = now, now()
        self._lines: Counter[str] = Counter()
        self._left_out = 0
        self._lock = threading.Lock()

    def add(self, sender: str, reason: object) -> None:
        """Log one, or count it.

        Args:
            sender: network address (``host:port``), name or rank.
        """
        address = sender.rpartition(":")[0] or sender
        with self._lock:
            if self._now() - self._begun >= _WINDOW:
                self._begin_window()
            if self._lines[address] >= _PER_ADDRESS or self._lines.total() >= _IN_ALL:
                self._left_out += 1
                return
            self._lines[address] += 1
        log.warning("message from %s refused: %s", peer_text(sender), peer_text(reason))

    def close(self) -> None:
        """Log the last count."""
        with self._lock:
            self._begin_window()

    def _begin_window(self) -> None:
        if self._left_out:
            seconds = self._now() - self._begun
            log.warning("%d more messages were refused within %.0f s, and are not listed", self._left_out, seconds)
        self._lines.clear()
        self._left_out, self._begun = 0, self._now()


# --- transports -------------------------------------------------------------------------------------------------------

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_SERVER = 0


class UnreachableError(Exception):
    """A peer could not be reached this time; another try may succeed."""


@dataclass
class Outgoing:
    """An encoded message to send: retried until ``deadline`` (monotonic), or until one of its kind replaces it."""

    data: bytes
    kind: int
    deadline: float
    on_delivered: Callable[[], object] = lambda: None
    cancelled: threading.Event = field(default_factory=threading.Event)
    on_cancel: Callable[[], object] = lambda: None

    def cancel(self) -> None:
        """Give it up, even while it is being delivered."""
        self.cancelled.set()
        self.on_cancel()


class SendQueue(threading.Thread):
    """Sends messages to one peer, in order, and retries with growing pauses.

    Args:
        peer: rank of the receiver.
        deliver: one try; raises ``UnreachableError`` to be called again and ``RefusedError`` when that is pointless.
    """

    def __init__(self, peer: int, deliver: Callable[[int, Outgoing], None]) -> None:
        super().__init__(name=f"send-{peer}", daemon=True)
        self._peer, self._deliver = peer, deliver
        self._waiting: list[Outgoing] = []  # the first is being delivered
        self._changed = threading.Condition()
        self._stopped = False

    def send(self, outgoing: Outgoing) -> None:
        """Queue a message; older ones of the same kind are given up."""
        with self._changed:
            for older in self._waiting:
                if older.kind == outgoing.kind:
                    older.cancel()
            self._waiting = [*(older for older in self._waiting if older.kind != outgoing.kind), outgoing]
            self._changed.notify_all()

    def flush(self, until: float) -> None:
        """Wait until everything is sent, at most until the monotonic time ``until``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, max(0.0, until - time.monotonic()))

    def stop(self) -> None:
        """Give up what is not sent yet, and end."""
        with self._changed:
            self._stopped = True
            for outgoing in self._waiting:
                outgoing.cancel()
            self._changed.notify_all()

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                outgoing = self._waiting[0]
            self._retry(outgoing)
            with self._changed:
                if self._waiting and self._waiting[0] is outgoing:  # not replaced by a newer one
                    del self._waiting[0]
                self._changed.notify_all()

    def _retry(self, outgoing: Outgoing) -> None:
        pause, reason = _FIRST_PAUSE, ""
        while time.monotonic() < outgoing.deadline and not outgoing.cancelled.is_set():
            try:
                self._deliver(self._peer, outgoing)
                outgoing.on_delivered()
                return
            except UnreachableError as error:
                if str(error) != reason:
                    reason = str(error)
                    log.warning("rank %d cannot be reached, trying again: %s", self._peer, reason)
            except RefusedError as error:
                log.error("rank %d refused a message: %s", self._peer, error)
                return
            outgoing.cancelled.wait(min(pause, max(0.0, outgoing.deadline - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE)
        if not outgoing.cancelled.is_set():
            log.warning("a message to rank %d was given up: %s", self._peer, reason or "its deadline has passed")


class Transport(Loop, ABC):
    """A communication backend of the host, without the host's loop.

    Attributes:
        admit: asked before an arriving message's tensors are read; raises ``RefusedError``. Runs in a receiving thread.
        refusals: the log of refused messages.
        patience: how long a message is tried, in seconds, unless :meth:`send_message` says otherwise.
    """

    def __init__(self, rank: int, num_parties: int) -> None:
        super().__init__(rank)
        self.num_parties = num_parties
        self.admit: Callable[[Message], None] = lambda envelope: None
        self.patience = 600.0
        self.refusals = RefusalLog()
        peers = range(1, num_parties) if rank == _SERVER else (_SERVER,)
        self._queues = {peer: SendQueue(peer, self.deliver) for peer in peers}
        for queue in self._queues.values():
            queue.start()

    # --- what a backend provides ---

    @abstractmethod
    def deliver(self, peer: int, outgoing: Outgoing) -> None:
        """Send a message to a peer and wait for its receipt, until the message's deadline or its ``cancel``."""

    # --- sending ---

    def send_message(
        self, msg: Message, patience: float | None = None, on_delivered: Callable[[], object] = lambda: None
    ) -> None:
        """Queue a message for its receiver; returns at once. ``on_delivered`` is called in a thread, on receipt."""
        deadline = time.monotonic() + (self.patience if patience is None else patience)
        self._queues[msg.get_receiver_id()].send(Outgoing(encode(msg), msg.get_type(), deadline, on_delivered))

    def send_now(self, msg: Message, timeout: float) -> None:
        """One try, waiting for the receipt."""
        self.deliver(msg.get_receiver_id(), Outgoing(encode(msg), msg.get_type(), time.monotonic() + timeout))

    def flush(self, timeout: float) -> None:
        """Wait until everything is sent, at most ``timeout`` seconds in all."""
        until = time.monotonic() + timeout
        for queue in self._queues.values():
            queue.flush(until)

    # --- receiving ---

    def receive(self, data: bytes, peer: str, allowed: frozenset[int]) -> None:
        """Check a message and put it into the inbox; called in a receiving thread.

        Args:
            data: what arrived.
            peer: the sender's network address, for the log.
            allowed: ranks that the sender has proved it may speak for.
        """
        try:
            envelope = read_envelope(data)
            sender, receiver = envelope.get_sender_id(), envelope.get_receiver_id()
            if receiver != self.rank:
                raise RefusedError(f"it is for rank {receiver}, this is rank {self.rank}")
            if sender not in self._queues or sender not in allowed:
                raise RefusedError(f"it claims to come from rank {sender}")
            self.admit(envelope)
            self.inbox.put(decode(data, envelope))
        except RefusedError as refused:
            self.refusals.add(peer, refused)
            raise

    def stop_receive_message(self) -> None:
        """End the loop and all sending; safe to call twice."""
        super().stop_receive_message()
        for queue in self._queues.values():
            queue.stop()
        self.refusals.close()
