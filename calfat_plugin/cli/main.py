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

# The commands that are not in a module of their own name, and the modules that they are in.
_MODULE_OF_COMMAND = {"init": "recipes", "download": "recipes", "replay": "trust"}
_STDERR = 2  # the file descriptor of standard error; standard input has 0, standard output 1


class LazyGroup(click.Group):
    """A group that imports a command when the command is called or asked for help.

    The command ``new-plugin`` is the function ``new_plugin`` in the module ``calfat_plugin.cli.new_plugin``; the few
    commands in other modules are in ``_MODULE_OF_COMMAND``.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line. An output that cannot be written is reported like any other error of the user."""
        _open_missing_streams()
        sys.excepthook = _show_traceback
        let_waiting_threads_sleep()
        # When Python ends, it searches all objects for garbage, which takes up to a second. Frozen objects are skipped.
        atexit.register(gc.freeze)
        with user_errors():
            try:
                return super().main(*args, **kwargs)
            finally:
                # Inside user_errors, which reports a failure. Python flushes only when it ends.
                sys.stdout.flush()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # click looks at neither NO_COLOR nor TERM=dumb, so colours are switched off here. The contexts of the
        # subcommands inherit ctx.color from this one.
        if not coloured(sys.stdout):
            ctx.color = False
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        is_option = name.startswith("-")  # click refuses an unknown option
        if not is_option and name not in COMMANDS:
            hint = did_you_mean(name, COMMANDS)
            if not hint:
                hint = f" Commands: {', '.join(COMMANDS)}."
            ctx.fail(f"No such command '{name}'.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        # click's own main() calls this method. It handles two errors before user_errors in our main() could do so: a
        # pipe that nobody reads any more (it exits with 1 and without a message) and Ctrl-C (it exits with 1).
        try:
            with user_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            fail("stopped.", code=INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module_name = _MODULE_OF_COMMAND.get(name, name)
        module = importlib.import_module(f"calfat_plugin.cli.{module_name}")
        command: click.Command = getattr(module, name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def let_waiting_threads_sleep() -> None:
    """Let the threads of torch sleep while they wait for work, instead of keeping their cores busy.

    Torch's OpenMP library reads the setting once, when torch is imported, so a later call changes nothing.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _open_missing_streams() -> None:
    """Open the null device in place of each standard stream that is missing, as in a daemon or behind ``>&-``.

    Libraries rely on the three streams. Without this, the next file that is opened would also get the file descriptor
    of a missing stream, and what other programs print would be written into that file.
    """
    # The system gives each new file the lowest descriptor that is free. So the null device is opened again and again:
    # it takes the descriptors of all missing streams, until one lies above them and is closed again.
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= _STDERR:
        # Python closes its descriptors in the programs that it starts, but these programs need the streams as well.
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    # Python has set the stream objects of missing descriptors to None.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The file stays open as long as Python runs.
            null_stream = open(os.devnull, mode, encoding="utf-8", errors="replace")  # noqa: SIM115
            setattr(sys, name, null_stream)
            setattr(sys, f"__{name}__", null_stream)


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as Python does, but without control characters, which the text of a plugin may contain."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(printable(text), end="", file=sys.stderr)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="calfat")
def main() -> None:
    """Federated adversarial training on FedML and Flower: CalFAT and its baselines as plugins."""


if __name__ == "__main__":
    main()
