"""The ``calfat`` command. Each subcommand is imported when it is called, so that ``--help`` answers at once."""

from __future__ import annotations

import importlib

import click

from calfat_plugin import __version__

COMMANDS = {
    "run": "Run a recipe.",
    "check": "Check a recipe without running it.",
    "suite": "Run a grid of recipes and set their table beside the paper's.",
    "report": "Make the page of a run, or of several side by side.",
    "per-class": "Train each client an epoch with several methods and compare them class by class.",
    "attack": "Attack a finished model.",
    "plugins": "List plugins, or explain one.",
    "certs": "Make test certificates for a cross-silo run.",
    "doctor": "Find what is wrong with this installation.",
}


class LazyGroup(click.Group):
    """A group whose commands live in ``calfat_plugin.cli.<name>`` and are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"calfat_plugin.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="calfat")
def main() -> None:
    """Federated adversarial training on FedML: CalFAT and its baselines as plugins."""


if __name__ == "__main__":
    main()
