"""docs/tutorial.md: its commands, as a reader types them, in a new environment."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from calfat_plugin.cli.main import COMMANDS
from calfat_plugin.cli.new_plugin import KINDS, render
from tests.cli.runner import ROOT
from tests.contract.new_environment import NewEnvironment

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
NOT_RUN = "<!-- not run -->\n"
BLOCKS = re.findall(rf"^({NOT_RUN})?```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SCRIPT = "".join(block for not_run, block in BLOCKS if not not_run)


def test_one_block_is_not_run_and_says_so() -> None:
    assert [bool(not_run) for not_run, _ in BLOCKS] == [True, *[False] * (len(BLOCKS) - 1)]
    assert PAGE.count("not run by the test") == 1


def test_every_command_is_one_of_ours() -> None:
    for line in SCRIPT.splitlines():
        program, _, rest = line.partition(" ")
        assert program in ("calfat", "cd", "python", "pip")
        assert program != "calfat" or rest.split()[0] in COMMANDS


def test_the_method_on_the_page_is_the_one_that_is_written() -> None:
    """But for its docstrings."""
    (shown,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    written = re.sub(r'\n +"""(.|\n)*?"""\n', "\n", render("my-fat", "trainer")["my_fat.py"])
    assert re.sub(r"\s+", " ", shown) in re.sub(r"\s+", " ", written)
    assert all(f"`{kind}`" in PAGE for kind in KINDS)


@pytest.mark.slow
def test_the_commands_work_in_this_order(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    environment = NewEnvironment.make(tmp_path / "environment")
    done = environment.shell(SCRIPT, tmp_path)
    assert done.code == 0, done.out + done.err
    assert (tmp_path / "runs" / "comparison.html").exists()
    assert (tmp_path / "my-fat" / "runs" / "mostly" / "results.json").exists()
    assert "2 passed in " in done.out
    assert "my-fat (local trainer), offered by my-fat 0.1 (my-fat)" in done.out
    assert done.out.rstrip().splitlines()[-1].startswith("my_fat.yaml: good. my-fat with fedavg on digits")
