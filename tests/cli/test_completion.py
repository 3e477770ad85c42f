"""Completion in shells: commands, options, shipped recipes, files."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from calfat_plugin.cli.main import COMMANDS, main
from calfat_plugin.shipped import shipped_files

CALFAT = [name for name in shipped_files() if name.startswith("calfat_")]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("calfat ", [f"plain,{name}" for name in COMMANDS]),
        ("calfat run calfat_", [*(f"plain,{name}" for name in CALFAT), "file,calfat_"]),
        ("calfat suite calfat_", ["file,calfat_"]),
        ("calfat init ", [f"plain,{name}" for name in shipped_files()]),
        ("calfat run --res", ["plain,--resume"]),
    ],
)
def test_what_bash_is_offered(typed: str, offered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_CALFAT_COMPLETE": "bash_complete"}
    ended = CliRunner().invoke(main, env=asked, prog_name="calfat")
    assert ended.stdout.splitlines() == offered, ended.stderr
