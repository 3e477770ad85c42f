"""Messages that wait: those for a party's loop, and those for each peer, which are sent until they arrive."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from calfat_plugin.host.transports.message import Message, RefusedError

log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.1  # seconds between two tries; each pause is twice the last one
_LONGEST_PAUSE = 5.0


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
