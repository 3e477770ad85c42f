"""What all our backends share: the queues of a party, its loop, and a check of what arrives.

The host's own backends die with their lock held on one bad message, and let a send to a dead peer end the run. Here bad
messages never reach the party's loop, and sending never blocks it.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
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
_SERVER = 0
_FIRST_PAUSE = 0.1  # seconds between two tries; each pause is twice the last one
_LONGEST_PAUSE = 5.0


class UnreachableError(Exception):
    """A peer could not be reached this time; another try may succeed."""


class PostponedError(RefusedError):
    """A message that is not let in now; the sender should try again."""


class AnothersError(RefusedError):
    """A message for another process of this rank. Where both hear it, that one has the last word."""


# --- messages that wait -----------------------------------------------------------------------------------------------


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
            seconds = None
            if until is not None:
                seconds = max(0.0, until - time.monotonic())
            if not self._changed.wait_for(lambda: self._waiting, seconds):
                return None
            _, message = self._waiting.popitem(last=False)
            return message

    def holds(self, types: frozenset[int]) -> bool:
        """Whether a message of one of these types waits."""
        with self._changed:
            return any(type_ in types for _, type_ in self._waiting)


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
            others = []
            for waiting in self._waiting:
                if waiting.kind == outgoing.kind:
                    waiting.cancel()
                else:
                    others.append(waiting)
            self._waiting = [*others, outgoing]
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
        """Try until the message has arrived, is refused or cancelled, or its deadline has passed."""
        pause = _FIRST_PAUSE
        reason = ""
        while time.monotonic() < outgoing.deadline and not outgoing.cancelled.is_set():
            try:
                self._deliver(self._peer, outgoing)
                outgoing.on_delivered()
                return
            except UnreachableError as error:
                if str(error) != reason:  # each reason is logged once, not at each try
                    reason = str(error)
                    log.warning("rank %d cannot be reached, trying again: %s", self._peer, reason)
            except RefusedError as error:
                log.error("rank %d refused a message: %s", self._peer, error)
                return
            seconds_left = max(0.0, outgoing.deadline - time.monotonic())
            outgoing.cancelled.wait(min(pause, seconds_left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        if not outgoing.cancelled.is_set():
            log.warning("a message to rank %d was given up: %s", self._peer, reason or "its deadline has passed")


# --- a party's end ----------------------------------------------------------------------------------------------------


class RefusalLog:
    """Logs refused messages, a limited number a minute; those left out are counted. Callable from any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._window_began = now()
        self._lines: Counter[str] = Counter()
        self._left_out = 0
        self._lock = threading.Lock()

    def add(self, sender: str, reason: object) -> None:
        """Log one, or count it; ``sender`` is a network address (``host:port``), a name or a rank."""
        address = sender.rpartition(":")[0] or sender
        with self._lock:
            if self._now() - self._window_began >= _WINDOW:
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
            seconds = self._now() - self._window_began
            log.warning("%d more messages were refused within %.0f s, and are not listed", self._left_out, seconds)
        self._lines.clear()
        self._left_out = 0
        self._window_began = self._now()


class Transport(ABC):
    """A backend of the host as its managers see it. As a context manager it ends with its block."""

    def __init__(self, rank: int, num_parties: int) -> None:
        self.rank = rank
        self.inbox = Inbox()  # what the loop delivers; filled by receiving threads
        self.wake_at: float | None = None  # when the loop delivers an ALARM next (monotonic); None for never
        self.stopped = False  # whether the backend has ended, for whatever reason
        self._loop_left = False
        self.patience = 600.0  # seconds for which a message is tried, unless send_message says otherwise
        #: Asked before an arriving message's tensors are read, in a receiving thread; raises RefusedError.
        self.admit: Callable[[Message], None] = lambda envelope: None
        self.refusals = RefusalLog()
        self._observer: Any = None
        peers: Iterable[int] = (_SERVER,)  # clients speak with the server alone
        if rank == _SERVER:
            peers = range(1, num_parties)
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
            if message is None:  # it is time to wake
                self.wake_at = None
                message = Message(ALARM, self.rank, self.rank)
            self._observer.receive_message(message.get_type(), message)
            if self._loop_left:
                return
            message = self.inbox.get(self.wake_at)

    def leave_loop(self) -> None:
        """End the loop, from within it. Messages are still sent and let in."""
        self._loop_left = True

    def stop_receive_message(self) -> None:
        """End the loop and all sending; safe to call twice."""
        self.stopped = True
        self._loop_left = True
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
        if patience is None:
            patience = self.patience
        outgoing = Outgoing(encode(msg), msg.get_type(), time.monotonic() + patience, on_delivered)
        self._queues[msg.get_receiver_id()].send(outgoing)

    def send_now(self, msg: Message, timeout: float) -> None:
        """Try once to send a message, and wait for its receipt.

        Raises:
            RefusedError: the receiver does not let it in.
            UnreachableError: nobody took it in time.
        """
        outgoing = Outgoing(encode(msg), msg.get_type(), time.monotonic() + timeout)
        self.deliver(msg.get_receiver_id(), outgoing)

    def flush(self, timeout: float) -> None:
        """Wait until nothing is left to send, at most so many seconds."""
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


class OnTransport:
    """A manager of the host on a :class:`Transport`, given as ``comm``; name it before the host's class."""

    comm: Transport
    com_manager: Transport
    message_handler_dict: MutableMapping[int, Callable[[Message], None]]

    def _init_manager(self) -> None:
        """Use the transport that is there; the host would make one of its own backends."""
        self.com_manager = self.comm
        self.com_manager.add_observer(self)

    def finish(self) -> None:
        """End the loop; the host's own ends only backends that it knows by name, and MPI at once."""
        self.com_manager.stop_receive_message()

    def receive_message(self, msg_type: int, msg_params: Message) -> None:
        """Call the handler; the host would report any ``KeyError`` in it as a wrong rank."""
        if msg_type != READY or msg_type in self.message_handler_dict:
            self.message_handler_dict[msg_type](msg_params)
