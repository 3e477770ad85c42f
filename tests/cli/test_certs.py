"""``calfat certs``: who is certified for what, and a broker whose rules hold with the real mosquitto."""

from __future__ import annotations

import ipaddress
import shlex
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from paho.mqtt import client as mqtt

from tests.cli.runner import calfat
from tests.programs import MOSQUITTO
from tests.silo.broker import needs_mosquitto, running
from tests.silo.federation import free_ports, wait_for

PATIENCE = 60.0  # seconds
RUN = "calfat/trial"


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def usages(certificate: x509.Certificate) -> set[x509.ObjectIdentifier]:
    return set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def common_name(certificate: x509.Certificate) -> str:
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)


def test_a_party_is_certified_for_its_rank_and_for_both_ends(tmp_path: Path) -> None:
    assert calfat("certs", str(tmp_path / "c"), "--clients", "1", "--days", "3").code == 0
    root = read(tmp_path / "c" / "ca.pem")
    root.verify_directly_issued_by(root)
    for rank in (0, 1):
        party = read(tmp_path / "c" / f"rank-{rank}.pem")
        party.verify_directly_issued_by(root)
        assert common_name(party) == f"rank-{rank}.calfat"
        assert [each.value for each in names(party)] == [f"rank-{rank}.calfat"]
        assert {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH} <= usages(party)
        assert not party.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert (party.not_valid_after_utc - party.not_valid_before_utc).days == 3


@pytest.mark.parametrize(
    ("broker", "port", "name"),
    [
        ("fl.example.org", 8883, "fl.example.org"),
        ("fl.example.org:1884", 1884, "fl.example.org"),
        ("192.0.2.7:8884", 8884, ipaddress.ip_address("192.0.2.7")),
        ("[2001:db8::7]", 8883, ipaddress.ip_address("2001:db8::7")),
    ],
)
def test_a_broker_is_certified_for_its_address_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broker: str, port: int, name: object
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a folder"
    done = calfat("certs", "a folder", "--clients", "1", "--broker", broker)
    assert done.code == 0
    address = broker if broker.endswith(str(port)) else f"{broker}:{port}"
    assert done.out.splitlines()[-2:] == [
        f"    mqtt: {{broker: '{address}'}}",
        "Start the broker: mosquitto -c 'a folder/mosquitto.conf'",
    ]
    certificate = read(folder / "broker.pem")
    certificate.verify_directly_issued_by(read(folder / "ca.pem"))
    assert [each.value for each in names(certificate)] == [name]
    assert ExtendedKeyUsageOID.SERVER_AUTH in usages(certificate)
    assert common_name(certificate) == "calfat broker", "the broker would be taken for a party"
    settings = (folder / "mosquitto.conf").read_text().splitlines()
    files = [Path(line.split(" ", 1)[1]) for line in settings if "file " in line]
    assert all(file.is_absolute() and file.is_file() for file in files)
    assert {f"listener {port}", f"keyfile {folder}/broker.key", "require_certificate true"} <= set(settings)
    for private in ("ca.key", "rank-0.key", "rank-1.key", "broker.key", "mosquitto.acl"):
        assert (folder / private).stat().st_mode & 0o077 == 0, private


@pytest.mark.parametrize("folder", ["certs", "a, b: c", "it's", "é" + "long " * 30])
def test_what_is_to_stand_in_the_recipe_is_yaml_whatever_the_folder_is_called(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = calfat("certs", folder, "--clients", "1", "--broker", "[::1]").out
    section, _, command = said.partition("In the recipe:\n")[2].partition("Start the broker: ")
    tls = {"ca": f"{folder}/ca.pem", "cert": f"{folder}/rank-{{rank}}.pem", "key": f"{folder}/rank-{{rank}}.key"}
    assert yaml.safe_load(section) == {"calfat": {"silo": {"tls": tls, "mqtt": {"broker": "[::1]:8883"}}}}
    assert len(section.splitlines()) == 4
    assert shlex.split(command) == ["mosquitto", "-c", f"{folder}/mosquitto.conf"]


@pytest.mark.parametrize(
    "broker",
    [
        "",
        "two words",
        "fl.example.org:",
        "a.org:70000",
        "::1",
        "bücher.example",
        "me@a.org",
        "Rank-1.calfat",
        "-a_b.org",
    ],
)
def test_what_is_no_address_is_refused_before_anything_is_written(tmp_path: Path, broker: str) -> None:
    done = calfat("certs", str(tmp_path / "c"), "--clients", "1", "--broker", broker)
    assert (done.code, done.out) == (2, "")
    why = (
        ":8883: no certificate can be made for this host (" if broker == "-a_b.org" else ": expected HOST or HOST:PORT"
    )
    assert done.err.startswith(f"error: --broker {broker}{why}")
    assert not (tmp_path / "c").exists()


def test_what_makes_certificates_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trustme", None)
    done = calfat("certs", str(tmp_path / "c"), "--clients", "1")
    assert (done.code, done.out) == (2, "")
    assert done.err == ("error: making certificates needs the package trustme: pip install 'calfat-plugin[tls]'\n")


# --- with the real broker ---------------------------------------------------------------------------------------------


class Client:
    """A connection with one party's certificate, and what it has heard."""

    def __init__(self, port: int, folder: Path, rank: int) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self._connected, self._answered = threading.Event(), threading.Event()
        self._client = mqtt.Client(protocol=mqtt.MQTTv5)
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(folder / f"rank-{rank}.pem", folder / f"rank-{rank}.key")
        self._client.tls_set_context(context)
        self._client.on_connect = lambda *_: self._connected.set()
        self._client.on_subscribe = lambda *_: self._answered.set()
        self._client.on_message = lambda _, __, message: self.heard.append((message.topic, message.payload))
        self._client.connect("localhost", port)
        self._client.loop_start()
        assert self._connected.wait(PATIENCE)

    def subscribe(self, topic: str) -> None:
        self._answered.clear()
        self._client.subscribe(topic, qos=1)
        assert self._answered.wait(PATIENCE)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self._client.publish(topic, payload, qos=1, retain=retain).wait_for_publish(PATIENCE)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """The folder of certificates and the port of a broker that runs with what ``calfat certs`` wrote."""
    folder, (port,) = tmp_path_factory.mktemp("broker") / "certs", free_ports(1)
    assert calfat("certs", str(folder), "--clients", "2", "--broker", f"localhost:{port}").code == 0
    command = [str(MOSQUITTO), "-c", str(folder / "mosquitto.conf")]
    with running(command, port, folder.parent / "mosquitto.log"):
        yield folder, port


@contextmanager
def clients(broker: tuple[Path, int], *ranks: int) -> Iterator[list[Client]]:
    folder, port = broker
    opened = [Client(port, folder, rank) for rank in ranks]
    try:
        yield opened
    finally:
        for client in opened:
            client.close()


@needs_mosquitto
def test_a_party_writes_under_its_own_name_only(broker: tuple[Path, int]) -> None:
    with clients(broker, 0, 1) as (server, rank_1):
        server.subscribe(f"{RUN}/+/rank-0.calfat")
        rank_1.publish(f"{RUN}/rank-2.calfat/rank-0.calfat", b"as another", retain=True)
        rank_1.publish(f"{RUN}/rank-0.calfat/rank-0.calfat", b"as the server")
        rank_1.publish(f"{RUN}/rank-1.calfat/rank-0.calfat", b"as itself")
        wait_for(lambda: server.heard, "a message comes", PATIENCE)  # the broker keeps to the order of its sender
        server.subscribe(f"{RUN}/+/rank-0.calfat")  # would bring what it retained
        rank_1.publish(f"{RUN}/rank-1.calfat/rank-0.calfat", b"and again")
        wait_for(lambda: len(server.heard) > 1, "the second comes", PATIENCE)
        own = f"{RUN}/rank-1.calfat/rank-0.calfat"
        assert server.heard == [(own, b"as itself"), (own, b"and again")]


@needs_mosquitto
def test_a_party_reads_only_what_is_for_it(broker: tuple[Path, int]) -> None:
    with clients(broker, 0, 1, 2) as (server, rank_1, rank_2):
        for topic in ("#", f"{RUN}/+/rank-2.calfat", f"{RUN}/rank-0.calfat/#", f"{RUN}/+/rank-1.calfat"):
            rank_1.subscribe(topic)
        rank_2.subscribe(f"{RUN}/+/rank-2.calfat")
        server.publish(f"{RUN}/rank-0.calfat/rank-2.calfat", b"for 2")
        server.publish(f"{RUN}/rank-0.calfat/rank-1.calfat", b"for 1")
        wait_for(lambda: rank_1.heard and rank_2.heard, "both hear", PATIENCE)
        assert set(rank_1.heard) == {(f"{RUN}/rank-0.calfat/rank-1.calfat", b"for 1")}
        assert rank_2.heard == [(f"{RUN}/rank-0.calfat/rank-2.calfat", b"for 2")]
