"""Texts that another party wrote, made fit for a log, a table and a terminal."""

from __future__ import annotations

MAX_TEXT = 300  #: characters of a peer's text that are kept


def peer_text(text: object) -> str:
    """One line of at most :data:`MAX_TEXT` printable characters.

    A line break, a terminal's escape sequence or half of a surrogate pair could pretend to be another entry of a log,
    drive the terminal, or stop the program that writes it. Each becomes a replacement character, white space a space.

    Args:
        text: what a peer sent, or an error that quotes it; converted with ``str``.
    """
    line = str(text)[: 4 * MAX_TEXT].strip()  # no more is looked at, however long it is
    shown = "".join(sign if sign.isprintable() else " " if sign.isspace() else "\ufffd" for sign in line)
    return shown if len(shown) <= MAX_TEXT else f"{shown[: MAX_TEXT - 4]} ..."
