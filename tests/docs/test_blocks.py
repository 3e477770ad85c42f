"""Each fenced block of the pages for newcomers is run by a test, or a comment in front of it says why not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runner import ROOT
from tests.docs.pages import Block, blocks

PAGES = ("../README.md", "index.md", "install.md", "tutorial.md", "python.md")
#: (page, language of a block) to the test that runs all such blocks.
RUN_BY = {
    ("../README.md", "sh"): "tests/test_setup.py::test_the_commands_of_a_page_work",
    ("install.md", "sh"): "tests/test_setup.py::test_the_commands_of_a_page_work",
    ("tutorial.md", "sh"): "tests/contract/test_tutorial.py::test_the_commands_work_in_this_order",
    (
        "tutorial.md",
        "python",
    ): "tests/contract/test_tutorial.py::test_the_method_on_the_page_is_the_one_that_is_written",
    ("python.md", "python"): "tests/docs/test_blocks.py::test_the_program_on_the_page_works",
}


def not_run(page: str, found: list[Block]) -> list[str]:
    """First lines of blocks that no test runs and no comment explains."""
    return [block.text.splitlines()[0] for block in found if block.is_run and (page, block.language) not in RUN_BY]


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_run_or_says_why_not(page: str) -> None:
    assert blocks(page)
    assert not_run(page, blocks(page)) == []


def test_the_program_on_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but for a shorter training."""
    program = "".join(block.text for block in blocks("python.md") if block.language == "python")
    rounds = '"train_args.comm_round": 5'
    assert rounds in program
    tiny = '"train_args.comm_round": 1, "data_args.max_train_examples": 100, "data_args.max_test_examples": 20'
    os.symlink(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("calfat_plugin.report.write_run_report", lambda path: path)
    every_image, names = 'calfat.load_dataset("digits").test', dict[str, Any]()
    assert every_image in program
    exec(program.replace(rounds, tiny).replace(every_image, f"{every_image}.subset([0])"), names)
    assert names["x_adv"].shape == (1, 1, 8, 8)
