"""The door by itself: bytes go through whole, and strangers are turned away without harm to the others."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from calfat_plugin.cli.certs import make_certificates
from calfat_plugin.errors import HostError
from calfat_plugin.host.transports import tls_door
from calfat_plugin.host.transports.certificates import Certificates
from calfat_plugin.host.transports.tls_door import Caller, TLSDoor
from calfat_plugin.recipe.silo import TLSSettings
from tests.silo.federation import wait_for

MEGABYTES = 16_000_000


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "c"
    make_certificates(folder, 1, 1)
    return folder


def server_context(folder: Path) -> ssl.SSLContext:
    files = TLSSettings(ca=f"{folder}/ca.pem", cert=f"{folder}/rank-0.pem", key=f"{folder}/rank-0.key")
    return Certificates.read(files, 0).server_context()


def client_context(folder: Path) -> ssl.SSLContext:
    files = TLSSettings(ca=f"{folder}/ca.pem", cert=f"{folder}/rank-1.pem", key=f"{folder}/rank-1.key")
    return Certificates.read(files, 1).client_context()


@contextmanager
def echo(door_of: Path) -> Iterator[tuple[TLSDoor, int, list[Caller | None]]]:
    """A door before a server that sends back what it gets; gives the door, its port and the callers that were seen."""
    seen: list[Caller | None] = []
    with socket.create_server(("127.0.0.1", 0)) as backend, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        door = TLSDoor("127.0.0.1", port, server_context(door_of), backend.getsockname()[1])

        def answer(connection: socket.socket, source_port: int) -> None:
            with connection:
                data = connection.recv(65536)
                seen.append(door.caller(source_port))
                while data:
                    connection.sendall(data)
                    data = connection.recv(65536)

        def accept() -> None:
            while True:
                try:
                    connection, address = backend.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection, address[1]), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield door, port, seen
        finally:
            door.close()
            door.close()


def connect(port: int, folder: Path) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", port), 20)
    return client_context(folder).wrap_socket(plain, server_hostname="rank-0.calfat")


def test_bytes_go_through_whole_in_both_directions(certificates: Path) -> None:
    """Far more than the buffers hold, so that the door has to hold back a side that is faster than the other."""
    sent = random.Random(0).randbytes(MEGABYTES)

    async def send_and_receive(port: int) -> tuple[bytes, int]:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client_context(certificates), server_hostname="rank-0.calfat"
        )
        writer.write(sent)
        await asyncio.sleep(0.5)  # nobody reads the answer yet
        received = await reader.readexactly(len(sent))
        own_port = writer.get_extra_info("sockname")[1]
        writer.close()
        return received, own_port

    with echo(certificates) as (door, port, seen):
        received, own_port = asyncio.run(send_and_receive(port))
        assert received == sent
        assert seen == [Caller(f"127.0.0.1:{own_port}", frozenset({"rank-1.calfat"}))]
        wait_for(lambda: not door._callers, "the caller is forgotten")


def test_strangers_are_turned_away_by_name_and_the_others_stay(
    certificates: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_door, "_HANDSHAKE", 0.5)
    caplog.set_level(logging.WARNING)
    with echo(certificates) as (_, port, seen), connect(port, certificates) as friend:
        friend.sendall(b"before")
        assert friend.recv(6) == b"before"
        reasons = {}
        for name, first_words in {"talker": random.Random(1).randbytes(500), "silent": b"", "gone": None}.items():
            stranger = socket.create_connection(("127.0.0.1", port), 20)
            address = f"127.0.0.1:{stranger.getsockname()[1]}"
            if first_words is None:
                stranger.close()
            else:
                stranger.sendall(first_words)
            line = wait_for(lambda address=address: [text for text in caplog.messages if address in text], name)[0]
            reasons[name] = line.removeprefix(f"connection from {address} refused: ")
            stranger.close()
        assert reasons == {
            "talker": "wrong version number",
            "silent": "ssl handshake is taking longer than 0.5 seconds: aborting the connection",
            "gone": "it hung up",
        }
        friend.sendall(b"after")
        assert friend.recv(5) == b"after"
        assert len(seen) == 1, "none of them reached what is behind the door"


def test_no_more_connections_than_it_can_bear(
    certificates: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_door, "_MOST_CONNECTIONS", 2)
    with echo(certificates) as (_, port, _), connect(port, certificates) as friend, socket.socket() as silent:
        friend.sendall(b"x")
        assert friend.recv(1) == b"x"
        silent.connect(("127.0.0.1", port))
        with socket.create_connection(("127.0.0.1", port), 20) as third:
            assert third.recv(1) == b""
        assert caplog.messages[-1].endswith(" refused: 2 are open")


def test_address_that_is_taken_is_an_error(certificates: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        TLSDoor("127.0.0.1", other.getsockname()[1], server_context(certificates), 1)


def test_files_that_do_not_belong_together(certificates: Path) -> None:
    ca, cert, key = (f"{certificates}/{name}" for name in ("ca.pem", "rank-0.pem", "rank-1.key"))
    with pytest.raises(HostError) as caught:
        Certificates.read(TLSSettings(ca=ca, cert=cert, key=key), 0)
    assert str(caught.value).startswith(f"calfat.silo.tls: {ca}, {cert} and {key} cannot be used together: ")
    assert str(caught.value).endswith("`calfat certs DIR` makes a test set.")
