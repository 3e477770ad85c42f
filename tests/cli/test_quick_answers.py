"""Help, check and plugins answer at once: as processes of their own they import nothing heavy."""

from __future__ import annotations

import pytest
import yaml

from calfat_plugin import __version__
from calfat_plugin.cli.main import COMMANDS
from calfat_plugin.experiment import assemble
from calfat_plugin.recipe import read_document
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.registry import Registry
from tests.cli.runner import RECIPES, REPORTING, Ended, calfat, python

DIGITS = str(RECIPES / "calfat_digits.yaml")


QUICK: list[tuple[list[str], str]] = [
    (["--help"], "Usage: calfat [OPTIONS] COMMAND [ARGS]..."),
    (["--version"], f"calfat, version {__version__}"),
    (["run", "--help"], "Usage: calfat run [OPTIONS] RECIPE"),
    (["check", DIGITS], f"{DIGITS}: good."),
    (["plugins"], "local trainers   calfat.trainer"),
    (["plugins", "calfat"], "calfat (local trainer)"),
]
ONE_BY_ONE = """
import contextlib
from calfat_plugin.cli.main import main
for words in {words!r}:
    with contextlib.suppress(SystemExit):
        main(words, prog_name="calfat")
    print("-- imported:", *sorted(set(heavy) & set(sys.modules)))
"""


def test_they_import_nothing_heavy() -> None:
    ended = python(REPORTING + ONE_BY_ONE.format(words=[words for words, _ in QUICK]))
    assert (ended.code, ended.err) == (0, "imported:\n")
    said = ended.out.split("-- imported:\n")
    assert [text for (_, first), text in zip(QUICK, said[:-1], strict=True) if not text.startswith(first)] == []


def test_the_package_is_a_program_like_its_command() -> None:
    """Where the script of an environment is not on the PATH."""
    module = "import runpy; runpy.run_module('calfat_plugin', run_name='__main__', alter_sys=True)"
    for words in (["--version"], ["check", DIGITS], ["no-such-command"]):
        ended, command = python(module, *words), calfat(*words)
        assert (ended.code, ended.out, ended.err) == (command.code, command.out, command.err)


def test_help_lists_every_command_with_its_purpose() -> None:
    shown = calfat("--help").out
    for name, purpose in COMMANDS.items():
        assert f"  {name} " in shown
        assert purpose in " ".join(shown.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there(name: str) -> None:
    ended = calfat(name, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"Usage: calfat {name} ")


def test_check_says_in_a_line_what_would_run() -> None:
    overrides = ("--set", "train_args.comm_round=7", "--set", "train_args.client_num_per_round=2", "--seed", "3")
    assert calfat("check", DIGITS, *overrides) == Ended(
        0,
        f"{DIGITS}: good. calfat with fedavg on digits (dirichlet), cnn_small: 5 clients, 2 a round, 7 rounds, "
        "seed 3, on FedML.\n",
        "",
    )


def test_check_shows_the_recipe_in_full_as_a_recipe() -> None:
    shown = calfat("check", DIGITS, "--show", "--set", "train_args.comm_round=7").out
    registry = Registry.load(entry_points=False)
    as_run = assemble(parse_document(shown, "shown.yaml"), registry).as_run()
    assert yaml.safe_load(shown) == as_run
    wanted = assemble(read_document(DIGITS).with_overrides(["train_args.comm_round=7"]), registry).as_run()
    assert as_run == wanted
