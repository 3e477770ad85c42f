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
        ca, cert, key = (expanded(for_rank(path, rank)) for path in (settings.ca, settings.cert, settings.key))
        contents = (_read_pem("ca", ca), _read_pem("cert", cert), _read_pem("key", key))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(ca)
            context.load_cert_chain(cert, key, password=str)  # or OpenSSL would ask for a password here, and wait
        except OSError as error:  # ssl.SSLError is one
            raise HostError(
                f"calfat.silo.tls: {ca}, {cert} and {key} cannot be used together: {error}. {_HINT}"
            ) from None
        return cls(*contents, context)


def refuse_unfit_certificate(settings: TLSSettings, rank: int) -> None:
    """Refuse a certificate with which the other parties would not let this one speak for its rank, such as another's.

    They would say so much later, or wait: the one that is wrong learns it here, before it connects to anybody.
    """
    name, path = certificate_name(rank), expanded(for_rank(settings.cert, rank))
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
    ca, cert, key = (expanded(for_rank(path, rank)) for path in (settings.ca, settings.cert, settings.key))
    party = Certificates.read(settings, rank).client_context
    party.check_hostname, party.verify_mode = False, ssl.CERT_NONE  # of the other end, which is this process
    other_party = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    other_party.load_cert_chain(cert, key)
    other_party.load_verify_locations(ca)
    other_party.verify_mode = ssl.CERT_REQUIRED
    to_party, to_other = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = party.wrap_bio(to_party, to_other)
    there = other_party.wrap_bio(to_other, to_party, server_side=True)
    for end in (here, there, here, there):  # the messages of a handshake: two from each end
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    shown = there.getpeercert() or {}
    alternatives: Any = shown.get("subjectAltName", ())
    return [name for kind, name in alternatives if kind == "DNS"]


def _read_pem(name: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HostError(f"calfat.silo.tls.{name}: {path} cannot be read ({error.strerror}). {_HINT}") from None
    if b"-----BEGIN " not in content:
        raise HostError(f"calfat.silo.tls.{name}: {path} is not a PEM file. {_HINT}")
    return content
