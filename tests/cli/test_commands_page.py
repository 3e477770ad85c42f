"""docs/commands.md: every command is on it, and exit codes are what it says."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from calfat_plugin.cli.main import COMMANDS
from tests.cli.runner import ROOT, Ended, calfat

PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")


def test_every_command_has_a_row_in_order() -> None:
    assert re.findall(r"^\| `calfat ([a-z-]+)", PAGE, re.MULTILINE) == list(COMMANDS)


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of stopped and failing processes are checked where there are such: tests/runs/test_stop.py and others."""
    monkeypatch.chdir(tmp_path)
    assert calfat("check", "calfat_digits").code == 0
    assert calfat("check", "missing.yaml") == Ended(2, "", "error: missing.yaml: no such file.\n")
    assert calfat("check").code == 2

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("calfat_plugin.cli.run.read_document", stopped)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert calfat("run", "calfat_digits").code == 130
    finally:
        signal.signal(signal.SIGINT, before)  # a stopped command ignores it to its end, here the end of this call
