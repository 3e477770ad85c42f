"""Certificates for the tests of silos, and what a page has about them: lines of openssl, the broker's settings."""

from __future__ import annotations

import getpass
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import trustme

from calfat_plugin.recipe.silo import TLSSettings, certificate_name

PAGE = Path(__file__).parents[2] / "docs" / "cross_silo.md"


def make_certificates(folder: Path, clients: int) -> TLSSettings:
    """``ca.pem``, and ``rank-<k>.pem`` and ``.key`` for the server and its clients, which an authority has signed."""
    authority = trustme.CA()
    folder.mkdir(parents=True)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    names = [certificate_name(rank) for rank in range(clients + 1)]
    for name, host in [(name.removesuffix(".calfat"), name) for name in names] + [("broker", "127.0.0.1")]:
        until = datetime.now(timezone.utc) + timedelta(days=1)
        issued = authority.issue_cert(host, common_name="broker" if name == "broker" else host, not_after=until)
        issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        (folder / f"{name}.key").chmod(0o600)
    return tls_of(folder)


def tls_of(folder: Path) -> TLSSettings:
    return TLSSettings(ca=f"{folder}/ca.pem", cert=f"{folder}/rank-{{rank}}.pem", key=f"{folder}/rank-{{rank}}.key")


def block_of_page(*lines: str) -> str:
    """The block of the page that begins with these lines, of the last of which the beginning is enough."""
    found = re.findall(r"^```\w*\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in found if block.startswith("\n".join(lines)))
    return str(block)


def broker_settings(folder: Path, port: int) -> str:
    """mosquitto's, as the page has them, with its access rules beside the certificates."""
    rules = re.findall(r"'(pattern .*?)'", PAGE.read_text(encoding="utf-8"))
    (folder / "mosquitto.acl").write_text("\n".join(rules))
    (folder / "mosquitto.acl").chmod(0o600)
    settings = block_of_page("listener 8883").replace("8883", str(port)).replace("certs/", f"{folder}/")
    return f"{settings}user {getpass.getuser()}\n"  # started by root, it becomes another, who may not read the keys
