"""gRPC with certificates: messages arrive whole, and who has no certificate of the authority gets nowhere."""

from __future__ import annotations

import datetime
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import trustme

from calfat_plugin.errors import HostError
from calfat_plugin.host import launch  # noqa: F401 (brings in FedML the way that works)
from calfat_plugin.host.transports import grpc as transports
from calfat_plugin.host.transports.base import UnreachableError
from calfat_plugin.host.transports.certificates import Certificates, refuse_unfit_certificate
from calfat_plugin.host.transports.grpc import GRPCTransport
from calfat_plugin.host.transports.message import MODEL, ImpostorError, Message, RefusedError
from calfat_plugin.recipe.silo import Address, Silo, TLSSettings
from tests.silo.certificates import block_of_page, make_certificates, tls_of
from tests.silo.federation import free_ports

UPDATE = 3  # the host's message type
MEGABYTES = 16_000_000
LIMIT = 4 * MEGABYTES  # bytes


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "c"
    make_certificates(folder, 1)
    return folder


def silo(folder: Path, host: str = "127.0.0.1") -> Silo:
    return Silo(parties=tuple(str(Address(host, port)) for port in free_ports(2)), tls=tls_of(folder))


@contextmanager
def party(rank: int, place: Silo) -> Iterator[GRPCTransport]:
    transport = GRPCTransport(rank, place, LIMIT)
    try:
        yield transport
    finally:
        transport.stop_receive_message()


def update(sender: int = 1, receiver: int = 0, size: int = 1) -> Message:
    message = Message(UPDATE, sender, receiver)
    message.add_params(MODEL, {"w": torch.arange(float(size))})
    return message


def arrived(transport: GRPCTransport) -> Message:
    message = transport.inbox.get(time.monotonic() + 60)
    assert message is not None
    return message


def listening() -> set[tuple[str, int]]:
    """Where this process listens."""
    found = psutil.Process().net_connections("inet")
    return {
        (each.laddr.ip.removeprefix("::ffff:"), each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN
    }


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


without_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", pytest.param("::1", marks=without_ipv6)])
def test_messages_arrive_whole_in_both_directions(certificates: Path, host: str) -> None:
    place = silo(certificates, host)
    with party(0, place) as server, party(1, place) as client:
        client.send_now(update(size=MEGABYTES // 4), 60)
        assert arrived(server).get(MODEL)["w"].equal(torch.arange(float(MEGABYTES // 4)))
        server.send_now(update(0, 1), 60)
        assert arrived(client).get_sender_id() == 0


@pytest.mark.parametrize("bind", [None, "127.0.0.2"])
def test_the_port_of_the_recipe_is_the_only_one_that_listens(certificates: Path, bind: str | None) -> None:
    """A second port without TLS, if only on the loopback, would be open to every user of the machine."""
    before, place = listening(), silo(certificates)
    with party(0, replace(place, bind=bind) if bind else place):
        assert listening() - before == {(bind or place.addresses[0].host, place.addresses[0].port)}


def is_closed(stranger: socket.socket, patience: float = 20) -> bool:
    """Whether the other end closes a connection within ``patience`` seconds."""
    stranger.settimeout(patience)
    try:
        while stranger.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_strangers_are_turned_away_and_the_others_stay(
    certificates: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "_HANDSHAKE", 0.5)
    place = silo(certificates)
    with party(0, place) as server, party(1, place) as client:
        client.send_now(update(), 60)
        for first_words in (random.Random(1).randbytes(500), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b""):
            with socket.create_connection(place.addresses[0], 20) as stranger:
                stranger.sendall(first_words)
                assert is_closed(stranger), first_words
        socket.create_connection(place.addresses[0], 20).close()
        client.send_now(update(), 60)
        arrived(server)
        assert caplog.messages == []


def test_a_silent_stranger_does_not_keep_a_party_from_ending(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "_HANDSHAKE", 600.0)
    place = silo(certificates)
    with socket.socket() as silent:
        with party(0, place):
            silent.connect(place.addresses[0])
            began = time.monotonic()
        assert time.monotonic() - began < 300


def test_address_that_is_taken_is_an_error(certificates: Path) -> None:
    place = silo(certificates)
    with socket.create_server(place.addresses[0]), pytest.raises(HostError) as caught:
        GRPCTransport(0, place, LIMIT)
    assert str(caught.value).startswith(f"rank 0 cannot listen on {place.addresses[0]}: the port is taken, or ")


# --- whom a certificate lets speak ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write(folder: Path, rank: int, authority: trustme.CA, trusted: trustme.CA, *names: str, **options: object) -> None:
    """Certificate files for a party that trusts ``trusted``; the certificate is for ``names``."""
    folder.mkdir(exist_ok=True)
    issued = authority.issue_cert(*names, **options)  # type: ignore[arg-type]
    trusted.cert_pem.write_to_path(folder / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(folder / f"rank-{rank}.pem")
    issued.private_key_pem.write_to_path(folder / f"rank-{rank}.key")


@pytest.fixture
def server(tmp_path: Path, authority: trustme.CA) -> Iterator[tuple[GRPCTransport, Callable[..., GRPCTransport]]]:
    """A running server, and what makes a client whose certificate says what it is given."""
    write(tmp_path / "0", 0, authority, authority, "rank-0.calfat")
    place = silo(tmp_path / "0")
    clients: list[GRPCTransport] = []

    def client(*names: str, signed_by: trustme.CA = authority, **options: object) -> GRPCTransport:
        write(tmp_path / "1", 1, signed_by, authority, *names, **options)
        clients.append(GRPCTransport(1, replace(place, tls=tls_of(tmp_path / "1")), LIMIT))
        return clients[-1]

    with party(0, place) as transport:
        yield transport, client
        for each in clients:
            each.stop_receive_message()


Parties = tuple[GRPCTransport, Callable[..., GRPCTransport]]


@pytest.mark.parametrize(
    "names", [["rank-1.calfat"], ["somewhere.example.org", "rank-1.calfat"]], ids=["alone", "beside another"]
)
def test_a_dns_name_lets_a_party_speak_for_its_rank(server: Parties, names: list[str]) -> None:
    server[1](*names).send_now(update(), 60)
    assert arrived(server[0]).get_sender_id() == 1


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["rank-2.calfat"], {}),
        (["rank-2.calfat"], {"common_name": "rank-1.calfat"}),
        (["me@rank-1.calfat"], {}),
        (["*.calfat"], {}),
        (["x.rank-1.calfat"], {}),
        (["10.0.0.1"], {"common_name": "rank-1.calfat", "organization_name": "rank-1.calfat"}),
    ],
)
def test_nothing_else_in_a_certificate_does(
    server: Parties, names: list[str], options: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RefusedError, match="it claims to come from rank 1"):
        server[1](*names, **options).send_now(update(), 60)
    assert any(line.startswith("message from 127.0.0.1:") for line in caplog.messages)


@pytest.mark.parametrize("foreign", [True, False], ids=["of another authority", "expired"])
def test_another_certificate_is_refused(server: Parties, foreign: bool) -> None:
    yesterday = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)
    with pytest.raises(UnreachableError):
        server[1]("rank-1.calfat", **{"signed_by": trustme.CA()} if foreign else {"not_after": yesterday}).send_now(
            update(), 5
        )


def test_a_party_sends_nothing_to_who_is_not_the_server(tmp_path: Path, authority: trustme.CA) -> None:
    """Rank 2's certificate, at the address of rank 0."""
    write(tmp_path / "0", 0, authority, authority, "rank-2.calfat")
    write(tmp_path / "1", 1, authority, authority, "rank-1.calfat")
    place = silo(tmp_path / "0")
    with party(0, place) as impostor, party(1, replace(place, tls=tls_of(tmp_path / "1"))) as client:
        with pytest.raises(ImpostorError, match=r"has a certificate that is not made out to rank-0\.calfat"):
            client.send_now(update(), 60)
        assert impostor.inbox.get(time.monotonic()) is None


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_lines_of_the_page_make_certificates_of_parties(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    lines = block_of_page("# on fl.example.org", 'umask 077; mkdir -p certs; key="')
    subprocess.run(["sh", "-e"], input=lines, text=True, cwd=tmp_path, check=True, capture_output=True)
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    place = silo(folder)
    with party(0, place) as server, party(1, place) as client:
        client.send_now(update(), 5)
        assert server.inbox.get(0) is not None


def test_files_that_do_not_belong_together(certificates: Path) -> None:
    ca, cert, key = (f"{certificates}/{name}" for name in ("ca.pem", "rank-0.pem", "rank-1.key"))
    with pytest.raises(HostError, match=f"^calfat.silo.tls: {ca}, {cert} and {key} cannot be used together: "):
        Certificates.read(TLSSettings(ca=ca, cert=cert, key=key), 0)


@pytest.mark.parametrize("name", ["ca", "cert", "key"])
@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read (No such "), (b"x", "is not a PEM file.")])
def test_files_that_are_missing_or_not_pem(
    certificates: Path, tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "party-1").write_bytes(content)
    with pytest.raises(HostError) as caught:
        Certificates.read(replace(tls_of(certificates), **{name: f"{tmp_path}/party-{{rank}}"}), 1)
    assert str(caught.value).startswith(f"calfat.silo.tls.{name}: {tmp_path}/party-1 {said}")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["rank-2.calfat"], "is made out to rank-2.calfat, and this is rank 1, whose certificate says rank-1.calfat"),
        (["*.calfat"], r"is made out to \*.calfat, and this is rank 1"),
        (["10.0.0.1"], "is made out to no name, and this is rank 1"),
    ],
)
def test_the_certificate_of_another_rank_is_refused_before_it_is_used(
    tmp_path: Path, authority: trustme.CA, names: list[str], said: str
) -> None:
    write(tmp_path, 1, authority, authority, *names, common_name="rank-1.calfat")
    with pytest.raises(HostError, match=f"^calfat.silo.tls.cert: {tmp_path}/rank-1.pem {said}"):
        refuse_unfit_certificate(tls_of(tmp_path), 1)


@pytest.mark.parametrize("names", [["rank-1.calfat"], ["somewhere.example.org", "rank-1.calfat"]])
def test_the_certificate_of_this_rank_is_fit(tmp_path: Path, authority: trustme.CA, names: list[str]) -> None:
    write(tmp_path, 1, authority, authority, *names)
    refuse_unfit_certificate(tls_of(tmp_path), 1)


@pytest.mark.parametrize(
    ("foreign", "said"), [(True, "unable to get local issuer"), (False, "certificate has expired")]
)
def test_a_certificate_that_nobody_would_believe_is_refused_with_the_reason(
    tmp_path: Path, authority: trustme.CA, foreign: bool, said: str
) -> None:
    yesterday = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)
    signed_by = trustme.CA() if foreign else authority
    write(tmp_path, 1, signed_by, authority, "rank-1.calfat", **({} if foreign else {"not_after": yesterday}))
    with pytest.raises(HostError, match=f"the other parties would refuse it: {said}"):
        refuse_unfit_certificate(tls_of(tmp_path), 1)
