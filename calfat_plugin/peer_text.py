"""Texts that somebody else wrote, made fit for a log, a table and a terminal."""

from __future__ import annotations

MAX_TEXT = 300  #: characters of a peer's text that are kept


def printable(text: str) -> str:
    """The same with spaces for other white space than line ends, and replacement characters for control characters.

    A terminal's escape sequence or half of a surrogate pair could drive the terminal, or stop the program that writes
    it.
    """
    shown = (sign if sign.isprintable() or sign == "\n" else " " if sign.isspace() else "\ufffd" for sign in text)
    return "".join(shown)


def error_text(error: BaseException) -> str:
    """Class and text of an exception that somebody else's code has raised; making its text may raise, too."""
    try:
        text = peer_text(error)
    except (Exception, SystemExit):
        text = "it has no text, for its __str__ raises"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def peer_text(text: object) -> str:
    """One line of at most :data:`MAX_TEXT` printable characters: a line end could pretend to be another entry."""
    shown = printable(str(text)[: 4 * MAX_TEXT].strip()).replace("\n", " ")  # no more is looked at, however long it is
    return shown if len(shown) <= MAX_TEXT else f"{shown[: MAX_TEXT - 4]} ..."
