"""The certificate files that a recipe names, in the forms that gRPC and MQTT need."""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calfat_plugin.disk import expanded
from calfat_plugin.errors import HostError
from calfat_plugin.recipe.silo import TLSSettings, certificate_name, for_rank

_HINT = "docs/cross_silo.md has the lines that make them."


@dataclass(frozen=True)
class Certificates:
    """A party's certificate and key, and the certificate of the authority it trusts. They fit together."""

    ca: bytes
    cert: bytes
    key: bytes
    client_context: ssl.SSLContext

    @classmethod
    def read(cls, settings: TLSSettings, rank: int) -> Certificates:
        """Read and check the files that the recipe names for party ``rank``."""
        ca = expanded(for_rank(settings.ca, rank))
        cert = expanded(for_rank(settings.cert, rank))
        key = expanded(for_rank(settings.key, rank))
        ca_content = _read_pem("ca", ca)
        cert_content = _read_pem("cert", cert)
        key_content = _read_pem("key", key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(ca)
            context.load_cert_chain(cert, key, password=str)  # or OpenSSL would ask for a password here, and wait
        except OSError as error:  # ssl.SSLError is one
            raise HostError(
                f"calfat.silo.tls: {ca}, {cert} and {key} cannot be used together: {error}. {_HINT}"
            ) from None
        return cls(ca_content, cert_content, key_content, context)


def refuse_unfit_certificate(settings: TLSSettings, rank: int) -> None:
    """Refuse a certificate with which the other parties would not let this one speak for its rank, such as another's.

    They would refuse it much later, or wait. Here the party learns it before it connects to anybody.
    """
    name = certificate_name(rank)
    path = expanded(for_rank(settings.cert, rank))
    try:
        names = _names_in_certificate(settings, rank)
    except ssl.SSLCertVerificationError as error:
        raise HostError(
            f"calfat.silo.tls.cert: {path}: the other parties would refuse it: {error.verify_message}. Let the "
            f"authority of calfat.silo.tls.ca make one for {name} that is valid today; {_HINT}"
        ) from None
    if name not in names:
        raise HostError(
            f"calfat.silo.tls.cert: {path} is made out to {', '.join(names) or 'no name'}, and this is rank {rank}, "
            f"whose certificate says {name}: the other parties would refuse it. Name the file of this rank "
            "('{rank}' in the path stands for it), or give this process its own --rank."
        )


def _names_in_certificate(settings: TLSSettings, rank: int) -> list[str]:
    """The DNS names of a party's certificate, as another party sees it: by a handshake in memory.

    Raises:
        ssl.SSLCertVerificationError: the authority has not signed it, or it is not valid now.
    """
    party = Certificates.read(settings, rank).client_context
    party.check_hostname = False  # the other end is this process, which has no name of a party
    party.verify_mode = ssl.CERT_NONE
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    other.load_cert_chain(expanded(for_rank(settings.cert, rank)), expanded(for_rank(settings.key, rank)))
    other.load_verify_locations(expanded(for_rank(settings.ca, rank)))
    other.verify_mode = ssl.CERT_REQUIRED
    to_party = ssl.MemoryBIO()
    to_other = ssl.MemoryBIO()
    party_end = party.wrap_bio(to_party, to_other)
    other_end = other.wrap_bio(to_other, to_party, server_side=True)
    for end in (party_end, other_end, party_end, other_end):  # the messages of a handshake: two from each end
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    certificate = other_end.getpeercert() or {}
    names: Any = certificate.get("subjectAltName", ())
    return [name for kind, name in names if kind == "DNS"]


def _read_pem(name: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HostError(f"calfat.silo.tls.{name}: {path} cannot be read ({error.strerror}). {_HINT}") from None
    if b"-----BEGIN " not in content:
        raise HostError(f"calfat.silo.tls.{name}: {path} is not a PEM file. {_HINT}")
    return content
