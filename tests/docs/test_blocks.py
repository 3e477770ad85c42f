"""The program of docs/python.md works as printed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runner import ROOT
from tests.docs.pages import blocks


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
