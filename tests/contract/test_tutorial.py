"""docs/tutorial.md: its commands in their order, those that need an installation in a new environment."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import click
import pytest

from calfat_plugin.cli.main import main
from calfat_plugin.cli.new_plugin import KINDS, render
from tests.cli.runner import ROOT
from tests.contract.new_environment import NewEnvironment
from tests.docs.pages import blocks, text_of
from tests.docs.reader import Reader

CONTEXT = click.Context(main, info_name="calfat")
BLOCKS = [block for block in blocks("tutorial.md") if block.is_run]
COMMANDS = [block for block in BLOCKS if block.language == "sh"]
SCRIPT = "".join(block.text for block in COMMANDS)
INSTALLED = "python -m pytest\n"  # from here on


def test_every_command_is_understood() -> None:
    for line in SCRIPT.splitlines():
        program, *words = shlex.split(line)
        assert program in ("calfat", "cd", "python", "pip")
        if program == "calfat":
            command = main.get_command(CONTEXT, words[0])
            assert command is not None
            command.make_context(words[0], words[1:], parent=CONTEXT, resilient_parsing=False)


def test_the_method_on_the_page_is_the_one_that_is_written() -> None:
    """But for its docstrings."""
    (shown,) = (block.text for block in BLOCKS if block.language == "python")
    written = re.sub(r'\n +"""(.|\n)*?"""\n', "\n", render("my-fat", "trainer")["my_fat.py"])
    assert re.sub(r"\s+", " ", shown) in re.sub(r"\s+", " ", written)
    assert all(f"`{kind}`" in text_of("tutorial.md") for kind in KINDS)


def test_the_commands_work_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With smaller runs, in this process, up to those for an installed plugin."""
    follow_first(tmp_path, monkeypatch)
    assert (tmp_path / "runs" / "comparison.html").exists()
    assert (tmp_path / "my-fat" / "runs" / "mostly" / "results.json").exists()


@pytest.mark.slow
def test_an_installed_plugin_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = follow_first(tmp_path, monkeypatch)
    done = NewEnvironment.make(tmp_path / "environment").shell("".join(rest), Path.cwd())
    assert done.code == 0, done.out + done.err
    assert "2 passed in " in done.out
    assert "my-fat (local trainer), offered by my-fat 0.1 (my-fat)" in done.out
    assert done.out.rstrip().splitlines()[-1].startswith("my_fat.yaml: good. my-fat with fedavg on digits")


def follow_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Work as the page says, and return the commands that are left: those that need an environment."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    reader = Reader(folder, monkeypatch)
    commands = [block.text for block in COMMANDS]
    first = commands.index(INSTALLED)
    for block in COMMANDS[:first]:
        reader.follow(block)
    return commands[first:]
