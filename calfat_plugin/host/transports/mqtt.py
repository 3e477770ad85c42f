"""MQTT for small messages and an S3-compatible store for large ones; the parties only connect outwards.

A small message is published whole, a large one as the announcement of an object in the store. The receiver sends two
receipts: that the message has arrived, and what became of it. The broker proves who sends: it lets each party write
under its own name only; ``calfat certs --broker`` writes such rules.

The host's own MQTT retains messages, so that a run receives the commands of the last one, and its objects are pickles.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from calfat_plugin.errors import HostError
from calfat_plugin.host.transports.base import Outgoing, Transport, UnreachableError
from calfat_plugin.host.transports.broker import Broker
from calfat_plugin.host.transports.messages import PostponedError, RefusedError
from calfat_plugin.host.transports.object_store import ObjectStore
from calfat_plugin.peer_text import peer_text
from calfat_plugin.recipe.silo import Silo, certificate_name

log = logging.getLogger(__name__)

_SMALL = 8_192  # bytes; what is larger goes through the store
_ARRIVAL = 2.0  # seconds in which a peer that is there confirms that a message has arrived; else it is sent again
_RECEIPT_LIFE = 60  # seconds that a broker keeps a receipt
_RECEIPT_FLUSH = 1.0  # seconds that a receipt has to leave this process
_PAUSE = 1.0  # seconds between two tries to reach the store at the start
_REMEMBERED = 64  # verdicts on messages, should the broker bring one twice
_MAX_ID = 64
_MESSAGE, _OBJECT, _RECEIPT = "message", "object", "receipt"
_ARRIVED, _ACCEPTED, _REFUSED, _AGAIN, _CANCELLED = "arrived", "accepted", "refused", "again", "cancelled"

Answer = tuple[str, str]  # what became of a message, and why


class MQTTTransport(Transport):
    """One party's end.

    Args:
        rank: of this party.
        num_parties: server and clients.
        silo: broker, store and certificates.
        max_message: largest message that is accepted, in bytes.

    Raises:
        HostError: broker or store do not let this party in, or do not answer before the start deadline.
    """

    def __init__(self, rank: int, num_parties: int, silo: Silo, max_message: int) -> None:
        self._max_message = max_message
        self._name = certificate_name(rank)
        self._senders = {certificate_name(each): each for each in range(num_parties)}
        self._answers: dict[str, SimpleQueue[Answer]] = {}
        self._verdicts: OrderedDict[tuple[str, str], Answer] = OrderedDict()
        self._verdicts_lock = threading.Lock()
        self._workers = ThreadPoolExecutor(max_workers=num_parties + 1, thread_name_prefix="mqtt")
        super().__init__(rank, num_parties)
        self._store = ObjectStore(silo.s3, silo.mqtt.run)
        self._broker = Broker(silo, rank, self._arrived)
        until = time.monotonic() + silo.settings.start_deadline
        try:
            self._broker.wait(until)
            self._wait_for_store(until)
        except BaseException:
            self.stop_receive_message()
            raise

    # --- sending ---

    def deliver(self, peer: int, outgoing: Outgoing) -> None:
        if not self._broker.is_there:
            raise UnreachableError(f"{self._broker} is not there")
        message_id = secrets.token_hex(16)  # new for each try: a receipt for the last one may come late
        answers: SimpleQueue[Answer] = SimpleQueue()
        self._answers[message_id] = answers
        outgoing.on_cancel = lambda: answers.put((_CANCELLED, ""))
        large = len(outgoing.data) > _SMALL
        try:
            if large:
                self._store.put(self._name, message_id, outgoing.data)
            self._announce(peer, message_id, outgoing, large=large)
            self._await_verdict(peer, outgoing, answers)
        finally:
            del self._answers[message_id]
            if large:
                with suppress(UnreachableError, RefusedError):  # the next start sweeps
                    self._store.remove(self._name, message_id)

    def _announce(self, peer: int, message_id: str, outgoing: Outgoing, *, large: bool) -> None:
        kind, payload = _MESSAGE, outgoing.data
        if large:
            about = {"bytes": len(outgoing.data), "sha256": hashlib.sha256(outgoing.data).hexdigest()}
            kind, payload = _OBJECT, json.dumps(about).encode()
        life = max(1, int(outgoing.deadline - time.monotonic()))
        self._broker.publish(peer, kind, message_id, payload, life)

    def _await_verdict(self, peer: int, outgoing: Outgoing, answers: SimpleQueue[Answer]) -> None:
        until = min(outgoing.deadline, time.monotonic() + _ARRIVAL)
        while not outgoing.cancelled.is_set():
            try:
                state, reason = answers.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                raise UnreachableError(f"rank {peer} does not answer at {self._broker}") from None
            if state == _ACCEPTED:
                return
            if state == _REFUSED:
                raise RefusedError(reason)
            if state == _AGAIN:
                raise UnreachableError(reason)
            until = outgoing.deadline  # it has arrived, and the peer is fetching its object
        raise UnreachableError("given up for a newer message")

    # --- receiving ---

    def _arrived(self, sender: str, message: Any) -> None:
        """Sort a message, in the library's thread."""
        try:
            rank = self._senders.get(sender)
            if rank not in self._queues:
                raise RefusedError("no peer of this party has that name")
            if message.retain:
                raise RefusedError("the broker has kept it from an earlier run")
            message_id = bytes(getattr(message.properties, "CorrelationData", b"")).decode("ascii")
            if not (message_id.isalnum() and len(message_id) <= _MAX_ID):
                raise RefusedError("it has no message id")
            kind = dict(getattr(message.properties, "UserProperty", ())).get("calfat")
            if kind == _RECEIPT:
                self._take_receipt(message_id, message.payload)
            elif kind in (_MESSAGE, _OBJECT):
                with suppress(RuntimeError):  # this party is about to end
                    work = self._workers.submit(self._take, rank, sender, kind, message_id, bytes(message.payload))
                    work.add_done_callback(_log_our_bugs)
            else:
                raise RefusedError("it is of no kind that we know")
        except (RefusedError, ValueError, TypeError, RecursionError) as refused:
            self.refusals.add(repr(sender), refused)

    def _take_receipt(self, message_id: str, payload: bytes) -> None:
        state, reason = json.loads(payload)
        answers = self._answers.get(message_id)
        if answers is not None:
            answers.put((str(state), peer_text(reason)))

    def _take(self, rank: int, sender: str, kind: str, message_id: str, payload: bytes) -> None:
        """Check a message and send the receipts; in a thread of its own, for it may wait for the store."""
        known = (sender, message_id)
        with self._verdicts_lock:
            verdict = self._verdicts.get(known)
        if verdict is None:
            self._broker.publish(rank, _RECEIPT, message_id, json.dumps((_ARRIVED, "")).encode(), _RECEIPT_LIFE)
            verdict = self._judge(rank, sender, kind, message_id, payload)
            with self._verdicts_lock:
                if verdict[0] != _AGAIN:
                    self._verdicts[known] = verdict
                while len(self._verdicts) > _REMEMBERED:
                    self._verdicts.popitem(last=False)
        sent = self._broker.publish(rank, _RECEIPT, message_id, json.dumps(verdict).encode(), _RECEIPT_LIFE)
        with suppress(ValueError, RuntimeError):  # not connected: the sender will try again
            sent.wait_for_publish(_RECEIPT_FLUSH)

    def _judge(self, rank: int, sender: str, kind: str, message_id: str, payload: bytes) -> Answer:
        if kind == _OBJECT:
            try:
                payload = self._fetch(sender, message_id, payload)
            except RefusedError as refused:
                self.refusals.add(sender, refused)
                return _REFUSED, peer_text(refused)
            except UnreachableError as error:
                return _AGAIN, str(error)
        try:
            self.receive(payload, sender, frozenset({rank}))
        except RefusedError as refused:  # already logged
            return _AGAIN if isinstance(refused, PostponedError) else _REFUSED, peer_text(refused)
        return _ACCEPTED, ""

    def _fetch(self, sender: str, message_id: str, announcement: bytes) -> bytes:
        try:
            about = json.loads(announcement)
            num_bytes, sha256 = about["bytes"], about["sha256"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise RefusedError("its announcement cannot be read") from None
        if type(num_bytes) is not int or not isinstance(sha256, str):
            raise RefusedError("its announcement cannot be read")
        if not 0 <= num_bytes <= self._max_message:
            raise RefusedError(f"{num_bytes} bytes, {self._max_message} are allowed")
        return self._store.fetch(sender, message_id, num_bytes, sha256)

    # --- beginning and end ---

    def _wait_for_store(self, until: float) -> None:
        while True:
            try:
                self._store.check(self._name)
                with suppress(RefusedError):  # it may write and remove, but not list
                    self._store.sweep(self._name)
                return
            except UnreachableError as error:
                if time.monotonic() > until:
                    raise HostError(
                        f"calfat.silo.s3: {error}. It did not answer before calfat.silo.start_deadline. Start it, or "
                        "correct the endpoint."
                    ) from None
                time.sleep(_PAUSE)

    def stop_receive_message(self) -> None:
        super().stop_receive_message()
        self._workers.shutdown(wait=True)  # the last receipts go out first
        self._broker.close()


def _log_our_bugs(work: Future[None]) -> None:
    error = work.exception()
    if error is not None:
        log.error("a message could not be processed", exc_info=error)
