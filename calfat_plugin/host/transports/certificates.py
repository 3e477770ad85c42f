"""The certificate files that a recipe names, as what TLS needs of them."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from calfat_plugin.errors import HostError
from calfat_plugin.recipe.silo import TLSSettings


@dataclass(frozen=True)
class Certificates:
    """Files with this party's certificate and key, and with the authority it trusts; they fit together."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def read(cls, settings: TLSSettings, rank: int) -> Certificates:
        """Find and check the files that the recipe names for party ``rank``.

        Raises:
            HostError: a file is missing, no PEM, or they do not belong together.
        """
        files = cls(*(_pem_file(settings, name, rank) for name in ("ca", "cert", "key")))
        files.server_context()
        return files

    def server_context(self) -> ssl.SSLContext:
        """For a gRPC server that lets in only who has a certificate of the authority.

        Raises:
            HostError: OpenSSL cannot use the files.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["h2"])
        return self._load_into(context)

    def client_context(self) -> ssl.SSLContext:
        """For a client that trusts only servers of the authority, under the name it connects to.

        Raises:
            HostError: OpenSSL cannot use the files.
        """
        return self._load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _load_into(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(self.ca)
            context.load_cert_chain(self.cert, self.key, password=str)  # or OpenSSL would ask for one here, and wait
        except OSError as error:  # ssl.SSLError is one
            raise HostError(
                f"calfat.silo.tls: {self.ca}, {self.cert} and {self.key} cannot be used together: {error}. "
                "`calfat certs DIR` makes a test set."
            ) from None
        return context


def _pem_file(settings: TLSSettings, name: str, rank: int) -> Path:
    path = Path(str(getattr(settings, name)).replace("{rank}", str(rank))).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HostError(
            f"calfat.silo.tls.{name}: {path} cannot be read ({error.strerror}). `calfat certs DIR` makes a test set."
        ) from None
    if b"-----BEGIN " not in content:
        raise HostError(f"calfat.silo.tls.{name}: {path} is not a PEM file.")
    return path
