"""Receipts of messages over MQTT: what a receiver says became of a message, and what a sender makes of it.

A receiver sends two receipts: that the message has arrived, and its verdict. Several processes may say that they are
one rank; a message reaches them all, and the one that it is for has the last word.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from queue import Empty, SimpleQueue
from typing import NamedTuple

from calfat_plugin.host.transports.message import RefusedError
from calfat_plugin.host.transports.queues import Outgoing, UnreachableError
from calfat_plugin.peer_text import peer_text

ARRIVED = "arrived"  # the receiver works on it
ACCEPTED = "accepted"
REFUSED = "refused"  # for good
POSTPONED = "again"  # the sender should try again
ANOTHERS = "other's"  # it is for another process of this rank, which may be fetching it: no last word
_CANCELLED = "cancelled"  # wakes the sender of a message that is given up; never sent

_ARRIVAL_SECONDS = 2.0  # in which a peer that is there confirms that a message has arrived; else it is sent again
_REMEMBERED = 64  # verdicts on messages, should the broker bring one twice


class Receipt(NamedTuple):
    """What became of a message, and why."""

    state: str
    reason: str = ""

    def as_bytes(self) -> bytes:
        return json.dumps([self.state, self.reason]).encode()

    @classmethod
    def of_peer(cls, payload: bytes) -> Receipt:
        """Read what a peer has sent; what cannot be read is a ``ValueError``, ``TypeError`` or ``RecursionError``."""
        state, reason = json.loads(payload)
        return cls(str(state), peer_text(reason))


class AwaitedMessage:
    """A message on its way, and the receipts that came for it. ``add`` is called in another thread than ``wait``."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._receipts: SimpleQueue[Receipt] = SimpleQueue()
        outgoing.on_cancel = lambda: self.add(Receipt(_CANCELLED))

    def add(self, receipt: Receipt) -> None:
        self._receipts.put(receipt)

    def wait(self, no_answer: str) -> None:
        """Return when the receiver has accepted the message; ``no_answer`` is the reason if none comes.

        Raises:
            RefusedError: the receiver has refused it.
            UnreachableError: nobody has answered in time, the receiver wants it again, or it was cancelled.
        """
        deadline = self._outgoing.deadline
        arrival_deadline = min(deadline, time.monotonic() + _ARRIVAL_SECONDS)
        num_working = 0  # processes of the receiver's rank that have the message and have not given their verdict
        reason_of_other = ""  # of a process that it is not for
        while not self._outgoing.cancelled.is_set():
            until = arrival_deadline
            if num_working > 0:
                until = deadline
            try:
                receipt = self._receipts.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                if reason_of_other and num_working == 0:
                    raise RefusedError(reason_of_other) from None
                raise UnreachableError(no_answer) from None
            if receipt.state == ACCEPTED:
                return
            if receipt.state == REFUSED:
                raise RefusedError(receipt.reason)
            if receipt.state == POSTPONED:
                raise UnreachableError(receipt.reason)
            if receipt.state == ARRIVED:
                num_working += 1
            elif receipt.state == ANOTHERS:
                num_working -= 1
                reason_of_other = receipt.reason
        raise UnreachableError("given up for a newer message")


class Verdicts:
    """The last verdicts of a receiver, by sender and message id. Callable from any thread."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[tuple[str, str], Receipt] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, sender: str, message_id: str) -> Receipt | None:
        with self._lock:
            return self._verdicts.get((sender, message_id))

    def remember(self, sender: str, message_id: str, verdict: Receipt) -> None:
        """Remember a verdict that holds however often the message comes."""
        if verdict.state in (POSTPONED, ANOTHERS):
            return
        with self._lock:
            self._verdicts[sender, message_id] = verdict
            if len(self._verdicts) > _REMEMBERED:
                self._verdicts.popitem(last=False)
