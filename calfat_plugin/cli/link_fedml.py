"""``calfat link-fedml``: ``fedml run RECIPE`` runs recipes."""

from __future__ import annotations

import click

from calfat_plugin.cli import launcher
from calfat_plugin.cli.errors import user_errors


@click.command(name="link-fedml")
def link_fedml() -> None:
    """Let 'fedml run RECIPE' run recipes in this environment; everything else goes to FedML as before."""
    with user_errors():
        launcher.link()
    click.echo("'fedml run RECIPE' is 'calfat run RECIPE' now. To undo this: calfat unlink-fedml")
