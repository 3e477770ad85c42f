"""``calfat.silo``: the parties of a cross-silo run, their addresses, deadlines and credentials."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from calfat_plugin.errors import OptionError
from calfat_plugin.options import describe, option
from calfat_plugin.recipe.keys import Section, key

#: The warning about a run without certificates, on the console and on the page.
UNPROTECTED = (
    "there are no certificates (calfat.silo.tls), so any process that reaches the parties' addresses or their broker "
    "(on loopback: any process on this machine) can take the place of a client that is away, see the model, and have "
    "its own update counted"
)
SILO = "silo"  # the partition_method with which each party reads its own data

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:\[\]/]+):(?P<port>\d{1,5})")
_MAX_PORT = 65535
_A_YEAR = 366 * 86400  # seconds; the longest deadline: a system's clock cannot wait for much longer times
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")


class Address(NamedTuple):
    """A host name or IP address, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than ``localhost`` may mean any machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def certificate_name(rank: int) -> str:
    """The name that a party's certificate is made out to: its rank, wherever the party runs."""
    return f"rank-{rank}.calfat"


def for_rank(text: str, rank: int) -> str:
    """A recipe's text as party ``rank`` reads it: with its rank in the place of ``{rank}``."""
    return text.replace("{rank}", str(rank))


def _checked_address(text: str, example: str, *at: str | int) -> Address:
    """``host:port`` or ``[ipv6]:port``."""
    address = _ADDRESS.fullmatch(text)
    if address is None or not 0 < int(address["port"]) <= _MAX_PORT:
        raise OptionError(f"got {describe(text)}, expected host:port such as {example}.", at)
    return Address(address["host"].strip("[]"), int(address["port"]))


def _check_names(options: object, *names: str) -> None:
    for name in names:
        text = getattr(options, name)
        if not _NAME.fullmatch(text):
            raise OptionError(f"got {describe(text)}, expected letters, digits, '.', '_' and '-'.", (name,))


@dataclass(frozen=True)
class TLSSettings:
    """``calfat.silo.tls``: certificates for mutual TLS. ``{rank}`` in a path is replaced by the party's rank."""

    ca: str = option(help="certificate of the authority that signed all parties' certificates (PEM)")
    cert: str = option(help="this party's certificate (PEM), for the name rank-<rank>.calfat")
    key: str = option(help="this party's private key (PEM)")


@dataclass(frozen=True)
class MQTTSettings:
    """``calfat.silo.mqtt``: the broker of ``backend: MQTT_S3``. Passwords stay in files, never in a recipe."""

    broker: str = option("127.0.0.1:1883", help="host:port of the MQTT 5 broker")
    run: str = option("run", help="name of this federation in the topics; must be unique at the broker")
    username: str | None = option(
        None, help="user name, if the broker requires one; `{rank}` is replaced by the party's rank; null: none"
    )
    password_file: str | None = option(None, help="file whose first line is the password; `{rank}` as above")
    tls: bool = option(
        False, help="TLS with this machine's authorities and without client certificates; calfat.silo.tls adds those"
    )

    def __post_init__(self) -> None:
        _ = self.address  # for its error
        _check_names(self, "run")
        if (self.username is None) != (self.password_file is None):
            raise OptionError("username and password_file go together; give both or none.")

    @property
    def address(self) -> Address:
        """The address of the broker."""
        return _checked_address(self.broker, "127.0.0.1:1883", "broker")


@dataclass(frozen=True)
class S3Settings:
    """``calfat.silo.s3``: the store of ``backend: MQTT_S3``. boto3 reads the credentials from its usual places."""

    endpoint: str | None = option(
        "http://127.0.0.1:9000", help="URL of the S3-compatible store; null: Amazon's. Credentials: as for boto3"
    )
    bucket: str = option("calfat", help="bucket, which must exist")
    prefix: str = option("calfat", help="first part of all keys")
    region: str | None = option(None, help="region, if the store has regions; null: as for boto3")
    ca: str | None = option(None, help="authority of the store's certificate (PEM); null: this machine's")

    def __post_init__(self) -> None:
        try:
            url = urlsplit(self.endpoint or "https://s3.amazonaws.com")
        except ValueError:  # brackets around what is no IPv6 address
            url = urlsplit("")
        if url.scheme not in ("http", "https") or not url.hostname:
            text = f"got {describe(self.endpoint)}, expected a URL such as http://127.0.0.1:9000, or null."
            raise OptionError(text, ("endpoint",))
        if url.username or url.password:
            text = "credentials do not belong in a recipe; boto3 reads them from the environment."
            raise OptionError(text, ("endpoint",))
        _check_names(self, "bucket", "prefix")

    @property
    def is_safe(self) -> bool:
        """Whether nobody on the way can read along: TLS, or this machine."""
        if self.endpoint is None:
            return True
        url = urlsplit(self.endpoint)
        return url.scheme == "https" or Address(url.hostname or "", 1).is_loopback


@dataclass(frozen=True)
class Silo:
    """``calfat.silo``: addresses, deadlines and security of a cross-silo run."""

    min_clients: int | None = option(
        None, low=1, help="quorum: clients needed to start, and answers needed to end a round; null: all of them"
    )
    start_deadline: float = option(
        120, low=0, open_low=True, high=_A_YEAR, help="maximum time to wait for all parties at the start", unit="s"
    )
    round_deadline: float = option(
        600, low=0, open_low=True, high=_A_YEAR, help="maximum duration of a round", unit="s"
    )
    server_deadline: float = option(
        600, low=0, open_low=True, high=_A_YEAR, help="time that a client waits for a lost server", unit="s"
    )
    max_message_mb: int | None = option(
        None, low=1, help="largest message that is accepted, in MB; null: eight times the model"
    )
    bind: str | None = option(None, help="host or IP address to listen on, if it differs from the party's address")
    insecure: bool = option(
        False, help="allow other addresses than loopback without certificates; the network can then read all messages"
    )
    parties: tuple[str, ...] | None = option(
        None,
        help="`host:port` of the parties of a cross-silo run, the server's first; null: `calfat run --local` uses free "
        "ports of this machine",
    )
    tls: TLSSettings | None = key(Section(config=TLSSettings, may_lack=True), default_factory=lambda: None)
    mqtt: MQTTSettings = key(Section(config=MQTTSettings), default_factory=MQTTSettings)
    s3: S3Settings = key(Section(config=S3Settings), default_factory=S3Settings)

    def __post_init__(self) -> None:
        addresses = self.addresses
        for rank, address in enumerate(addresses):
            first = addresses.index(address)
            if first < rank:
                raise OptionError(f"{address} is already the address of rank {first}.", ("parties", rank))

    @property
    def addresses(self) -> tuple[Address, ...]:
        """By rank, the server's first; empty where ``--local`` is to choose them."""
        parties = self.parties or ()
        return tuple(_checked_address(text, "127.0.0.1:8890", "parties", rank) for rank, text in enumerate(parties))

    def check_clients(self, num_clients: int) -> None:
        """Refuse a quorum or a list of parties that does not fit the number of clients."""
        if self.parties is not None and len(self.parties) != num_clients + 1:
            raise OptionError(
                f"got {len(self.parties)} addresses, expected {num_clients + 1}: the server's, then one for each of "
                f"the {num_clients} clients (train_args.client_num_in_total).",
                ("parties",),
            )
        if self.min_clients is not None and self.min_clients > num_clients:
            raise OptionError(
                f"got {self.min_clients}, but there are only {num_clients} clients (train_args.client_num_in_total).",
                ("min_clients",),
            )
