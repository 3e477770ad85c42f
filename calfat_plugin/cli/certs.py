"""``calfat certs DIR``: a test authority, certificates for the parties of a cross-silo run, and for their broker."""

from __future__ import annotations

import math
import os
import pwd
import shlex
import textwrap
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import click
import yaml

from calfat_plugin.errors import RunError
from calfat_plugin.recipe.silo import Address, certificate_name, parse_address

_CLOCK_SKEW = timedelta(hours=1)
_MAX_DAYS = 36_500
_BROKER_PORT = 8883  # MQTT over TLS, as registered with IANA

_MOSQUITTO = """\
# An MQTT broker for the parties whose certificates lie in this folder, and for nobody else.
listener {port}
cafile {folder}/ca.pem
certfile {folder}/broker.pem
keyfile {folder}/broker.key
require_certificate true
allow_anonymous false
# A party is called what its certificate says, rank-K.calfat. Two processes of one name each have a connection.
use_identity_as_username true
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
@click.option(
    "--days",
    type=click.IntRange(1, _MAX_DAYS),
    default=30,
    show_default=True,
    help="How long the parties' and the broker's are valid.",
)
def certs(directory: Path, clients: int, broker: str | None, days: int) -> None:
    """Make certificates for a server and N clients in DIR, signed by an authority made for them alone.

    Give each party the file ca.pem and its own rank-K.pem and rank-K.key, and nobody the file ca.key. The broker keeps
    broker.pem, broker.key, mosquitto.conf and mosquitto.acl.
    """
    address = None if broker is None else broker_address(broker)
    make_certificates(directory, clients, days, address)
    files = {"ca": "ca.pem", "cert": "rank-{rank}.pem", "key": "rank-{rank}.key"}
    silo = {"tls": {key: str(directory / name) for key, name in files.items()}}
    if address is not None:
        silo["mqtt"] = {"broker": str(address)}
    # A line for each section, whatever the folder is called.
    section = yaml.safe_dump(silo, default_flow_style=None, sort_keys=False, allow_unicode=True, width=math.inf)
    click.echo(
        f"{directory}: certificates for ranks 0 (the server) to {clients}, valid for {days} days. In the recipe:\n"
        f"calfat:\n  silo:\n{textwrap.indent(section, '    ')}",
        nl=False,
    )
    if address is not None:
        click.echo(f"Start the broker: mosquitto -c {shlex.quote(str(directory / 'mosquitto.conf'))}")


def broker_address(text: str) -> Address:
    """Where the broker will be: ``HOST`` or ``HOST:PORT``, an IPv6 address in brackets."""
    address = parse_address(text) or parse_address(f"{text}:{_BROKER_PORT}")
    host = "" if address is None else address.host.lower()
    if address is None or not host.isascii() or "@" in host or host.endswith(".calfat"):  # the parties' own names
        raise RunError(f"--broker {text}: expected HOST or HOST:PORT, such as broker.example.org:{_BROKER_PORT}.")
    return address


def make_certificates(directory: Path, clients: int, days: int, broker: Address | None = None) -> None:
    """Write ``ca.pem``, ``ca.key`` and ``rank-<k>.pem``, ``rank-<k>.key``; keys are readable by their owner only.

    With ``broker`` also ``broker.pem``, ``broker.key``, ``mosquitto.conf`` and ``mosquitto.acl``, for mosquitto 2.0.
    The authority itself does not expire.
    """
    try:
        import trustme
    except ImportError:
        raise RunError("making certificates needs the package trustme: pip install 'calfat-plugin[tls]'") from None
    if (directory / "ca.pem").exists():
        raise RunError(f"{directory}: holds certificates already; choose another folder, or remove them.")
    now = datetime.now(timezone.utc)
    authority = trustme.CA(organization_unit_name="calfat test authority")

    def issue(host: str, name: str) -> tuple[bytes, bytes]:
        issued = authority.issue_cert(
            host, common_name=name, not_before=now - _CLOCK_SKEW, not_after=now + timedelta(days=days)
        )
        return issued.cert_chain_pems[0].bytes(), issued.private_key_pem.bytes()

    pairs = {"ca": (authority.cert_pem.bytes(), authority.private_key_pem.bytes())}
    for name in map(certificate_name, range(clients + 1)):
        pairs[name.removesuffix(".calfat")] = issue(name, name)
    if broker is not None:
        try:
            pairs["broker"] = issue(broker.host, "calfat broker")
        except ValueError as error:  # idna's errors are such
            raise RunError(f"--broker {broker}: no certificate can be made for this host ({error}).") from None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for stem, (certificate, key) in pairs.items():
            (directory / f"{stem}.pem").write_bytes(certificate)
            _write_private(directory / f"{stem}.key", key)
        if broker is not None:
            settings = _MOSQUITTO.format(port=broker.port, folder=directory.absolute())
            with suppress(KeyError):  # a user without a name
                settings += _OWNER.format(owner=pwd.getpwuid(os.geteuid()).pw_name)
            (directory / "mosquitto.conf").write_text(settings, encoding="utf-8")
            _write_private(directory / "mosquitto.acl", _ACCESS.encode())  # mosquitto warns about one that all can read
    except OSError as error:
        raise RunError(f"{directory}: cannot be written ({error.strerror}).") from None


def _write_private(path: Path, content: bytes) -> None:
    """A new file that only its owner can read."""
    path.touch(0o600, exist_ok=False)
    path.write_bytes(content)
