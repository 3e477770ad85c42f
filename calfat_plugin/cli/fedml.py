"""The ``fedml`` command: ``fedml run RECIPE`` is ours, everything else goes to the host's own CLI untouched."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_HOST_RUN_COMMANDS = ("stop", "list", "status", "logs")
_HELP = ("--help", "-h")
_RECIPE_SUFFIXES = (".yaml", ".yml")


def is_ours(arguments: Sequence[str]) -> bool:
    """Whether the command line is ``run RECIPE``.

    It is when, after ``run``, something that looks like a recipe (it ends like one, or is a path that exists) comes
    before any of the host's own subcommands of ``run``.
    """
    if not arguments or arguments[0] != "run":
        return False
    for word in arguments[1:]:
        if word in _HOST_RUN_COMMANDS:
            return False
        is_path = os.sep in word and not word.startswith("-")
        if is_path or word.lower().endswith(_RECIPE_SUFFIXES) or os.path.exists(word):
            return True
    return False


def main() -> None:
    """Entry point of the console script."""
    arguments = sys.argv[1:]
    if is_ours(arguments):
        from calfat_plugin.cli.main import main as calfat

        calfat(args=arguments, prog_name="fedml")
        return
    if arguments[:1] == ["run"] and len(arguments) > 1 and set(arguments[1:]) <= set(_HELP):
        from calfat_plugin.cli.main import main as calfat

        calfat(args=["run", "--help"], prog_name="fedml", standalone_mode=False)
        print("\nWithout a recipe, fedml run is FedML's own command:\n", flush=True)
    from calfat_plugin.host.command import main as host

    host()
