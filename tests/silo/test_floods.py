"""Strangers that take and hold: connections, descriptors, threads, lines of the log. The run ends well all the same."""

from __future__ import annotations

import fcntl
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from calfat_plugin.errors import HostError
from calfat_plugin.host import launch  # noqa: F401 (brings in FedML the way that works)
from calfat_plugin.host.transports import grpc as transports
from calfat_plugin.host.transports import guards
from calfat_plugin.host.transports.base import UnreachableError
from calfat_plugin.host.transports.certificates import Certificates
from calfat_plugin.host.transports.message import Message, encode
from calfat_plugin.recipe.silo import Address, Silo
from tests.environment import bare
from tests.silo.certificates import make_certificates
from tests.silo.federation import Federation, free_ports, wait_for
from tests.snapshot import TextSnapshot

METHOD = "/gRPCCommManager/sendMessage"


@contextmanager
def silent_streams(
    port: int, count: int, proof: grpc.ChannelCredentials | None = None, per_connection: int = 8
) -> Iterator[list[Any]]:
    """Calls that are opened and send nothing."""
    ended = threading.Event()

    def nothing() -> Iterator[bytes]:
        ended.wait()
        yield from ()

    with ExitStack() as stack:
        calls = []
        for number in range(count):
            if number % per_connection == 0:
                options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", "rank-0.calfat")]
                target = f"127.0.0.1:{port}"
                channel = stack.enter_context(
                    grpc.secure_channel(target, proof, options) if proof else grpc.insecure_channel(target, options)
                )
            calls.append(channel.stream_unary(METHOD).future(nothing()))
        stack.callback(ended.set)
        yield calls


def listens(port: int) -> bool:
    with socket.socket() as each:
        return each.connect_ex(("127.0.0.1", port)) == 0


def test_silent_streams_do_not_hold_all_threads(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation:
        federation.start(0)
        wait_for(lambda: listens(federation.ports[0]), "the server listens")
        with silent_streams(federation.ports[0], 80):
            federation.start(1, 2)
            federation.finish()
        assert "calls at once without a message" in federation.log(0)
        assert [row["clients"] for row in federation.rounds()] == ["0 1"] * 3


# --- the transport alone ----------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, int]]:
    monkeypatch.setattr(transports, "_FIRST_MESSAGE", 0.5)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    ports = free_ports(3)
    transport = transports.GRPCTransport(0, Silo(parties=tuple(f"127.0.0.1:{port}" for port in ports)), 10_000)
    with transport:
        yield transport, ports[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_call_without_a_message_is_ended_in_time(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with silent_streams(server[1], 1) as (call,):
        with pytest.raises(grpc.RpcError) as raised:
            call.result(timeout=60)
        assert raised.value.code() is grpc.StatusCode.CANCELLED
    wait_for(lambda: caplog.messages, "the log")
    assert caplog.messages[0].endswith(" refused: no whole message within 1 s")


def test_a_party_with_a_certificate_has_four_waiting_calls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However many it opens, the others' share of the threads stays theirs."""
    caplog.set_level(logging.WARNING)
    tls = make_certificates(tmp_path / "c", 1)
    addresses = tuple(Address("127.0.0.1", port) for port in free_ports(2))
    files = Certificates.read(tls, 1)
    proof = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
    with (
        transports.GRPCTransport(0, Silo(parties=tuple(map(str, addresses)), tls=tls), 10_000),
        silent_streams(addresses[0].port, 16, proof) as calls,
    ):
        wait_for(lambda: sum(call.done() for call in calls) == 12, "all but four are ended")
        wait_for(lambda: len(caplog.messages) >= 12, "the log")  # a call may be ended before its line is written
        assert [message.partition(" refused: ")[2] for message in caplog.messages] == [
            "more than 4 calls at once without a message"
        ] * 12
        with ExitStack() as stack:
            for _ in range(80):
                stack.enter_context(socket.create_connection(addresses[0]))
            wait_for(lambda: "connections of its address do nothing" in caplog.text, "the surplus is closed")
            time.sleep(1)  # and whoever else would be closed with it
        assert sum(call.done() for call in calls) == 12  # older than all of them, and a party's


@pytest.mark.parametrize("secure", [True, False])
def test_a_party_has_nine_connections_and_locks_nobody_out(
    secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It opens as many as there is room for and calls over each; its oldest are closed, and another party comes in.

    Without certificates an address may be that of all parties: here it has eight connections beside one for each.
    """
    caplog.set_level(logging.WARNING)
    room = 40
    monkeypatch.setattr(transports, "connections_allowed", lambda num_parties: room)
    addresses = tuple(Address("127.0.0.1", port) for port in free_ports(3))
    tls, port = make_certificates(tmp_path / "c", 2), addresses[0].port
    silo = Silo(parties=tuple(map(str, addresses)), tls=tls if secure else None)
    with transports.GRPCTransport(0, silo, 10_000) as server, ExitStack() as stack:
        if secure:
            files = Certificates.read(tls, 1)
            proof = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
            stack.enter_context(silent_streams(port, room, proof, per_connection=1))
        else:
            request = transports.pb.CommRequest(client_id=1, message=encode(Message(5, 1, 0))).SerializeToString()
            for _ in range(room // 2):
                options = [("grpc.use_local_subchannel_pool", 1)]
                channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options))
                channel.stream_unary(METHOD)(iter([request]), timeout=60)
        most = 9 if secure else 11
        wait_for(lambda: f"more than {most} connections of one party" in caplog.text, "the surplus is closed")
        with transports.GRPCTransport(2, silo, 10_000) as other:
            wait_for(lambda: _gets_through(other), "the other party comes in")
        wait_for(lambda: len(server._connections._parties) <= most + secure, "the party has no more than its own")


def _gets_through(client: Any) -> bool:
    try:
        client.send_now(Message(5, 2, 0), 5)
    except UnreachableError:
        return False
    return True


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def test_a_call_that_sends_slowly_is_ended_in_time(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A message of 1,000 bytes, of which one arrives every 50 ms."""
    caplog.set_level(logging.WARNING)
    headers = {
        **{":method": "POST", ":scheme": "http", ":path": METHOD, ":authority": "x"},
        **{"content-type": "application/grpc", "te": "trailers"},
    }
    block = b"".join(
        bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in headers.items()
    )
    with closing(socket.create_connection(("127.0.0.1", server[1]))) as slow:
        slow.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, block))
        slow.sendall(frame(0, 0, 1, b"\0" + (1000).to_bytes(4, "big")))
        for _ in range(1000):
            slow.sendall(frame(0, 0, 1, b"x"))
            time.sleep(0.05)
            if caplog.messages:
                break
    assert caplog.messages[0].endswith(" refused: no whole message within 1 s")


def test_a_party_that_has_called_stays_connected(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without certificates, too: its connection is older than all the idle ones, and is not closed for them."""
    caplog.set_level(logging.WARNING)
    transport, port = server
    with (
        transports.GRPCTransport(1, Silo(parties=tuple(map(str, transport._parties))), 10_000) as client,
        ExitStack() as stack,
    ):
        client.send_now(Message(5, 1, 0), 60)
        used = connections_to(port)
        for _ in range(80):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        wait_for(lambda: "connections of its address do nothing" in caplog.text, "the surplus is closed")
        time.sleep(1)
        assert len(used) == 1
        assert used <= connections_to(port)


def connections_to(port: int) -> set[int]:
    """Local ports of this process's connections to ``port``."""
    found = psutil.Process().net_connections("inet")
    return {each.laddr.port for each in found if each.status == "ESTABLISHED" and each.raddr.port == port}


def test_parties_of_one_address_have_their_own_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind one router, each with a certificate: who opens too many loses its own oldest, and no other's."""
    closed: list[str] = []
    watch = guards.ConnectionGuard(1, 3, 2000, lambda peer, reason: closed.append(f"{peer}: {reason}"))
    peers = [("10.0.0.9", port) for port in range(100, 120)]
    open_now = peers[:18]
    monkeypatch.setattr(watch, "_connections", lambda: ((peer, -1) for peer in open_now))
    for number, (host, port) in enumerate(peers):
        watch.note_party(f"{host}:{port}", f"[{1 + number % 2}]", 1)
    watch.sweep()
    assert closed == []
    open_now.append(peers[18])
    watch.note_party("10.0.0.9:118", "[1]", 1)  # the sweep has forgotten it: it was not open
    watch.sweep()
    assert closed == ["10.0.0.9:100: more than 9 connections of one party"]


def test_a_client_that_has_died_has_no_address_any_more() -> None:
    """gRPC gives an empty one then, in the thread that answers it."""
    closed: list[str] = []
    watch = guards.ConnectionGuard(1, 3, 2000, lambda peer, reason: closed.append(peer))
    watch.note_party("", "", 1)
    watch.sweep()
    assert closed == []


LOCK = "import fcntl; fcntl.lockf(open({file!r}, 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def test_a_look_at_the_connections_leaves_this_process_its_locks(tmp_path: Path) -> None:
    """POSIX locks, as SQLite takes them, end with the first handle on the file that is closed."""
    watch = guards.ConnectionGuard(1, 3, 2000, lambda peer, reason: None)
    other = [sys.executable, "-c", LOCK.format(file=str(tmp_path / "database"))]
    with (tmp_path / "database").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        watch.sweep()
        refused = subprocess.run(other, env=bare(), stderr=subprocess.PIPE, text=True)
        assert "BlockingIOError" in refused.stderr
    assert subprocess.run(other, env=bare()).returncode == 0


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "parties", "room", "raised"),
    [
        ((256, 4096), 3, 1027, 4096),
        ((1024, 1024), 3, 1024 - 256 - 3, None),
        ((1024, resource.RLIM_INFINITY), 100, 1124, 65_536),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 3, 1027, None),
        ((100_000, 200_000), 3, 1027, None),
    ],
)
def test_room_for_connections(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], parties: int, room: int, raised: int | None
) -> None:
    made: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: made.append(new[0]))
    assert guards.connections_allowed(parties) == room
    assert made == ([] if raised is None else [raised])


def test_too_few_descriptors_for_the_parties(monkeypatch: pytest.MonkeyPatch, snapshot: TextSnapshot) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (512, 512))
    with snapshot.raises(HostError):
        guards.connections_allowed(100)


def test_the_greediest_caller_loses_its_oldest_call() -> None:
    ended: list[str] = []
    calls = guards.CallGuard(capacity=5, per_caller=3, seconds=60)
    with ExitStack() as stack:
        for name in ("a1", "a2", "a3", "b1", "b2"):
            stack.enter_context(calls.waiting(name[0], lambda name=name: ended.append(name)))
        assert ended == []
        stack.enter_context(calls.waiting("a", lambda: None))  # one more than a caller may have
        assert ended == ["a1"]
        stack.enter_context(calls.waiting("c", lambda: None))  # one more than all may have
        assert ended == ["a1", "a2"]
