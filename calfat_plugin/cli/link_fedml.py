"""``calfat link-fedml`` and ``calfat unlink-fedml``: whether ``fedml run RECIPE`` runs recipes in this environment.

Two files decide: the launcher ``fedml``, which FedML installs, and a line for Python's start beside the installed
packages, which our wheel installs (:mod:`calfat_plugin.cli.fedml`).
"""

from __future__ import annotations

import site
import sysconfig
from pathlib import Path

import click

from calfat_plugin.errors import HostError
from calfat_plugin.host.arguments import TESTED_VERSIONS
from calfat_plugin.host.installed import version_of

_LINE = Path(__file__).with_name("calfat_fedml.pth")


@click.command(name="link-fedml")
def link_fedml() -> None:
    """Let 'fedml run RECIPE' run recipes in this environment; everything else goes to FedML as before."""
    refuse_without_launcher()
    if not any(place.exists() for place in places()):
        places()[0].write_bytes(_LINE.read_bytes())
    click.echo("'fedml run RECIPE' is 'calfat run RECIPE' now. To undo this: calfat unlink-fedml")


@click.command(name="unlink-fedml")
def unlink_fedml() -> None:
    """Make 'fedml' FedML's own command again, which knows no recipes; 'calfat run RECIPE' stays."""
    refuse_without_launcher()
    for place in places():
        place.unlink(missing_ok=True)
    click.echo("'fedml' is FedML's own command now; recipes are run by 'calfat run'. To undo this: calfat link-fedml")


def places() -> list[Path]:
    """Where our line may be: beside this environment's packages, or beside this user's own."""
    folders = [sysconfig.get_path("purelib"), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [Path(folder) / _LINE.name for folder in folders]


def refuse_without_launcher() -> None:
    """Refuse an environment without FedML's command."""
    if version_of("fedml") is None:
        raise HostError("FedML is not installed, so it has no command to link. 'calfat run' runs recipes without it.")
    scripts = Path(sysconfig.get_path("scripts"))
    if not (scripts / "fedml").exists():
        install = f"pip install --force-reinstall --no-deps fedml=={TESTED_VERSIONS[-1]}"
        raise HostError(f"{scripts} has no FedML launcher. Install it: {install}")
