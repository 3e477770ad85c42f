"""How commands end: bad input in a paragraph with exit code 2, a bug with its traceback."""

from __future__ import annotations

import errno
import io
import os
import sys

import pytest
from rich.console import Console

from calfat_plugin.cli.errors import fail, user_errors, warn
from calfat_plugin.disk import TRY_AGAIN
from calfat_plugin.errors import DataError, PluginError, did_you_mean
from calfat_plugin.progress import Bars, Lines


def test_a_user_s_error_is_reported_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped, user_errors(lambda: "what is left"):
        raise DataError("cifar10 is missing.")
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", "error: cifar10 is missing.\nwhat is left\n")
    with pytest.raises(ZeroDivisionError), user_errors():  # a bug gets out
        raise ZeroDivisionError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_no_bug(capsys: pytest.CaptureFixture[str], number: int) -> None:
    """Whoever wrote: the system does not name a file that was open already."""
    with pytest.raises(SystemExit) as stopped, user_errors(lambda: "what is left"):
        raise OSError(number, os.strerror(number))
    text = f"error: a file cannot be written ({os.strerror(number)}). {TRY_AGAIN}\nwhat is left\n"
    assert (stopped.value.code, capsys.readouterr().err) == (2, text)
    with pytest.raises(OSError, match="Bad file descriptor"), user_errors():  # a bug
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


@pytest.mark.parametrize("path", [None, "some.file"])
def test_too_many_open_files_are_no_bug(capsys: pytest.CaptureFixture[str], path: str | None) -> None:
    with pytest.raises(SystemExit, match="2"), user_errors():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
    text = "error: a file cannot be opened (Too many open files). Allow more open files, such as ulimit -n 1024.\n"
    assert capsys.readouterr().err == text


def test_what_a_plugin_wrote_does_not_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), user_errors():
        raise PluginError("\x1b[31mred\x1b]0;title\x07,\r\nsecond\tline \udcff größe")
    shown = "\ufffd[31mred\ufffd]0;title\ufffd, \nsecond line \ufffd größe\n"
    assert capsys.readouterr().err == f"error: {shown}"
    warn("\x1b[2Jodd.")
    assert capsys.readouterr().err == "warning: \ufffd[2Jodd.\n"
    lines = Lines(sys.stdout, sys.stderr)
    lines.warn("\x1b[2Jodd.")
    lines.say("\x1b[2Jround 1")
    assert capsys.readouterr() == ("\ufffd[2Jround 1\n", "warning: \ufffd[2Jodd.\n")
    console = Console(file=io.StringIO(), force_terminal=False)
    Bars(console).warn("\x1b[2Jodd.")
    Bars(console).say("\x1b[2Jround 1")
    assert console.file.getvalue() == "warning: \ufffd[2Jodd.\n\ufffd[2Jround 1\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)],
    ids=str,
)
def test_what_is_said_has_colour_on_a_terminal_whose_user_wants_it(
    variables: dict[str, str], coloured: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warn("odd.")
    assert capsys.readouterr().err == "warning: odd.\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name, value in {"TERM": "xterm-256color", "NO_COLOR": "", **variables}.items():
        monkeypatch.setenv(name, value)
    warn("odd.")
    assert capsys.readouterr().err == ("\x1b[1;33mwarning:\x1b[0m odd.\n" if coloured else "warning: odd.\n")
    with pytest.raises(SystemExit) as stopped:
        fail("wrong.", code=7)
    assert stopped.value.code == 7
    assert capsys.readouterr().err == ("\x1b[1;31merror:\x1b[0m wrong.\n" if coloured else "error: wrong.\n")


@pytest.mark.parametrize(
    ("word", "known", "near"),
    [
        ("FedAvg", ["fedavg", "fedprox"], "fedavg"),
        ("betta", ["alpha", "beta", "delta"], "beta"),
        ("betta", ["alpha", "delta"], ""),  # three of five letters
        ("aa", ["apgd-ce", "autoattack", "natural"], "autoattack"),
        ("lr", ["lr_schedule", "learning_rate"], ""),  # of two: it may be either
        ("a", ["autoattack"], ""),
        ("tack", ["autoattack"], ""),
        ("", ["x"], ""),
        ("beta", ["alpha", "beta"], ""),  # what was wrong
    ],
)
def test_what_a_word_may_mean(word: str, known: list[str], near: str) -> None:
    assert did_you_mean(word, known) == (f" Did you mean '{near}'?" if near else "")
