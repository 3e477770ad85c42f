"""MQTT_S3 with a real broker and a real store: the same model, strangers refused, servers that die and come back."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import pickle
import queue
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from paho.mqtt import client as mqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from calfat_plugin.errors import HostError
from calfat_plugin.host.transports import mqtt as transports
from calfat_plugin.host.transports import object_store
from calfat_plugin.host.transports.base import AnothersError, UnreachableError
from calfat_plugin.host.transports.broker import Broker
from calfat_plugin.host.transports.message import Message, RefusedError, encode
from calfat_plugin.host.transports.mqtt import MQTTTransport
from calfat_plugin.host.transports.object_store import ObjectStore
from calfat_plugin.recipe.silo import MQTTSettings, S3Settings, Silo
from tests.silo.broker import BUCKET, CREDENTIALS, broker, broker_and_store, needs_mosquitto, shut_port, store
from tests.silo.certificates import broker_settings, make_certificates
from tests.silo.federation import PATIENCE, Federation, assert_same_bits, assert_they_sleep, free_ports, wait_for
from tests.silo.hostile import GIGABYTES, MODEL, STATUS, UPDATE, Payload, message

pytestmark = needs_mosquitto

OVER_MQTT = {"comm_args": {"backend": "MQTT_S3"}}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Broker and store of all tests that leave them as they are."""
    with broker_and_store(tmp_path_factory.mktemp("services")) as found:
        yield found


@pytest.fixture
def silo(services: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """What belongs below ``calfat.silo``, with a run of the test's own."""
    return {**services, "mqtt": {**services["mqtt"], "run": tmp_path.name.replace("_", "-")}}


def at(port: int) -> dict[str, Any]:
    return {"broker": f"127.0.0.1:{port}"}


class Stranger:
    """Someone at the broker who publishes what they like, and hears what is answered to the name they took."""

    def __init__(self, port: int, name: str, run: str) -> None:
        self.name, self._run = name, run
        self._said: set[str] = set()
        self._receipts: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._client = mqtt.Client(protocol=mqtt.MQTTv5)
        self._client.on_message = self._listen
        self._client.connect("127.0.0.1", port)
        self._client.subscribe(f"calfat/{run}/+/{name}", qos=1)
        self._client.loop_start()

    def _listen(self, client: Any, userdata: Any, message: Any) -> None:
        if message.properties.CorrelationData.decode() in self._said:  # and not what is for the name's real bearer
            self._receipts.put(json.loads(message.payload))

    def say(
        self,
        to: str,
        kind: str,
        payload: bytes,
        *,
        message_id: str = "",
        retain: bool = False,
        as_: str = "",
        more: tuple[str, str] | None = None,
    ) -> None:
        properties = Properties(PacketTypes.PUBLISH)
        message_id = message_id or os.urandom(8).hex()
        self._said.add(message_id)
        properties.CorrelationData = message_id.encode()
        properties.UserProperty = ("calfat", kind)
        if more is not None:
            properties.UserProperty = more
        topic = f"calfat/{self._run}/{as_ or self.name}/{to}"
        self._client.publish(topic, payload, qos=1, retain=retain, properties=properties).wait_for_publish(PATIENCE)

    def verdict(self) -> list[str]:
        """The next receipt that is not just that the message has arrived."""
        while True:
            answer = self._receipts.get(timeout=PATIENCE)
            if answer[0] != "arrived":
                return answer

    def leave(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


@contextmanager
def stranger_at(silo: dict[str, Any], name: str) -> Iterator[Stranger]:
    stranger = Stranger(int(silo["mqtt"]["broker"].partition(":")[2]), name, silo["mqtt"].get("run", "run"))
    try:
        yield stranger
    finally:
        stranger.leave()


@pytest.mark.slow
def test_strangers_at_the_broker_are_refused_and_the_run_continues(tmp_path: Path) -> None:
    """A stranger that an open broker lets speak as rank 1: nothing it sends is executed, believed or waited for."""
    dice = random.Random(1)
    update = {"msg_type": UPDATE, "sender": 1, "receiver": 0, "round": 2, "num_samples": 9, "ticket": "0" * 32}
    content = message(update)
    with (
        broker_and_store(tmp_path / "services") as silo,
        Federation(tmp_path / "run", silo=silo, **OVER_MQTT) as federation,
        stranger_at(silo, "rank-1.calfat") as stranger,
    ):
        objects = boto3.client("s3", endpoint_url=silo["s3"]["endpoint"], region_name="us-east-1")
        stranger.say("rank-0.calfat", "message", b"of an earlier run", retain=True)
        federation.start(0, 1)
        federation.start(2, hang_in=2)
        federation.wait_until_hanging(2)

        def told(kind: str, payload: bytes, message_id: str = "") -> list[str]:
            stranger.say("rank-0.calfat", kind, payload, message_id=message_id)
            return stranger.verdict()

        def announced(num_bytes: Any, sha256: str, message_id: str = "") -> list[str]:
            return told("object", json.dumps({"bytes": num_bytes, "sha256": sha256}).encode(), message_id)

        assert told("message", pickle.dumps(Payload(tmp_path / "executed")))[0] == "refused"
        assert told("message", dice.randbytes(5000))[0] == "refused"
        assert told("message", b"") == ["refused", "0 bytes that claim a header of 0"]
        assert told("message", content) == ["refused", "an update of rank 1 without the ticket that this rank was sent"]
        assert told("message", message({**update, "sender": 2})) == ["refused", "it claims to come from rank 2"]
        assert told("object", b"[[[") == ["refused", "its announcement cannot be read"]
        limit = announced(GIGABYTES, "")[1]
        assert limit.startswith(f"{GIGABYTES} bytes, ")
        assert limit.endswith(" are allowed")
        missing = announced(9, "")
        assert missing[0] == "again"
        assert missing[1].endswith("says NoSuchKey")
        key = "calfat/run/rank-1.calfat/"
        objects.put_object(Bucket=BUCKET, Key=key + "longer", Body=content + b"x")
        objects.put_object(Bucket=BUCKET, Key=key + "other", Body=content)
        size, digest = len(content), hashlib.sha256(content).hexdigest()
        assert announced(size, digest, "longer") == [
            "refused",
            f"its object has {size + 1} bytes, {size} were announced",
        ]
        assert announced(size, "0" * 64, "other") == [
            "refused",
            "its object is not the one that was announced (SHA-256)",
        ]
        assert announced(size, digest, "other")[1].startswith("its object is not"), "a verdict stands"

        stranger.say("rank-0.calfat", "message", content, as_="rank-9.calfat")
        stranger.say("rank-0.calfat", "message", content, as_="nobody")
        stranger.say("rank-0.calfat", "gift", content)
        stranger.say("rank-0.calfat", "receipt", b"\xff\xff")
        stranger.say("rank-0.calfat", "message", content, message_id="../../key")
        federation.let_go()
        simulated = federation.simulate()
        federation.finish()
        assert_same_bits(federation.model(), simulated)
        assert not (tmp_path / "executed").exists()
        log = federation.log(0)
        left = [entry["Key"] for entry in objects.list_objects_v2(Bucket=BUCKET)["Contents"]]
    for said in (
        "message from rank-1.calfat refused: it claims to come from rank 2",
        "message from 'rank-1.calfat' refused: the broker has kept it from an earlier run",
        "message from 'rank-9.calfat' refused: no peer of this party has that name",
        "message from 'nobody' refused: no peer of this party has that name",
        "refused: it is of no kind that we know",
        "refused: it has no message id",
    ):
        assert said in log
    assert log.count(" refused: ") == 15
    assert left == [key + "longer", key + "other"], "all that the parties themselves stored is gone"


@contextmanager
def party(silo: dict[str, Any], rank: int) -> Iterator[MQTTTransport]:
    """The transport of one of three parties, in this process."""
    places = Silo(mqtt=MQTTSettings(**silo["mqtt"]), s3=S3Settings(**silo["s3"]), start_deadline=PATIENCE)
    with MQTTTransport(rank, 3, places, 1_000_000) as transport:
        yield transport


def status(sender: int) -> Message:
    return Message(STATUS, sender, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_message_that_the_library_cannot_read_deafens_nobody(
    silo: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that reads dies of U+FEFF in a property, without a word."""
    with party(silo, 0) as server, party(silo, 2) as client:
        with stranger_at(silo, "rank-1.calfat") as stranger:
            stranger.say("rank-0.calfat", "message", b"", more=("\ufeff", "x"))
        wait_for(lambda: "it forwarded a message that cannot be read; trying again" in caplog.text, "it is noticed")
        client.patience = PATIENCE
        client.send_message(status(2))
        arrived = server.inbox.get(time.monotonic() + PATIENCE)
        assert arrived is not None
        assert arrived.get_sender_id() == 2


def test_one_that_sends_too_much_delays_nobody_else_and_loses_no_message(
    silo: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 has four messages at work, which last until they are let go; what comes beside them comes later."""
    let_go = threading.Event()
    held = queue.SimpleQueue[int]()

    def admit(envelope: Message) -> None:
        if envelope.get_sender_id() == 1:
            held.put(threading.get_ident())
            assert let_go.wait(PATIENCE)

    with (
        party(silo, 0) as server,
        party(silo, 1) as one,
        party(silo, 2) as other,
        ExitStack() as stack,
    ):
        stack.callback(let_go.set)
        server.admit = admit
        one.patience = other.patience = PATIENCE
        with stranger_at(silo, "rank-1.calfat") as flood:
            for _ in range(4):
                flood.say("rank-0.calfat", "message", encode(status(1)))
            assert len({held.get(timeout=PATIENCE) for _ in range(4)}) == 4
            for _ in range(50):
                flood.say("rank-0.calfat", "message", encode(status(1)))
        delivered = threading.Event()
        one.send_message(status(1), on_delivered=delivered.set)
        other.send_message(status(2))
        arrived = server.inbox.get(time.monotonic() + PATIENCE)
        assert arrived is not None
        assert arrived.get_sender_id() == 2
        assert held.empty()
        assert "message from 'rank-1.calfat' refused: too many messages at once" in caplog.text
        let_go.set()
        assert delivered.wait(PATIENCE)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None: ...


@contextmanager
def answering(handler: type[Handler]) -> Iterator[ObjectStore]:
    """A store that answers so."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield ObjectStore(S3Settings(endpoint=f"http://127.0.0.1:{server.server_port}"), "run")
        server.shutdown()


class BreaksOff(Handler):
    """A store that announces ten bytes and sends four; it has no object ``gone``."""

    def do_GET(self) -> None:
        status, sent = (404, b"<Error><Code>NoSuchKey</Code></Error>") if "/gone" in self.path else (200, b"four")
        self.send_response(status)
        self.send_header("Content-Length", "10" if status == 200 else str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)


def test_what_the_store_does_not_give_whole_is_sent_again() -> None:
    """The sender then stores it anew; a refusal would be its last word."""
    with answering(BreaksOff) as objects:
        with pytest.raises(UnreachableError, match="broke off after 4 of 10 bytes"):
            objects.fetch("rank-1.calfat", "id", 10, "")
        with pytest.raises(UnreachableError, match="says NoSuchKey"):
            objects.fetch("rank-1.calfat", "gone", 10, "")


def test_a_second_process_of_a_rank_has_no_last_word(silo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses what is for the first, which is still fetching it; alone, it is the one that answers."""
    refused = threading.Event()

    def refuse(envelope: Message) -> None:
        raise AnothersError("it does not answer this client's session")

    with party(silo, 0) as server, party(silo, 1) as second:
        second.admit = refuse
        with pytest.raises(RefusedError, match="it does not answer this client's session"):
            server.send_now(Message(MODEL, 0, 1), PATIENCE)
        with party(silo, 1) as first:
            fetch, take = first._store.fetch, second._take

            def slow(*arguments: Any) -> bytes:
                assert refused.wait(PATIENCE)
                return fetch(*arguments)

            def report(*arguments: Any) -> None:
                take(*arguments)
                refused.set()

            monkeypatch.setattr(first._store, "fetch", slow)
            monkeypatch.setattr(second, "_take", report)
            server.send_now(Message(MODEL, 0, 1, model_params={"w": torch.zeros(5000)}), PATIENCE)
            assert first.inbox.holds(frozenset({MODEL}))
        assert not second.inbox.holds(frozenset({MODEL}))


class Drips(Handler):
    """A store that gives a byte every 50 ms, of a million that were announced."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        with suppress(OSError):  # nobody reads any more
            for _ in range(400):
                self.wfile.write(b"x")
                time.sleep(0.05)


def test_a_store_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte is late by itself."""
    monkeypatch.setattr(object_store, "_FETCH_SECONDS", 0.0)
    monkeypatch.setattr(object_store, "_BYTES_PER_SECOND", 1_000_000)
    with (
        answering(Drips) as objects,
        pytest.raises(UnreachableError, match=r"the store gave \d+ of 1000000 bytes in 1 s"),
    ):
        objects.fetch("rank-1.calfat", "id", 1_000_000, "")


def test_a_party_ends_although_the_store_does_not_answer(silo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, let_go = threading.Event(), threading.Event()

    def fetch(*arguments: object) -> bytes:
        asked.set()
        let_go.wait(PATIENCE)
        raise UnreachableError

    monkeypatch.setattr(transports, "_END_SECONDS", 0.2)
    monkeypatch.setattr(ObjectStore, "fetch", fetch)
    with ExitStack() as stack:
        stack.callback(let_go.set)
        with party(silo, 0) as server, stranger_at(silo, "rank-1.calfat") as stranger:
            stranger.say("rank-0.calfat", "object", json.dumps({"bytes": 9, "sha256": ""}).encode())
            assert asked.wait(PATIENCE)
            ending = threading.Thread(target=server.stop_receive_message)
            ending.start()
            ending.join(PATIENCE / 2)
            ended = not ending.is_alive()
            let_go.set()
        assert ended


def test_broker_that_dies_and_comes_back(tmp_path: Path) -> None:
    """Every party connects again by itself, and what could not be sent meanwhile is sent."""
    at_broker, at_store = free_ports(2)
    silo = {"mqtt": at(at_broker), "s3": {"endpoint": f"http://127.0.0.1:{at_store}"}}
    with store(tmp_path, at_store), Federation(tmp_path / "run", silo=silo, **OVER_MQTT) as federation:
        with broker(tmp_path, at_broker) as process:
            federation.start(0, 1)
            federation.start(2, hang_in=2)
            federation.wait_until_hanging(2)
            process.kill()
            process.wait(PATIENCE)
        federation.let_go()
        wait_for(lambda: "trying again" in federation.log(0), "the server notices")
        with broker(tmp_path, at_broker):
            simulated = federation.simulate()
            federation.finish()
        assert_same_bits(federation.model(), simulated)
        assert [row["clients"] for row in federation.rounds()] == ["0 1"] * 3


def last_words(folder: Path, rank: int, silo: dict[str, Any]) -> str:
    """What a party says at its end, which is an error of the user's."""
    with Federation(folder, silo=silo, **OVER_MQTT) as federation:
        federation.start(rank)
        assert federation.exit_status(rank) == 2
        assert "s3cret" not in federation.output(rank) + federation.log(rank)
        return federation.output(rank).splitlines()[-1]


def test_broker_and_store_that_are_not_there(tmp_path: Path) -> None:
    with shut_port() as at_broker, shut_port() as at_store:
        silo = {"mqtt": at(at_broker), "s3": {"endpoint": f"http://127.0.0.1:{at_store}"}, "start_deadline": 2}
        assert last_words(tmp_path / "broker", 0, silo) == (
            f"error: the MQTT broker 127.0.0.1:{at_broker} (calfat.silo.mqtt.broker) did not let rank 0 in before "
            "calfat.silo.start_deadline: [Errno 111] Connection refused. Start it, or correct its address or the "
            "certificates."
        )
        (port,) = free_ports(1)
        with broker(tmp_path, port):
            found = last_words(tmp_path / "store", 0, {**silo, "mqtt": at(port), "start_deadline": 5})
        assert found.startswith(f"error: calfat.silo.s3: the store (http://127.0.0.1:{at_store}, bucket calfat): ")
        assert found.endswith("It did not answer before calfat.silo.start_deadline. Start it, or correct the endpoint.")


def test_a_host_that_cannot_be_one_is_said() -> None:
    found = Broker(Silo(mqtt=MQTTSettings(broker="a..b:1883")), 1, lambda sender, message: None)
    with pytest.raises(HostError, match=r"did not let rank 1 in before .*: .*label empty or too long"):
        found.wait(time.monotonic() + 1)
    found.close()


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file or directory"), (b"\xff", "it is not UTF-8")])
def test_a_password_that_cannot_be_read(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "secret-1"
    if content is not None:
        path.write_bytes(content)
    settings = MQTTSettings(username="party-{rank}", password_file=str(tmp_path / "secret-{rank}"))
    with pytest.raises(HostError) as raised:
        Broker(Silo(mqtt=settings), 1, lambda sender, message: None)
    assert str(raised.value) == f"calfat.silo.mqtt.password_file: {path} cannot be read ({reason})."


def test_what_the_broker_or_the_store_refuses(tmp_path: Path, silo: dict[str, Any]) -> None:
    """A password that the broker does not know, and a bucket that is not there."""
    (port,) = free_ports(1)
    (tmp_path / "passwords").write_text("")
    (tmp_path / "secret").write_text("t0p-s3cret\n")
    config = (
        f"listener {port} 127.0.0.1\nallow_anonymous false\npassword_file {tmp_path / 'passwords'}\n"
        f"user {getpass.getuser()}\n"  # as root, it would become one who cannot read the file
    )
    mine = {**at(port), "username": "party-{rank}", "password_file": str(tmp_path / "secret")}
    with broker(tmp_path, port, config):
        assert last_words(tmp_path / "run", 1, {"mqtt": mine}).startswith(
            f"error: the MQTT broker 127.0.0.1:{port} (calfat.silo.mqtt.broker) refuses rank 1: Not authorized. Check "
        )
    store = {**silo["s3"], "bucket": "elsewhere"}
    assert last_words(tmp_path / "bucket", 0, {**silo, "s3": store}).startswith(
        f"error: calfat.silo.s3: the store ({store['endpoint']}, bucket elsewhere) says NoSuchBucket. Check bucket and"
    )


@pytest.mark.slow
def test_certificates_and_access_rules_keep_everyone_in_their_place(tmp_path: Path) -> None:
    """Mutual TLS, a whole run, and a party with a certificate of another authority."""
    port, at_store = free_ports(2)
    tls = vars(make_certificates(tmp_path / "certs", 2))
    silo = {"mqtt": at(port), "s3": {"endpoint": f"http://127.0.0.1:{at_store}"}, "tls": tls}
    with (
        broker(tmp_path, port, broker_settings(tmp_path / "certs", port)),
        store(tmp_path, at_store),
        Federation(tmp_path / "run", silo=silo, train_args={"comm_round": 2}, **OVER_MQTT) as federation,
    ):
        federation.start_all()
        theirs = {
            **silo,
            "tls": {**vars(make_certificates(tmp_path / "foreign", 2)), "ca": tls["ca"]},
            "start_deadline": 2,
        }
        with Federation(tmp_path / "foreign", silo=theirs, **OVER_MQTT) as stranger:
            stranger.start(1)
            assert stranger.exit_status(1) == 2
            assert "did not let rank 1 in before" in stranger.output(1)
        federation.finish()
        assert [row["clients"] for row in federation.rounds()] == ["0 1"] * 2


def test_the_access_rules_of_the_page_keep_everyone_in_their_place(tmp_path: Path) -> None:
    """A party writes under its own name only, and reads only what is for it, whatever it asks the broker for."""
    (port,), folder, heard = free_ports(1), tmp_path / "certs", dict[int, list[tuple[str, bytes]]]()
    make_certificates(folder, 2)

    def client(rank: int, *topics: str) -> Any:
        there, opened = threading.Event(), mqtt.Client(protocol=mqtt.MQTTv5)
        opened.tls_set(f"{folder}/ca.pem", f"{folder}/rank-{rank}.pem", f"{folder}/rank-{rank}.key")
        opened.on_connect = lambda *_: opened.subscribe([(topic, mqtt.SubscribeOptions(1)) for topic in topics])
        opened.on_subscribe = lambda *_: there.set()
        hears = heard.setdefault(rank, [])
        opened.on_message = lambda _, __, message: hears.append((message.topic, message.payload))
        opened.connect("127.0.0.1", port)
        opened.loop_start()
        at_end.callback(opened.loop_stop)
        at_end.callback(opened.disconnect)
        assert there.wait(PATIENCE)
        return opened

    with broker(tmp_path, port, broker_settings(folder, port)), ExitStack() as at_end:
        run = "calfat/trial"
        server = client(0, f"{run}/+/rank-0.calfat")
        rank_1 = client(1, "#", f"{run}/+/rank-2.calfat", f"{run}/rank-0.calfat/#", f"{run}/+/rank-1.calfat")
        client(2, f"{run}/+/rank-2.calfat")
        for sender, retain in (("rank-2", True), ("rank-0", False), ("rank-1", False)):
            rank_1.publish(f"{run}/{sender}.calfat/rank-0.calfat", sender, qos=1, retain=retain)
        server.publish(f"{run}/rank-0.calfat/rank-2.calfat", b"for 2", qos=1)
        server.publish(f"{run}/rank-0.calfat/rank-1.calfat", b"for 1", qos=1)
        wait_for(lambda: all(heard.values()), "all hear something")  # the broker keeps to the order of a sender
        assert heard[0] == [(f"{run}/rank-1.calfat/rank-0.calfat", b"rank-1")]
        assert set(heard[1]) == {(f"{run}/rank-0.calfat/rank-1.calfat", b"for 1")}
        assert heard[2] == [(f"{run}/rank-0.calfat/rank-2.calfat", b"for 2")]


def test_two_processes_of_a_rank_both_have_a_connection(tmp_path: Path) -> None:
    """The broker that the page sets up ends none of them: it is the server that refuses the second."""
    (port,) = free_ports(1)
    tls = make_certificates(tmp_path / "certs", 2)
    heard: dict[str, list[str]] = {"first": [], "second": []}
    with broker(tmp_path, port, broker_settings(tmp_path / "certs", port)), ExitStack() as at_end:

        def connected(rank: int, hears: list[str]) -> Broker:
            found = Broker(
                Silo(mqtt=MQTTSettings(**at(port)), tls=tls), rank, lambda sender, message: hears.append(sender)
            )
            at_end.callback(found.close)
            found.wait(time.monotonic() + PATIENCE)
            return found

        server, *clients = connected(0, []), *(connected(1, hears) for hears in heard.values())
        time.sleep(0.5)  # a connection that another of its name ends comes back a second later
        assert all(client.is_there.is_set() for client in clients)
        server.publish(1, "message", "id", b"", 60)
        wait_for(lambda: heard == {"first": ["rank-0.calfat"], "second": ["rank-0.calfat"]}, "both hear it")


def test_idle_parties_sleep(tmp_path: Path, silo: dict[str, Any]) -> None:
    """Under 5 % of a core each, server and client, while they wait for a third party."""
    with Federation(tmp_path / "run", silo=silo, **OVER_MQTT) as federation:
        federation.start(0, 1)
        wait_for(lambda: "waiting for the server" in federation.output(1), "the client waits")
        wait_for(lambda: "running 3 rounds" in federation.output(0), "the server waits")
        assert_they_sleep(federation.processes[rank].pid for rank in (0, 1))
