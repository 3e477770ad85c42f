"""``calfat unlink-fedml``: ``fedml`` is the host's own command again."""

from __future__ import annotations

import click

from calfat_plugin.cli import launcher
from calfat_plugin.cli.errors import user_errors


@click.command(name="unlink-fedml")
def unlink_fedml() -> None:
    """Make 'fedml' FedML's own command again, which knows no recipes; 'calfat run RECIPE' stays."""
    with user_errors():
        launcher.unlink()
    click.echo("'fedml' is FedML's own command now; recipes are run by 'calfat run'. To undo this: calfat link-fedml")
