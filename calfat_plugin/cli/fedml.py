"""The ``fedml`` command: ``fedml run RECIPE`` is ours, everything else goes to the host's own CLI untouched.

The command's file stays the host's, so that no two distributions own it. In a process of that name, a line that Python
executes at its start (``calfat_fedml.pth``, beside the installed packages) calls :func:`take_over`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import ModuleType

from calfat_plugin.shipped import shipped_files

_HOST_CLI = "fedml.cli.cli"  # what the host's launcher imports ``cli`` from
_HOST_COMMANDS = ("stop", "list", "status", "logs")
_HOST_OPTIONS = ("--api_key", "-k", "--version", "-v", "--platform", "-pf")  # of its ``run``; each takes a value
_HELP = ("--help", "-h")
_RECIPE_SUFFIXES = (".yaml", ".yml")


def take_over() -> None:
    """Let the host's launcher import and call :func:`main` instead of its own command; this imports no host."""
    stand_in = ModuleType(_HOST_CLI)
    vars(stand_in)["cli"] = main
    sys.modules[_HOST_CLI] = stand_in


def is_ours(arguments: Sequence[str]) -> bool:
    """Whether the command line is ``run RECIPE``.

    It is if the first positional word after ``run`` looks like a recipe: it ends like one, is a path, or is the name of
    a shipped one. The host's subcommands stay the host's.
    """
    if arguments[:1] != ["run"]:
        return False
    word = _positional(arguments[1:])
    if word is None or word in _HOST_COMMANDS:
        return False
    return os.sep in word or word.lower().endswith(_RECIPE_SUFFIXES) or os.path.exists(word) or word in shipped_files()


def _positional(words: Sequence[str]) -> str | None:
    """The first word that is neither an option, the host's or ours, nor the value of one."""
    from calfat_plugin.cli.run import run

    with_value = {*_HOST_OPTIONS}
    for option in run.params:
        if not getattr(option, "is_flag", True):
            with_value.update(option.opts)
    rest = iter(words)
    for word in rest:
        if word == "--":
            return next(rest, None)
        if not word.startswith("-"):
            return word
        if word in with_value:
            next(rest, None)
    return None


def main() -> None:
    """What the command ``fedml`` does."""
    sys.modules.pop(_HOST_CLI, None)
    arguments = sys.argv[1:]
    if is_ours(arguments):
        from calfat_plugin.cli.main import main as calfat

        calfat(args=arguments, prog_name="fedml")
        return
    if arguments[:1] == ["run"] and len(arguments) > 1 and set(arguments[1:]) <= set(_HELP):
        from calfat_plugin.cli.main import main as calfat

        calfat(args=["run", "--help"], prog_name="fedml", standalone_mode=False)
        print("\nWithout a recipe, fedml run is FedML's own command:\n", flush=True)
    from calfat_plugin.host.installed import run_fedml_command

    run_fedml_command()
