"""The ``calfat`` command. Each subcommand is imported when it is called, so that ``--help`` answers at once."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import traceback
from types import TracebackType
from typing import Any

import click

from calfat_plugin.cli.errors import INTERRUPTED, coloured, fail, user_errors
from calfat_plugin.errors import did_you_mean
from calfat_plugin.peer_text import printable
from calfat_plugin.version import __version__

COMMANDS = {
    "run": "Run a recipe.",
    "check": "Check a recipe without running it.",
    "recipes": "List the recipes that come with the package.",
    "init": "Copy one of them into this folder.",
    "download": "Download a published data set.",
    "suite": "Run a grid of recipes and make their table.",
    "report": "Make the page of a run, or of several side by side.",
    "attack": "Attack a finished model.",
    "replay": "Check a finished evaluation by the adversarial images that it kept.",
    "trust": "Judge whether a model's robust accuracy may be believed.",
    "export": "Write a trained model for other programs, with a card.",
    "new-plugin": "Write the package of a plugin of your own.",
    "plugins": "List plugins, or explain one.",
    "schema": "Print a JSON schema of recipes, for editors.",
}

_MODULES = {"init": "recipes", "download": "recipes", "replay": "trust"}  # commands that share a module
_STDERR = 2  # its descriptor, the last of the three that every program has


class LazyGroup(click.Group):
    """A group whose commands are imported on use, from ``calfat_plugin.cli.<name>`` or as ``_MODULES`` says."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line, and report an output that cannot be written like any other error."""
        _open_streams()
        sys.excepthook = _show_traceback
        wait_passively()
        atexit.register(gc.freeze)  # saves up to a second: at its end, Python looks for garbage in all modules
        with user_errors():
            try:
                return super().main(*args, **kwargs)
            finally:
                sys.stdout.flush()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not coloured(sys.stdout):
            ctx.color = False  # click itself knows neither NO_COLOR nor TERM=dumb; commands inherit it
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            hint = did_you_mean(name, COMMANDS) or f" Commands: {', '.join(COMMANDS)}."
            ctx.fail(f"No such command '{name}'.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            # Here, too: where nobody reads the output any more, click itself would exit with 1 and without a message.
            with user_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:  # click itself would exit with 1
            fail("stopped.", code=INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"calfat_plugin.cli.{_MODULES.get(name, name)}")
        command: click.Command = getattr(module, name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def wait_passively() -> None:
    """Let waiting threads of torch sleep instead of keeping cores busy; call it before torch is imported."""
    if "torch" not in sys.modules:  # its OpenMP reads this when it is loaded
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _open_streams() -> None:
    """Open the null device for each standard stream that is missing, as in a daemon or behind ``>&-``.

    Libraries rely on the streams. The next file that is opened would also get the descriptor of a missing stream, and
    then receive what other programs print.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(handle, True)
    os.close(handle)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode, encoding="utf-8", errors="replace")  # noqa: SIM115 (as long as Python runs)
            setattr(sys, name, nowhere)
            setattr(sys, f"__{name}__", nowhere)


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as Python does, without control characters that a plugin's text may have."""
    print(printable("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="calfat")
def main() -> None:
    """Federated adversarial training on FedML and Flower: CalFAT and its baselines as plugins."""


if __name__ == "__main__":
    main()
