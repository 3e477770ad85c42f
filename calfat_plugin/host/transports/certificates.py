"""The certificate files that a recipe names, in the forms that gRPC and MQTT need."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from calfat_plugin.disk import expanded
from calfat_plugin.errors import HostError
from calfat_plugin.recipe.silo import TLSSettings, for_rank

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


def _read_pem(name: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HostError(f"calfat.silo.tls.{name}: {path} cannot be read ({error.strerror}). {_HINT}") from None
    if b"-----BEGIN " not in content:
        raise HostError(f"calfat.silo.tls.{name}: {path} is not a PEM file. {_HINT}")
    return content
