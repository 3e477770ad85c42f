"""MQTT for small messages and an S3-compatible store for large ones; the parties only connect outwards.

A small message is published whole, a large one as the announcement of an object in the store. The receiver sends two
receipts: that the message has arrived, and what became of it. The broker proves who sends: it lets each party write
under its own name only (docs/cross_silo.md has such rules).

The host's own MQTT retains messages, so that a run receives the commands of the last one, and its objects are pickles.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from paho.mqtt import client as mqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from urllib3.exceptions import HTTPError

from calfat_plugin.disk import expanded
from calfat_plugin.errors import HostError
from calfat_plugin.host.transports.base import AnothersError, PostponedError, Transport
from calfat_plugin.host.transports.certificates import Certificates
from calfat_plugin.host.transports.message import RefusedError
from calfat_plugin.host.transports.queues import Outgoing, UnreachableError
from calfat_plugin.peer_text import peer_text
from calfat_plugin.recipe.silo import S3Settings, Silo, certificate_name, for_rank

log = logging.getLogger(__name__)

_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60}
_FETCH = 60.0  # seconds that an object may take in all, and one more for each of these bytes
_BYTES_PER_SECOND = 125_000
_PIECE = 65_536  # bytes
_SERVER_ERROR = 500


class ObjectStore:
    """One party's view of the bucket.

    Keys are ``prefix/run/sender's name/message id``, so that a receiver derives them from what it knows already and
    nobody can send it to read anything else.
    """

    def __init__(self, settings: S3Settings, run: str) -> None:
        self._settings, self._run = settings, run
        try:
            self._client: Any = boto3.session.Session().client(
                "s3",
                endpoint_url=settings.endpoint,
                # A store that has no regions signs with any; boto3 insists on one.
                region_name=settings.region or (None if settings.endpoint is None else "us-east-1"),
                verify=None if settings.ca is None else str(expanded(settings.ca)),
                config=Config(
                    **_TIMEOUTS,
                    retries={"mode": "standard", "max_attempts": 2},
                    s3={"addressing_style": "auto" if settings.endpoint is None else "path"},
                    request_checksum_calculation="when_required",  # newer ones are not known to all stores
                    response_checksum_validation="when_required",
                ),
            )
        except (BotoCoreError, ValueError) as error:
            raise HostError(f"calfat.silo.s3: {error}.") from None

    def __str__(self) -> str:
        return f"{self._settings.endpoint or 'https://s3.amazonaws.com'}, bucket {self._settings.bucket}"

    def put(self, sender: str, message_id: str, data: bytes) -> None:
        self._call("put_object", Key=self._key(sender, message_id), Body=data)

    def fetch(self, sender: str, message_id: str, num_bytes: int, sha256: str) -> bytes:
        """Read what a peer has announced, no byte more."""
        seconds = _FETCH + num_bytes / _BYTES_PER_SECOND
        until, data = time.monotonic() + seconds, bytearray()
        answer = self._call("get_object", Key=self._key(sender, message_id))
        with answer["Body"] as body:  # urllib3's own answer, with its own errors
            if answer["ContentLength"] != num_bytes:
                raise RefusedError(f"its object has {answer['ContentLength']} bytes, {num_bytes} were announced")
            try:
                # What has come, not all that was asked for: the time limit of a socket begins anew with each byte.
                while len(data) < num_bytes and (piece := body.read1(min(_PIECE, num_bytes - len(data)))):
                    data += piece
                    if time.monotonic() > until:
                        raise UnreachableError(f"the store gave {len(data)} of {num_bytes} bytes in {seconds:.0f} s")
            except (HTTPError, OSError) as error:
                raise UnreachableError(peer_text(f"the store broke off: {error}")) from None
        if len(data) < num_bytes:  # boto3 lets a connection that ends early pass for an object's end
            raise UnreachableError(f"the store broke off after {len(data)} of {num_bytes} bytes")
        if not secrets.compare_digest(hashlib.sha256(data).hexdigest(), sha256):
            raise RefusedError("its object is not the one that was announced (SHA-256)")
        return bytes(data)

    def remove(self, sender: str, message_id: str) -> None:
        self._call("delete_object", Key=self._key(sender, message_id))

    def check(self, sender: str) -> None:
        """Write and remove a small object, so that a run does not begin without a store."""
        try:
            self.put(sender, "hello", b"")
            self.remove(sender, "hello")
        except RefusedError as refused:
            raise HostError(
                f"calfat.silo.s3: {refused}. Check bucket and endpoint, and the credentials that boto3 finds "
                "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)."
            ) from None

    def _key(self, sender: str, message_id: str) -> str:
        return f"{self._settings.prefix}/{self._run}/{sender}/{message_id}"

    def _call(self, operation: str, **arguments: Any) -> Any:
        try:
            return getattr(self._client, operation)(Bucket=self._settings.bucket, **arguments)
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", _SERVER_ERROR)
            code = error.response.get("Error", {}).get("Code", status)
            reason = peer_text(f"the store ({self}) says {code}")
            again = status >= _SERVER_ERROR or code == "NoSuchKey"
            raise (UnreachableError if again else RefusedError)(reason) from None
        except BotoCoreError as error:
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
                raise RefusedError(f"the store ({self}) needs credentials: {error}") from None
            raise UnreachableError(peer_text(f"the store ({self}): {error}")) from None


# --- the broker -------------------------------------------------------------------------------------------------------


_MAX_PACKET = 65_536  # bytes; the broker keeps anything larger from us
_KEEPALIVE = 20  # seconds
_FAILURE = 0x80  # MQTT 5: reason codes from here on are errors


class Broker:
    """The connection; it comes back by itself. ``is_there`` says whether messages can be sent and received now.

    Topics are ``calfat/<run>/<sender>/<receiver>`` with the names of the parties' certificates, so that two access
    rules keep everyone in their place.
    """

    def __init__(self, silo: Silo, rank: int, on_message: Callable[[str, Any], None]) -> None:
        self._rank, self._settings, self._name = rank, silo.mqtt, certificate_name(rank)
        self._on_message = on_message  # is given (sender's name, message) in the library's thread, and must not wait
        self.is_there, self._lost = threading.Event(), threading.Event()
        self._denied, self._failure = "", "no answer"
        self._closing = False
        self._client = _client(silo, rank)
        self._client.on_connect, self._client.on_subscribe = self._connected, self._answered
        self._client.on_disconnect, self._client.on_message = self._disconnected, self._arrived
        self._thread = threading.Thread(target=self._serve, name="broker", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return f"the MQTT broker {self._settings.broker}"

    def publish(self, peer: int, kind: str, message_id: str, payload: bytes, life: int) -> Any:
        """Send to rank ``peer``; the broker forgets it after ``life`` seconds. Returns the library's receipt."""
        properties = Properties(PacketTypes.PUBLISH)
        properties.CorrelationData = message_id.encode()
        properties.UserProperty = ("calfat", kind)
        properties.MessageExpiryInterval = life
        topic = f"calfat/{self._settings.run}/{self._name}/{certificate_name(peer)}"
        # Never retained: the next run would receive it.
        return self._client.publish(topic, payload, qos=1, retain=False, properties=properties)

    def wait(self, until: float) -> None:
        where = f"{self} (calfat.silo.mqtt.broker)"
        while not self.is_there.wait(0.05):
            if self._denied:
                raise HostError(
                    f"{where} refuses rank {self._rank}: {self._denied}. Check its access rules, and this party's "
                    "certificate or password."
                )
            if time.monotonic() > until:
                raise HostError(
                    f"{where} did not let rank {self._rank} in before calfat.silo.start_deadline: {self._failure}. "
                    "Start it, or correct its address or the certificates."
                )

    def close(self) -> None:
        """End the connection; safe to call twice."""
        self._closing = True
        with suppress(OSError):  # a connection that never came about cannot be ended in order
            self._client.disconnect()
        self._lost.set()
        self._thread.join()

    # --- keeping up the connection ---

    def _serve(self) -> None:
        """Connect, and again whenever the connection breaks. The library's own thread reads and writes."""
        address, logged = self._settings.address, ""
        properties = Properties(PacketTypes.CONNECT)
        properties.MaximumPacketSize = _MAX_PACKET
        while not self._closing:
            self._lost.clear()
            try:
                self._client.connect(address.host, address.port, _KEEPALIVE, clean_start=True, properties=properties)
            except (OSError, ValueError) as error:  # ssl.SSLError, and what is said of a host that cannot be one
                self._failure = str(error) or type(error).__name__
            else:
                # Not loop_forever in this thread: whoever publishes would then write to the socket beside it.
                self._client.loop_start()
                self._failure = self._read()
                self._client.loop_stop()
            self.is_there.clear()
            if not self._closing and self._failure != logged:
                log.warning("%s: %s; trying again", self, self._failure)
                logged = self._failure
            if not self._closing:
                time.sleep(_PAUSE)

    def _read(self) -> str:
        """Wait while the library's thread reads. Returns why it ended."""
        reader = self._client._thread
        while not (self._closing or self._lost.wait(_PAUSE)):
            # It also dies of a packet that it cannot read, such as one with U+FEFF in a text, and tells nobody.
            if not reader.is_alive():
                return "it forwarded a message that cannot be read"
        return "it closes the connection"

    # --- callbacks, in the library's thread ---

    def _connected(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if reason.value >= _FAILURE:
            self._deny(str(reason))
        else:
            client.subscribe(f"calfat/{self._settings.run}/+/{self._name}", qos=1)

    def _answered(self, client: Any, userdata: Any, mid: int, reasons: Any, properties: Any) -> None:
        if reasons[0].value >= _FAILURE:
            self._deny(f"it may not read its topic ({reasons[0]})")
        else:
            self.is_there.set()

    def _deny(self, reason: str) -> None:
        self._denied = reason
        log.error("%s refuses this party: %s", self, reason)

    def _disconnected(self, client: Any, userdata: Any, reason: Any, properties: Any = None) -> None:
        self.is_there.clear()
        self._lost.set()

    def _arrived(self, client: Any, userdata: Any, message: Any) -> None:
        try:
            self._on_message(str(message.topic).split("/")[-2], message)
        except Exception:  # our bug; but the library's thread, and with it the connection, must not end
            log.exception("a message could not be processed")


def _client(silo: Silo, rank: int) -> Any:
    settings = silo.mqtt
    client = mqtt.Client(protocol=mqtt.MQTTv5, reconnect_on_failure=False)
    if settings.username is not None:
        path = expanded(for_rank(str(settings.password_file), rank))
        try:
            password = path.read_text(encoding="utf-8").partition("\n")[0]
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise HostError(f"calfat.silo.mqtt.password_file: {path} cannot be read ({reason}).") from None
        client.username_pw_set(for_rank(settings.username, rank), password)
    if silo.tls is not None:
        client.tls_set_context(Certificates.read(silo.tls, rank).client_context)
    elif settings.tls:
        client.tls_set_context(ssl.create_default_context())
    return client


# --- the transport ----------------------------------------------------------------------------------------------------

_SMALL = 8_192  # bytes; what is larger goes through the store
_ARRIVAL = 2.0  # seconds in which a peer that is there confirms that a message has arrived; else it is sent again
_RECEIPT_LIFE = 60  # seconds that a broker keeps a receipt
_RECEIPT_FLUSH = 1.0  # seconds that a receipt has to leave this process
_END = 10.0  # seconds that messages at work have at the end; one may wait for a store that does not answer
_PAUSE = 1.0  # seconds between two tries to reach the broker, or at the start the store
_REMEMBERED = 64  # verdicts on messages, should the broker bring one twice
_MAX_ID = 64
_OF_A_PARTY = 4  # messages at work: a heartbeat, an update, and what a lost connection has left of them
_MESSAGE, _OBJECT, _RECEIPT = "message", "object", "receipt"
_ARRIVED, _ACCEPTED, _REFUSED, _AGAIN, _CANCELLED = "arrived", "accepted", "refused", "again", "cancelled"
_OTHERS = "other's"  # it is for another process of this rank, which may be fetching it: no last word

Answer = tuple[str, str]  # what became of a message, and why


class MQTTTransport(Transport):
    """One party's end."""

    def __init__(self, rank: int, num_parties: int, silo: Silo, max_message: int) -> None:
        self._max_message = max_message
        self._name = certificate_name(rank)
        self._senders = {certificate_name(each): each for each in range(num_parties)}
        self._answers: dict[str, SimpleQueue[Answer]] = {}  # by message id
        self._verdicts: OrderedDict[tuple[str, str], Answer] = OrderedDict()
        self._verdicts_lock = threading.Lock()
        super().__init__(rank, num_parties)
        self._beginning = threading.Lock()
        self._at_work: dict[int, list[threading.Thread]] = {peer: [] for peer in self._queues}
        self._store = ObjectStore(silo.s3, silo.mqtt.run)
        self._broker = Broker(silo, rank, self._arrived)
        until = time.monotonic() + silo.start_deadline
        try:
            self._broker.wait(until)
            self._wait_for_store(until)
        except BaseException:
            self.stop_receive_message()
            raise

    # --- sending ---

    def deliver(self, peer: int, outgoing: Outgoing) -> None:
        if not self._broker.is_there.is_set():
            raise UnreachableError(f"{self._broker} is not there")
        message_id = secrets.token_hex(16)  # new for each try: a receipt for the last one may come late
        answers: SimpleQueue[Answer] = SimpleQueue()
        self._answers[message_id] = answers
        outgoing.on_cancel = lambda: answers.put((_CANCELLED, ""))
        kind, payload = _MESSAGE, outgoing.data
        large = len(payload) > _SMALL
        try:
            if large:
                self._store.put(self._name, message_id, payload)
                about = {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
                kind, payload = _OBJECT, json.dumps(about).encode()
            life = max(1, int(outgoing.deadline - time.monotonic()))
            self._broker.publish(peer, kind, message_id, payload, life)
            self._await_verdict(peer, outgoing, answers)
        finally:
            del self._answers[message_id]
            if large:
                with suppress(UnreachableError, RefusedError):  # it stays there
                    self._store.remove(self._name, message_id)

    def _await_verdict(self, peer: int, outgoing: Outgoing, answers: SimpleQueue[Answer]) -> None:
        arrival = min(outgoing.deadline, time.monotonic() + _ARRIVAL)
        fetching, others = 0, ""  # processes of that rank that have the message; what those said whom it is not for
        while not outgoing.cancelled.is_set():
            until = outgoing.deadline if fetching > 0 else arrival
            try:
                state, reason = answers.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                if others and fetching == 0:
                    raise RefusedError(others) from None
                raise UnreachableError(f"rank {peer} does not answer at {self._broker}") from None
            if state == _ACCEPTED:
                return
            if state == _REFUSED:
                raise RefusedError(reason)
            if state == _AGAIN:
                raise UnreachableError(reason)
            if state == _ARRIVED:
                fetching += 1
            elif state == _OTHERS:
                fetching, others = fetching - 1, reason
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
                state, reason = json.loads(message.payload)
                if (answers := self._answers.get(message_id)) is not None:
                    answers.put((str(state), peer_text(reason)))
            elif kind in (_MESSAGE, _OBJECT):
                self._begin(rank, sender, kind, message_id, bytes(message.payload))
            else:
                raise RefusedError("it is of no kind that we know")
        except (RefusedError, ValueError, TypeError, RecursionError) as refused:
            self.refusals.add(repr(sender), refused)

    def _begin(self, rank: int, *message: Any) -> None:
        """Have a message taken in a thread of its own, for it may wait for the store."""
        at_work = self._at_work[rank] = [each for each in self._at_work[rank] if each.is_alive()]
        if len(at_work) >= _OF_A_PARTY:
            # Without a receipt, which would only be more to send: an honest sender tries again.
            raise RefusedError("too many messages at once")
        # No pool: its queue would grow without limit, and one sender's messages would wait before another's.
        thread = threading.Thread(target=self._take, args=(rank, *message), name=f"take-{rank}", daemon=True)
        with self._beginning:
            if not self.stopped:
                thread.start()
                at_work.append(thread)

    def _take(self, rank: int, sender: str, kind: str, message_id: str, payload: bytes) -> None:
        known = (sender, message_id)
        with self._verdicts_lock:
            verdict = self._verdicts.get(known)
        if verdict is None:
            self._broker.publish(rank, _RECEIPT, message_id, json.dumps((_ARRIVED, "")).encode(), _RECEIPT_LIFE)
            verdict = self._judge(rank, sender, kind, message_id, payload)
            with self._verdicts_lock:
                if verdict[0] not in (_AGAIN, _OTHERS):
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
            kinds = {PostponedError: _AGAIN, AnothersError: _OTHERS}
            return kinds.get(type(refused), _REFUSED), peer_text(refused)
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
        until = time.monotonic() + _END
        with self._beginning:  # all that were begun
            threads = [each for at_work in self._at_work.values() for each in at_work]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))  # the last receipts go out first
        self._broker.close()
