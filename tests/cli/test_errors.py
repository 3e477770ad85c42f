"""How commands end: bad input in a paragraph with exit code 2, a bug with its traceback."""

from __future__ import annotations

import sys

import pytest

from calfat_plugin.cli.errors import fail, user_errors, warn
from calfat_plugin.errors import DataError


def test_a_user_s_error_is_reported_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped, user_errors(lambda: "what is left"):
        raise DataError("cifar10 is missing.")
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", "error: cifar10 is missing.\nwhat is left\n")


def test_a_bug_gets_out() -> None:
    with pytest.raises(ZeroDivisionError), user_errors():
        raise ZeroDivisionError


def test_what_is_said_has_colour_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warn("odd.")
    assert capsys.readouterr().err == "warning: odd.\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    warn("odd.")
    assert capsys.readouterr().err == "\x1b[1;33mwarning:\x1b[0m odd.\n"
    with pytest.raises(SystemExit) as stopped:
        fail("wrong.", code=7)
    assert stopped.value.code == 7
    assert capsys.readouterr().err == "\x1b[1;31merror:\x1b[0m wrong.\n"
