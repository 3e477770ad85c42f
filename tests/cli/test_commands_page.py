"""docs/commands.md: every command is on it, its commands are understood, and exit codes are what it says."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import click
import pytest

from calfat_plugin.cli.errors import BAD_INPUT, INTERRUPTED
from calfat_plugin.cli.main import COMMANDS, main
from calfat_plugin.cli.suite import SOME_FAILED
from tests.cli.runner import ROOT, Ended, calfat

PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
CONTEXT = click.Context(main, info_name="calfat")


def command(name: str) -> click.Command:
    found = main.get_command(CONTEXT, name)
    assert found is not None
    return found


def test_every_command_has_a_row_in_order() -> None:
    assert re.findall(r"^\| `calfat ([a-z-]+)", PAGE, re.MULTILINE) == list(COMMANDS)


def test_the_page_lists_the_commands_with_json() -> None:
    (names,) = re.findall(r"^((?:`[a-z-]+`[, and]*)+) take `--json`", PAGE, re.MULTILINE)
    with_json = {name for name in COMMANDS if any("--json" in option.opts for option in command(name).params)}
    assert set(re.findall(r"`([a-z-]+)`", names)) == with_json
    assert set(COMMANDS) - with_json == {
        *("init", "download", "new-plugin", "schema", "completion", "certs", "link-fedml", "unlink-fedml"),
    }


@pytest.mark.parametrize("line", re.findall(r"^(calfat .*?)(?: +#.*| > .*)?$", PAGE, re.MULTILINE))
def test_commands_of_the_page_are_understood(line: str) -> None:
    _, name, *words = shlex.split(line)
    command(name).make_context(name, words, parent=CONTEXT, resilient_parsing=False)


def test_the_page_lists_the_exit_codes() -> None:
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)]
    assert codes == [0, SOME_FAILED, BAD_INPUT, INTERRUPTED]


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
