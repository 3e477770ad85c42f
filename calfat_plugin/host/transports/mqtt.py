"""MQTT for small messages and an S3-compatible store for large ones; the parties only connect outwards.

A small message is published whole, a large one as the announcement of an object in the store. The broker proves who
sends: it lets each party write under its own name only (docs/cross_silo.md has such rules).

A receiver answers with two receipts: that the message has arrived, and its verdict. Several processes may say that they
are one rank; a message reaches them all, and the one that it is for has the last word.

The host's own MQTT retains messages, so that a run receives the commands of the last one, and its objects are pickles.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from calfat_plugin.host.transports.base import AnothersError, Outgoing, PostponedError, Transport, UnreachableError
from calfat_plugin.host.transports.broker import Broker
from calfat_plugin.host.transports.message import RefusedError
from calfat_plugin.host.transports.object_store import ObjectStore
from calfat_plugin.peer_text import peer_text
from calfat_plugin.recipe.silo import Silo, certificate_name

# What a packet carries.
_MESSAGE = "message"
_OBJECT = "object"  # the announcement of a message in the store
_RECEIPT = "receipt"  # what became of a message
_SMALL = 8_192  # bytes; what is larger goes through the store
_MAX_ID = 64  # characters
_RECEIPT_LIFE = 60  # seconds that a broker keeps a receipt
_RECEIPT_SECONDS = 1.0  # that a receipt has to leave this process
_END_SECONDS = 10.0  # that messages in work have at the end; one may wait for a store that does not answer
_OF_A_PARTY = 4  # messages in work: a heartbeat, an update, and what a lost connection has left of them

# States of a receipt.
_ARRIVED = "arrived"  # the receiver works on it
_ACCEPTED = "accepted"
_REFUSED = "refused"  # for good
_POSTPONED = "again"  # the sender should try again
_ANOTHERS = "other's"  # it is for another process of this rank, which may be fetching it: no last word
_CANCELLED = "cancelled"  # wakes the sender of a message that is given up; never sent

_ARRIVAL_SECONDS = 2.0  # in which a peer that is there confirms that a message has arrived; else it is sent again
_REMEMBERED = 64  # verdicts on messages, should the broker bring one twice


# --- receipts ---------------------------------------------------------------------------------------------------------


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
            if receipt.state == _ACCEPTED:
                return
            if receipt.state == _REFUSED:
                raise RefusedError(receipt.reason)
            if receipt.state == _POSTPONED:
                raise UnreachableError(receipt.reason)
            if receipt.state == _ARRIVED:
                num_working += 1
            elif receipt.state == _ANOTHERS:
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
        if verdict.state in (_POSTPONED, _ANOTHERS):
            return
        with self._lock:
            self._verdicts[sender, message_id] = verdict
            if len(self._verdicts) > _REMEMBERED:
                self._verdicts.popitem(last=False)


# --- a party's end ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Packet:
    """What the broker has brought of a party."""

    rank: int
    sender: str  # the party's name, for which the broker vouches
    message_id: str
    kind: str
    payload: bytes


class MQTTTransport(Transport):
    """One party's end."""

    def __init__(self, rank: int, num_parties: int, silo: Silo, max_message: int) -> None:
        self._max_message = max_message
        self._name = certificate_name(rank)
        self._ranks = {certificate_name(party): party for party in range(num_parties)}
        self._awaited: dict[str, AwaitedMessage] = {}  # by message id
        self._verdicts = Verdicts()
        super().__init__(rank, num_parties)
        self._threads = _MessageThreads(self._queues)
        self._store = ObjectStore(silo.s3, silo.mqtt.run)
        self._broker = Broker(silo, rank, self._arrived)
        until = time.monotonic() + silo.start_deadline
        try:
            self._broker.wait(until)
            self._store.wait(self._name, until)
        except BaseException:
            self.stop_receive_message()
            raise

    def stop_receive_message(self) -> None:
        super().stop_receive_message()
        self._threads.end(_END_SECONDS)  # the last receipts go out before the connection ends
        self._broker.close()

    # --- sending ---

    def deliver(self, peer: int, outgoing: Outgoing) -> None:
        if not self._broker.is_there.is_set():
            raise UnreachableError(f"{self._broker} is not there")
        message_id = secrets.token_hex(16)  # new for each try: a receipt for the last one may come late
        awaited = AwaitedMessage(outgoing)
        self._awaited[message_id] = awaited
        is_large = len(outgoing.data) > _SMALL
        try:
            kind, payload = _MESSAGE, outgoing.data
            if is_large:
                self._store.put(self._name, message_id, outgoing.data)
                announcement = {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
                kind, payload = _OBJECT, json.dumps(announcement).encode()
            life = max(1, int(outgoing.deadline - time.monotonic()))
            self._broker.publish(peer, kind, message_id, payload, life)
            awaited.wait(f"rank {peer} does not answer at {self._broker}")
        finally:
            del self._awaited[message_id]
            if is_large:
                with suppress(UnreachableError, RefusedError):  # the object stays in the store
                    self._store.remove(self._name, message_id)

    # --- receiving, in the library's thread ---

    def _arrived(self, sender: str, message: Any) -> None:
        """Hand a receipt to the message that waits for it, and a message to a thread of its own."""
        try:
            packet = self._read(sender, message)
            if packet.kind != _RECEIPT:
                # One too many gets no receipt, because that would be more to send. An honest sender tries again.
                self._threads.start(packet.rank, lambda: self._take(packet))
                return
            receipt = Receipt.of_peer(packet.payload)
            awaited = self._awaited.get(packet.message_id)
            if awaited is not None:  # else it is late
                awaited.add(receipt)
        except (RefusedError, ValueError, TypeError, RecursionError) as refused:
            self.refusals.add(repr(sender), refused)

    def _read(self, sender: str, message: Any) -> _Packet:
        """Check who sends a packet, and of what kind it is."""
        rank = self._ranks.get(sender)
        if rank is None or rank not in self._queues:
            raise RefusedError("no peer of this party has that name")
        if message.retain:
            raise RefusedError("the broker has kept it from an earlier run")
        message_id = bytes(getattr(message.properties, "CorrelationData", b"")).decode("ascii")
        if not message_id.isalnum() or len(message_id) > _MAX_ID:
            raise RefusedError("it has no message id")
        kind = dict(getattr(message.properties, "UserProperty", ())).get("calfat")
        if kind not in (_MESSAGE, _OBJECT, _RECEIPT):
            raise RefusedError("it is of no kind that we know")
        return _Packet(rank, sender, message_id, kind, bytes(message.payload))

    # --- receiving, in a thread for each message ---

    def _take(self, packet: _Packet) -> None:
        """Read a message, and send its receipts."""
        verdict = self._verdicts.get(packet.sender, packet.message_id)
        if verdict is None:
            self._send_receipt(packet, Receipt(_ARRIVED))
            verdict = self._judge(packet)
            self._verdicts.remember(packet.sender, packet.message_id, verdict)
        sent = self._send_receipt(packet, verdict)
        with suppress(ValueError, RuntimeError):  # not connected: the sender will try again
            sent.wait_for_publish(_RECEIPT_SECONDS)

    def _send_receipt(self, packet: _Packet, receipt: Receipt) -> Any:
        return self._broker.publish(packet.rank, _RECEIPT, packet.message_id, receipt.as_bytes(), _RECEIPT_LIFE)

    def _judge(self, packet: _Packet) -> Receipt:
        """Put a message into the inbox; the verdict says whether it is there, or why not."""
        data = packet.payload
        if packet.kind == _OBJECT:
            try:
                data = self._fetch(packet)
            except RefusedError as refused:
                self.refusals.add(packet.sender, refused)
                return Receipt(_REFUSED, peer_text(refused))
            except UnreachableError as error:
                return Receipt(_POSTPONED, str(error))
        try:
            self.receive(data, packet.sender, frozenset({packet.rank}))
        except PostponedError as refused:
            return Receipt(_POSTPONED, peer_text(refused))
        except AnothersError as refused:
            return Receipt(_ANOTHERS, peer_text(refused))
        except RefusedError as refused:
            return Receipt(_REFUSED, peer_text(refused))
        return Receipt(_ACCEPTED)

    def _fetch(self, packet: _Packet) -> bytes:
        """The object that a packet announces."""
        try:
            announcement = json.loads(packet.payload)
            num_bytes, sha256 = announcement["bytes"], announcement["sha256"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise RefusedError("its announcement cannot be read") from None
        if type(num_bytes) is not int or not isinstance(sha256, str):
            raise RefusedError("its announcement cannot be read")
        if not 0 <= num_bytes <= self._max_message:
            raise RefusedError(f"{num_bytes} bytes, {self._max_message} are allowed")
        return self._store.fetch(packet.sender, packet.message_id, num_bytes, sha256)


class _MessageThreads:
    """A thread for each message in work, because it may wait for the store; a limited number for each party.

    There is no pool: its queue would grow without limit, and one sender's messages would wait before another's.
    """

    def __init__(self, peers: Collection[int]) -> None:
        self._threads: dict[int, list[threading.Thread]] = {peer: [] for peer in peers}
        self._ended = False
        self._lock = threading.Lock()

    def start(self, peer: int, work: Callable[[], None]) -> None:
        """Work on a message of this peer, unless this has ended; one too many is a ``RefusedError``."""
        with self._lock:
            alive = [thread for thread in self._threads[peer] if thread.is_alive()]
            self._threads[peer] = alive
            if len(alive) >= _OF_A_PARTY:
                raise RefusedError("too many messages at once")
            if not self._ended:
                thread = threading.Thread(target=work, name=f"take-{peer}", daemon=True)
                thread.start()
                alive.append(thread)

    def end(self, seconds: float) -> None:
        """Wait for the messages in work; safe to call twice."""
        until = time.monotonic() + seconds
        with self._lock:
            self._ended = True
            in_work = list(chain.from_iterable(self._threads.values()))
        for thread in in_work:
            thread.join(max(0.0, until - time.monotonic()))
