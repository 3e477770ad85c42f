"""MQTT for small messages and an S3-compatible store for large ones; the parties only connect outwards.

A small message is published whole, a large one as the announcement of an object in the store. The receiver answers with
receipts (``receipts.py``). The broker proves who sends: it lets each party write under its own name only
(docs/cross_silo.md has such rules).

The host's own MQTT retains messages, so that a run receives the commands of the last one, and its objects are pickles.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from calfat_plugin.errors import HostError
from calfat_plugin.host.transports.base import AnothersError, PostponedError, Transport
from calfat_plugin.host.transports.broker import Broker
from calfat_plugin.host.transports.message import RefusedError
from calfat_plugin.host.transports.object_store import ObjectStore
from calfat_plugin.host.transports.queues import Outgoing, UnreachableError
from calfat_plugin.host.transports.receipts import (
    ACCEPTED,
    ANOTHERS,
    ARRIVED,
    POSTPONED,
    REFUSED,
    AwaitedMessage,
    Receipt,
    Verdicts,
)
from calfat_plugin.peer_text import peer_text
from calfat_plugin.recipe.silo import Silo, certificate_name

_MESSAGE = "message"  # what a packet carries: a message,
_OBJECT = "object"  # the announcement of one in the store,
_RECEIPT = "receipt"  # or what became of one
_SMALL = 8_192  # bytes; what is larger goes through the store
_MAX_ID = 64  # characters
_RECEIPT_LIFE = 60  # seconds that a broker keeps a receipt
_RECEIPT_SECONDS = 1.0  # that a receipt has to leave this process
_END_SECONDS = 10.0  # that messages in work have at the end; one may wait for a store that does not answer
_STORE_PAUSE = 1.0  # seconds between two tries to reach the store at the start
_OF_A_PARTY = 4  # messages in work: a heartbeat, an update, and what a lost connection has left of them


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
            self._wait_for_store(until)
        except BaseException:
            self.stop_receive_message()
            raise

    def _wait_for_store(self, until: float) -> None:
        while True:
            try:
                self._store.check(self._name)
                return
            except UnreachableError as error:
                if time.monotonic() > until:
                    raise HostError(
                        f"calfat.silo.s3: {error}. It did not answer before calfat.silo.start_deadline. Start it, or "
                        "correct the endpoint."
                    ) from None
                time.sleep(_STORE_PAUSE)

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
                with suppress(UnreachableError, RefusedError):  # it stays there
                    self._store.remove(self._name, message_id)

    # --- receiving, in the library's thread ---

    def _arrived(self, sender: str, message: Any) -> None:
        """Hand a receipt to the message that waits for it, and a message to a thread of its own."""
        try:
            packet = self._read(sender, message)
            if packet.kind != _RECEIPT:
                # Without a receipt if that is one too many, for it would be more to send: an honest sender tries again.
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
            self._send_receipt(packet, Receipt(ARRIVED))
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
                return Receipt(REFUSED, peer_text(refused))
            except UnreachableError as error:
                return Receipt(POSTPONED, str(error))
        try:
            self.receive(data, packet.sender, frozenset({packet.rank}))
        except PostponedError as refused:
            return Receipt(POSTPONED, peer_text(refused))
        except AnothersError as refused:
            return Receipt(ANOTHERS, peer_text(refused))
        except RefusedError as refused:
            return Receipt(REFUSED, peer_text(refused))
        return Receipt(ACCEPTED)

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
