"""The one loop of a process: it sleeps until a message or the alarm comes. The host's own loops spin."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TypeVar

from fedml.core.distributed.communication.base_com_manager import BaseCommunicationManager
from fedml.core.distributed.communication.constants import CommunicationConstants
from fedml.core.distributed.communication.message import Message
from fedml.core.distributed.communication.observer import Observer

T = TypeVar("T", bound="Loop")

ALARM = 1000  # message types of our own, delivered within a process and never sent
FAILED = 1001


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


class Loop(BaseCommunicationManager):
    """A backend of the host as its managers see it, except for sending. As a context manager it ends with its block.

    Args:
        rank: of this process.

    Attributes:
        inbox: what the loop delivers; filled by receiving threads.
        wake_at: when the loop delivers an ``ALARM`` next (monotonic); None for never.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.wake_at: float | None = None
        self.inbox = Inbox()
        self._observers: list[Observer] = []
        self._stopped = self._over = False

    def handle_receive_message(self) -> None:
        """The loop, until :meth:`leave_loop` or :meth:`stop_receive_message`."""
        self._notify(self.local_message(CommunicationConstants.MSG_TYPE_CONNECTION_IS_READY))
        while not self._over:
            message = self.inbox.get(self.wake_at)
            if message is None:
                self.wake_at, message = None, self.local_message(ALARM)
            self._notify(message)

    def local_message(self, type: int) -> Message:
        """A message of this process to itself."""
        return Message(type, self.rank, self.rank)

    def leave_loop(self) -> None:
        """End the loop, from within it. Messages are still sent and let in."""
        self._over = True

    def stop_receive_message(self) -> None:
        """End the loop, and with it the backend; safe to call twice."""
        self._stopped = self._over = True

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop_receive_message()

    def add_observer(self, observer: Observer) -> None:
        self._observers.append(observer)

    def _notify(self, message: Message) -> None:
        for observer in self._observers:
            observer.receive_message(message.get_type(), message)
