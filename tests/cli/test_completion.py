"""Completion in shells: commands, options, shipped recipes, files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from calfat_plugin.cli.completion import SHELLS
from calfat_plugin.cli.main import COMMANDS
from calfat_plugin.shipped import shipped_files
from tests.cli.runner import COMMAND, calfat, python


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(shell: str) -> None:
    ended = calfat("completion", shell)
    assert (ended.code, ended.err) == (0, "")
    assert f"_CALFAT_COMPLETE={shell}_complete" in ended.out
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=ended.out, text=True, check=True)


CALFAT = [name for name in shipped_files() if name.startswith("calfat_")]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("calfat ", [f"plain,{name}" for name in COMMANDS]),
        ("calfat run calfat_", [*(f"plain,{name}" for name in CALFAT), "file,calfat_"]),
        ("calfat suite digits_table1", ["plain,digits_table1", "plain,digits_table10", "file,digits_table1"]),
        ("calfat init ", [f"plain,{name}" for name in shipped_files()]),
        ("calfat run --res", ["plain,--resume"]),
        ("calfat completion ", [f"plain,{shell}" for shell in SHELLS]),
    ],
)
def test_what_bash_is_offered(typed: str, offered: list[str], tmp_path: Path) -> None:
    words = typed.split(" ")
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1), "_CALFAT_COMPLETE": "bash_complete"}
    ended = python(COMMAND, cwd=tmp_path, **asked)
    assert ended.out.splitlines() == offered, ended.err


def test_another_shell_is_refused_with_those_there_are() -> None:
    ended = calfat("completion", "tcsh")
    assert ended.code == 2
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'." in ended.err
