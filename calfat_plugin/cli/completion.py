"""``calfat completion SHELL``: what a shell needs to complete commands, options and shipped recipes."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from calfat_plugin.cli.main import main

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that lets SHELL complete calfat's commands, options and recipes.

    For bash, add to ~/.bashrc: eval "$(calfat completion bash)"
    """
    script = get_completion_class(shell)
    assert script is not None  # click has all of SHELLS
    click.echo(script(main, {}, "calfat", "_CALFAT_COMPLETE").source())
