"""Completion in shells: commands, options, shipped recipes, files."""

from __future__ import annotations

from pathlib import Path

import pytest

from calfat_plugin.cli.main import COMMANDS
from calfat_plugin.shipped import shipped_files
from tests.cli.runner import COMMAND, python

CALFAT = [name for name in shipped_files() if name.startswith("calfat_")]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("calfat ", [f"plain,{name}" for name in COMMANDS]),
        ("calfat run calfat_", [*(f"plain,{name}" for name in CALFAT), "file,calfat_"]),
        ("calfat suite digits_table1", ["plain,digits_table1", "plain,digits_table10", "file,digits_table1"]),
        ("calfat init ", [f"plain,{name}" for name in shipped_files()]),
        ("calfat run --res", ["plain,--resume"]),
    ],
)
def test_what_bash_is_offered(typed: str, offered: list[str], tmp_path: Path) -> None:
    words = typed.split(" ")
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1), "_CALFAT_COMPLETE": "bash_complete"}
    ended = python(COMMAND, cwd=tmp_path, **asked)
    assert ended.out.splitlines() == offered, ended.err
