"""``calfat certs DIR``: a test authority, certificates for the parties of a cross-silo run, and for their broker."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from calfat_plugin.cli.errors import user_errors
from calfat_plugin.errors import RunError
from calfat_plugin.recipe.silo import Address, certificate_name, parse_address

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_CLOCK_SKEW = datetime.timedelta(hours=1)
_AUTHORITY, _BROKER = "calfat test authority", "calfat broker"
_BROKER_PORT = 8883  # MQTT over TLS, as registered with IANA

_MOSQUITTO = """\
# An MQTT broker for the parties whose certificates lie in this folder, and for nobody else.
listener {port}
cafile {folder}/ca.pem
certfile {folder}/broker.pem
keyfile {folder}/broker.key
require_certificate true
allow_anonymous false
# A party is called what its certificate says, rank-K.calfat, and cannot end the connection of another.
use_identity_as_username true
use_username_as_clientid true
acl_file {folder}/mosquitto.acl
"""
_OWNER = "# Started by root, the broker becomes whoever may read its key.\nuser {owner}\n"
_ACCESS = """\
# Topics are calfat/<run>/<sender>/<receiver>: a party writes as itself and reads what is for it.
pattern write calfat/+/%u/+
pattern read calfat/+/+/%u
"""


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--clients", type=click.IntRange(min=1), required=True, metavar="N", help="Clients of the recipe.")
@click.option(
    "--broker",
    metavar="HOST[:PORT]",
    help=f"For MQTT: a certificate for the broker on HOST, and settings for mosquitto. PORT: {_BROKER_PORT}.",
)
@click.option("--days", type=click.IntRange(min=1), default=30, show_default=True, help="How long they are valid.")
def certs(directory: Path, clients: int, broker: str | None, days: int) -> None:
    """Make certificates for a server and N clients in DIR, signed by an authority made for them alone.

    Give each party the file ca.pem and its own rank-K.pem and rank-K.key, and nobody the file ca.key. The broker keeps
    broker.pem, broker.key, mosquitto.conf and mosquitto.acl.
    """
    with user_errors():
        address = None if broker is None else broker_address(broker)
        make_certificates(directory, clients, days, address)
    click.echo(
        f"{directory}: certificates for ranks 0 (the server) to {clients}, valid for {days} days. In the recipe:\n"
        "calfat:\n"
        "  silo:\n"
        f"    tls: {{ca: {directory / 'ca.pem'}, cert: '{directory}/rank-{{rank}}.pem', "
        f"key: '{directory}/rank-{{rank}}.key'}}"
    )
    if address is not None:
        click.echo(f"    mqtt: {{broker: '{address}'}}\nStart the broker: mosquitto -c {directory / 'mosquitto.conf'}")


def broker_address(text: str) -> Address:
    """Where the broker will be: ``HOST`` or ``HOST:PORT``, an IPv6 address in brackets.

    Raises:
        RunError: it is none of these.
    """
    address = parse_address(text) or parse_address(f"{text}:{_BROKER_PORT}")
    if address is None or not address.host.isascii():
        raise RunError(f"--broker {text}: expected HOST or HOST:PORT, such as broker.example.org:{_BROKER_PORT}.")
    return address


def make_certificates(directory: Path, clients: int, days: int, broker: Address | None = None) -> None:
    """Write ``ca.pem``, ``ca.key`` and ``rank-<k>.pem``, ``rank-<k>.key``; keys are readable by their owner only.

    With ``broker`` also ``broker.pem``, ``broker.key``, ``mosquitto.conf`` and ``mosquitto.acl``, for mosquitto 2.0.

    Raises:
        RunError: there are certificates already, the folder cannot be written, or ``cryptography`` is not installed.
    """
    try:
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError:
        raise RunError("making certificates needs the package cryptography: pip install 'calfat-plugin[tls]'") from None
    if (directory / "ca.pem").exists():
        raise RunError(f"{directory}: holds certificates already; choose another folder, or remove them.")
    server, client = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
    authority = _Authority.new(days)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        authority.root.write(directory / "ca")
        for rank in range(clients + 1):  # the parties of a gRPC run call each other
            authority.issue(certificate_name(rank), [server, client]).write(directory / f"rank-{rank}")
        if broker is not None:
            authority.issue(_BROKER, [server], host=broker.host).write(directory / "broker")
            _write_broker_settings(directory.absolute(), broker.port)
    except OSError as error:
        raise RunError(f"{directory}: cannot be written ({error.strerror}).") from None


def _write_broker_settings(folder: Path, port: int) -> None:
    settings = _MOSQUITTO.format(port=port, folder=folder)
    with suppress(ImportError, AttributeError, KeyError):  # Windows, or a user without a name
        import pwd

        settings += _OWNER.format(owner=pwd.getpwuid(os.geteuid()).pw_name)
    (folder / "mosquitto.conf").write_text(settings, encoding="utf-8")
    _write_private(folder / "mosquitto.acl", _ACCESS.encode())  # mosquitto frowns at one that all can read


@dataclass(frozen=True)
class _Credentials:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: EllipticCurvePrivateKey

    def write(self, stem: Path) -> None:
        """Write ``<stem>.pem`` and ``<stem>.key``."""
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        stem.with_name(f"{stem.name}.pem").write_bytes(self.certificate.public_bytes(Encoding.PEM))
        private = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        _write_private(stem.with_name(f"{stem.name}.key"), private)


@dataclass(frozen=True)
class _Authority:
    """Signs certificates that are valid for ``days`` days."""

    root: _Credentials
    days: int

    @classmethod
    def new(cls, days: int) -> _Authority:
        """An authority that has signed itself."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        key = _new_key()
        builder = _builder(_AUTHORITY, _AUTHORITY, key, days)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        return cls(_Credentials(builder.sign(key, hashes.SHA256()), key), days)

    def issue(self, name: str, usages: Sequence[x509.ObjectIdentifier], host: str | None = None) -> _Credentials:
        """A certificate for ``name`` at these ends of a connection; ``host``: where it is found, if not by its name."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        key = _new_key()
        builder = (
            _builder(name, _AUTHORITY, key, self.days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([_general_name(host or name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        return _Credentials(builder.sign(self.root.key, hashes.SHA256()), key)


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _builder(subject: str, issuer: str, key: EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.timezone.utc)
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, issuer)]
    return (
        x509.CertificateBuilder()
        .subject_name(names[0])
        .issuer_name(names[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_private(path: Path, content: bytes) -> None:
    """A new file that only its owner can read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
