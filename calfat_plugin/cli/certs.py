"""``calfat certs DIR``: a test authority, and a certificate for each party of a cross-silo run."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from calfat_plugin.cli.errors import user_errors
from calfat_plugin.errors import RunError
from calfat_plugin.recipe.silo import certificate_name

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_CLOCK_SKEW = datetime.timedelta(hours=1)


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--clients", type=click.IntRange(min=1), required=True, metavar="N", help="Clients of the recipe.")
@click.option("--days", type=click.IntRange(min=1), default=30, show_default=True, help="How long they are valid.")
def certs(directory: Path, clients: int, days: int) -> None:
    """Make certificates for a server and N clients in DIR, signed by an authority made for them alone.

    Give each party the file ca.pem and its own rank-K.pem and rank-K.key, and nobody the file ca.key.
    """
    with user_errors():
        make_certificates(directory, clients, days)
    click.echo(
        f"{directory}: certificates for ranks 0 (the server) to {clients}, valid for {days} days. In the recipe:\n"
        "calfat:\n"
        "  silo:\n"
        f"    tls: {{ca: {directory / 'ca.pem'}, cert: '{directory}/rank-{{rank}}.pem', "
        f"key: '{directory}/rank-{{rank}}.key'}}"
    )


def make_certificates(directory: Path, clients: int, days: int) -> None:
    """Write ``ca.pem``, ``ca.key`` and ``rank-<k>.pem``, ``rank-<k>.key``; keys are readable by their owner only.

    Raises:
        RunError: there are certificates already, the folder cannot be written, or ``cryptography`` is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise RunError("making certificates needs the package cryptography: pip install 'calfat-plugin[tls]'") from None
    if (directory / "ca.pem").exists():
        raise RunError(f"{directory}: holds certificates already; choose another folder, or remove them.")
    authority = ec.generate_private_key(ec.SECP256R1())
    root = _certificate("calfat test authority", authority, None, None, days)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / "ca", root, authority)
        for rank in range(clients + 1):
            key = ec.generate_private_key(ec.SECP256R1())
            _write(directory / f"rank-{rank}", _certificate(certificate_name(rank), key, root, authority, days), key)
    except OSError as error:
        raise RunError(f"{directory}: cannot be written ({error.strerror}).") from None


def _certificate(
    name: str,
    key: EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: EllipticCurvePrivateKey | None,
    days: int,
) -> x509.Certificate:
    """A certificate for ``name``; without an issuer, an authority that signs itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer is not None:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    return builder.sign(issuer_key or key, hashes.SHA256())


def _write(stem: Path, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives import serialization

    stem.with_name(stem.name + ".pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    handle = os.open(stem.with_name(stem.name + ".key"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(private)
