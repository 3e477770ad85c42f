"""What all our backends share: the loop of a party, for each peer a queue that retries, and a check of what arrives.

The host's own backends die with their lock held on one bad message, and let a send to a dead peer end the run. Here bad
messages never reach the party's loop, and sending never blocks it.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from calfat_plugin.host.transports.message import READY, Message, RefusedError, decode, encode, read_envelope
from calfat_plugin.peer_text import peer_text

log = logging.getLogger(__name__)

T = TypeVar("T", bound="Transport")

ALARM = 1000  # message types of our own, delivered within a process and never sent
FAILED = 1001

_WINDOW = 60.0  # seconds
_PER_ADDRESS = 40  # lines of the log a window: one that floods the log must not hide what the others did
_IN_ALL = 200
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_SERVER = 0


class PostponedError(RefusedError):
    """A message that is not let in now; the sender should try again."""


class AnothersError(RefusedError):
    """A message for another process of this rank. Where both hear it, that one has the last word."""


class UnreachableError(Exception):
    """A peer could not be reached this time; another try may succeed."""


class Inbox:
    """Messages that wait for the loop. A newer message of the same sender and type replaces the one that waits.

    So the inbox is never larger than the federation, whatever arrives, and a client that was busy finds the newest
    model, not all that it missed.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[tuple[int, int], Message] = OrderedDict()
        self._changed = threading.Condition()

    def put(self, message: Message) -> None:
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


class RefusalLog:
    """Logs refused messages, a limited number a minute; those left out are counted. Callable from any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._begun = now, now()
        self._lines: Counter[str] = Counter()
        self._left_out = 0
        self._lock = threading.Lock()

    def add(self, sender: str, reason: object) -> None:
        """Log one, or count it; ``sender`` is a network address (``host:port``), a name or a rank."""
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
        with self._lock:
            self._begin_window()

    def _begin_window(self) -> None:
        if self._left_out:
            seconds = self._now() - self._begun
            log.warning("%d more messages were refused within %.0f s, and are not listed", self._left_out, seconds)
        self._lines.clear()
        self._left_out, self._begun = 0, self._now()


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
        self.cancelled.set()
        self.on_cancel()


class SendQueue(threading.Thread):
    """Sends messages to one peer, in order, and retries with growing pauses.

    ``deliver`` is one try: it raises ``UnreachableError`` to be called again, ``RefusedError`` when that is pointless.
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


class Transport(ABC):
    """A backend of the host as its managers see it. As a context manager it ends with its block."""

    def __init__(self, rank: int, num_parties: int) -> None:
        self.rank = rank
        self.inbox = Inbox()  # what the loop delivers; filled by receiving threads
        self.wake_at: float | None = None  # when the loop delivers an ALARM next (monotonic); None for never
        self.stopped = self._over = False  # of the backend, for whatever reason; of its loop
        self.patience = 600.0  # seconds for which a message is tried, unless send_message says otherwise
        #: Asked before an arriving message's tensors are read, in a receiving thread; raises RefusedError.
        self.admit: Callable[[Message], None] = lambda envelope: None
        self.refusals = RefusalLog()
        self._observer: Any = None
        peers = range(1, num_parties) if rank == _SERVER else (_SERVER,)
        self._queues = {peer: SendQueue(peer, self.deliver) for peer in peers}
        for queue in self._queues.values():
            queue.start()

    @abstractmethod
    def deliver(self, peer: int, outgoing: Outgoing) -> None:
        """Send a message to a peer and wait for its receipt, until the message's deadline or its ``cancel``."""

    # --- the loop ---

    def add_observer(self, observer: Any) -> None:
        self._observer = observer

    def handle_receive_message(self) -> None:
        """The loop, until :meth:`leave_loop` or :meth:`stop_receive_message`."""
        message: Message | None = Message(READY, self.rank, self.rank)
        while True:
            if message is None:
                self.wake_at, message = None, Message(ALARM, self.rank, self.rank)
            self._observer.receive_message(message.get_type(), message)
            if self._over:
                return
            message = self.inbox.get(self.wake_at)

    def leave_loop(self) -> None:
        """End the loop, from within it. Messages are still sent and let in."""
        self._over = True

    def stop_receive_message(self) -> None:
        """End the loop and all sending; safe to call twice."""
        self.stopped = self._over = True
        for queue in self._queues.values():
            queue.stop()
        self.refusals.close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop_receive_message()

    # --- sending ---

    def send_message(
        self, msg: Message, patience: float | None = None, on_delivered: Callable[[], object] = lambda: None
    ) -> None:
        """Queue a message for its receiver; returns at once. ``on_delivered`` is called in a thread, on receipt."""
        deadline = time.monotonic() + (self.patience if patience is None else patience)
        self._queues[msg.get_receiver_id()].send(Outgoing(encode(msg), msg.get_type(), deadline, on_delivered))

    def send_now(self, msg: Message, timeout: float) -> None:
        self.deliver(msg.get_receiver_id(), Outgoing(encode(msg), msg.get_type(), time.monotonic() + timeout))

    def flush(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        for queue in self._queues.values():
            queue.flush(until)

    # --- receiving ---

    def receive(self, data: bytes, peer: str, allowed: frozenset[int]) -> None:
        """Check a message and put it into the inbox; called in a receiving thread.

        ``peer`` is the sender's network address, for the log; ``allowed`` are the ranks that it has proved it may
        speak for.
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
