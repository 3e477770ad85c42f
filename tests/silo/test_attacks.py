"""Strangers at the ports of a running federation, and a client that lies: refused, logged, and the run unharmed."""

from __future__ import annotations

import pickle
import random
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.silo.certificates import make_certificates
from tests.silo.federation import Federation, assert_same_bits
from tests.silo.hostile import FINISH, GIGABYTES, MODEL, STATUS, UPDATE, WEIGHTS, Payload, message


def request(sender: int, content: bytes) -> bytes:
    """FedML's protobuf ``CommRequest``."""
    length, size = b"", len(content)
    while size >= 128:
        length, size = length + bytes([size % 128 + 128]), size // 128
    return bytes([8, sender, 18]) + length + bytes([size]) + content


@contextmanager
def line_to(port: int, credentials: grpc.ChannelCredentials | None = None, name: str = "") -> Iterator[Any]:
    """A function that sends raw bytes to a party and returns (status, words)."""
    target, options = f"127.0.0.1:{port}", [("grpc.ssl_target_name_override", name)] if name else []
    channel = grpc.secure_channel(target, credentials, options) if credentials else grpc.insecure_channel(target)
    with channel:
        method = channel.unary_unary("/gRPCCommManager/sendMessage")

        def send(raw: bytes) -> tuple[str, str]:
            try:
                method(raw)
            except grpc.RpcError as error:
                return error.code().name, error.details()
            return "OK", ""

        yield send


@pytest.mark.slow
def test_strangers_are_refused_and_the_run_continues(tmp_path: Path) -> None:
    stranger = random.Random(1)
    update = {"msg_type": UPDATE, "sender": 1, "receiver": 0, "round": 2, "num_samples": 9, "ticket": "0" * 32}
    model = {"msg_type": MODEL, "sender": 0, "receiver": 1, "round": 9, "used": 0, "ticket": "t", "session": "s"}
    no_recipe = {
        "msg_type": STATUS,
        "sender": 1,
        "receiver": 0,
        "session": "s",
        "recipe": "r",
        "client_status": "ONLINE",
    }
    refused = "FAILED_PRECONDITION"
    with Federation(tmp_path) as federation:
        federation.start(0, 1)
        federation.start(2, hang_in=2)
        federation.wait_until_hanging(2)
        with line_to(federation.ports[0]) as server, line_to(federation.ports[1]) as client:
            code = request(1, pickle.dumps(Payload(tmp_path / "executed")))
            for send in (server, client):
                assert send(code)[0] == refused
            assert server(stranger.randbytes(5000)) == ("INVALID_ARGUMENT", "not a request")
            assert server(request(1, stranger.randbytes(5000)))[0] == refused
            assert server(request(1, b""))[1] == "0 bytes that claim a header of 0"
            assert server(request(1, GIGABYTES.to_bytes(8, "little") + b"{}"))[1] == (
                f"10 bytes that claim a header of {GIGABYTES}"
            )
            claimed = server(request(1, message(update, WEIGHTS)))[1]
            assert claimed.startswith(f"tensor 'w' claims bytes 0 to {GIGABYTES} of ")
            assert server(request(1, message(update)[:-7]))[0] == refused
            assert server(b"\0" * 10_000_000)[0] == "RESOURCE_EXHAUSTED"
            for changes, said in (
                ({}, "an update of rank 1 without the ticket that this rank was sent"),
                ({"sender": 7}, "it claims to come from rank 7"),
                ({"msg_type": 4}, "a message of type 4 is not for a server"),
                ({"hidden": "x"}, "unknown field 'hidden'"),
            ):
                assert server(request(1, message({**update, **changes})))[1] == said
            assert server(request(1, message(no_recipe)))[1].startswith(
                "it runs another recipe, seed or version than the"
            )
            goodbye = {"msg_type": FINISH, "sender": 0, "receiver": 1}
            for content in (model, goodbye):
                assert client(request(0, message(content)))[1] == "it does not answer this client's session"
        with socket.create_connection(("127.0.0.1", federation.ports[0])) as raw:
            raw.sendall(stranger.randbytes(5000))
        federation.let_go()
        simulated = federation.simulate()
        federation.finish()
        assert_same_bits(federation.model(), simulated)
        assert not (tmp_path / "executed").exists()
        assert "message from 127.0.0.1:" in federation.log(0)
        assert federation.log(0).count(" refused: ") == 13
        assert re.search(
            r"message from 127\.0\.0\.1:\d+ refused: broken off, or larger than the \d+ bytes that are allowed",
            federation.log(0),
        )
        assert federation.log(1).count(" refused: ") == 3


def test_lying_client_is_refused_by_name_and_the_others_continue(tmp_path: Path) -> None:
    with Federation(tmp_path, aggregator={"name": "scaffold"}, train_args={"comm_round": 5}) as federation:
        federation.start(0, 1)
        federation.start(2, lies=True)
        federation.finish()
        rows = federation.rounds()
    name = "classifier.weight"
    reasons = [row["refused"].removeprefix("1: ") for row in rows]
    shape = reasons[1].partition(" has shape ")[2]
    assert [row["clients"] for row in rows] == ["0"] * 5
    assert "nan or inf" in reasons[0]
    assert reasons[1].startswith(f"client 1: tensor '{name}' has shape (")
    assert "expected (10, " in shape
    assert reasons[2] == f"client 1: tensor '{name}' is missing"
    assert reasons[3].startswith(
        f"client 1: SCAFFOLD's scaffold/change/: tensor '{name}' has shape (3,), expected (10, "
    )
    assert "metric/loss" in reasons[4]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("own", "foreign"):
        make_certificates(folder / name, 2)
    return folder


def credentials(folder: Path, rank: int | None, trust: Path) -> grpc.ChannelCredentials:
    """What the holder of ``rank``'s certificate (None: of none) connects with."""
    mine = (
        () if rank is None else ((folder / f"rank-{rank}.key").read_bytes(), (folder / f"rank-{rank}.pem").read_bytes())
    )
    return grpc.ssl_channel_credentials((trust / "ca.pem").read_bytes(), *mine)


def test_mutual_tls_lets_in_nobody_else(tmp_path: Path, certificates: Path) -> None:
    """Strangers do not get past the handshake of the only port; who does speaks for its own rank alone."""
    own, foreign = certificates / "own", certificates / "foreign"
    tls = {"ca": f"{own}/ca.pem", "cert": f"{own}/rank-{{rank}}.pem", "key": f"{own}/rank-{{rank}}.key"}
    hello = request(2, message({"msg_type": STATUS, "sender": 2, "receiver": 0, "session": "s", "recipe": "r"}))
    with Federation(tmp_path, silo={"tls": tls}) as federation:
        federation.start(0, 1)
        federation.start(2, hang_in=2)
        federation.wait_until_hanging(2)
        name, port = "rank-0.calfat", federation.ports[0]
        assert listening_ports(federation.processes[0].pid) == {port}
        with line_to(port, credentials(own, None, trust=own), name) as without_certificate:
            assert without_certificate(hello)[0] == "UNAVAILABLE"
        with line_to(port, credentials(foreign, 2, trust=own), name) as of_another_authority:
            assert of_another_authority(hello)[0] == "UNAVAILABLE"
        with line_to(port) as in_plain_text:
            assert in_plain_text(hello)[0] == "UNAVAILABLE"
        with line_to(port, credentials(own, 1, trust=own), name) as rank_1:
            assert rank_1(hello) == ("FAILED_PRECONDITION", "it claims to come from rank 2")
        federation.let_go()
        simulated = federation.simulate()
        federation.finish()
        assert_same_bits(federation.model(), simulated)
        log = federation.log(0)
    assert "warning: " not in federation.output(0) + federation.output(1) + federation.output(2)
    assert re.search(r"message from 127\.0\.0\.1:\d+ refused: it claims to come from rank 2", log)
    assert log.count(" refused: ") == 1


def listening_ports(pid: int) -> set[int]:
    found = psutil.Process(pid).net_connections("inet")
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}
