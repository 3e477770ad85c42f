"""Texts that somebody else wrote, made fit for a log, a table and a terminal."""

from __future__ import annotations

MAX_TEXT = 300  #: most characters of a peer's text that are shown


def printable(text: str) -> str:
    """The same with spaces for other white space than line ends, and replacement characters for control characters.

    A terminal's escape sequence or half of a surrogate pair could drive the terminal, or stop the program that writes
    it.
    """
    signs = []
    for sign in text:
        if sign.isprintable() or sign == "\n":
            signs.append(sign)
        elif sign.isspace():
            signs.append(" ")
        else:
            signs.append("\ufffd")
    return "".join(signs)


def error_text(error: BaseException) -> str:
    """Class and text of an exception that somebody else's code has raised; making its text may raise, too."""
    try:
        text = peer_text(error)
    except (Exception, SystemExit):
        text = "it has no text, for its __str__ raises"
    name = type(error).__name__
    if not text:
        return name
    return f"{name}: {text}"


def peer_text(text: object) -> str:
    """One line of at most :data:`MAX_TEXT` printable characters: a line end could pretend to be another entry."""
    begin = str(text)[: 4 * MAX_TEXT].strip()  # a peer may send a very long text, and reading all of it takes time
    line = printable(begin).replace("\n", " ")
    if len(line) > MAX_TEXT:
        line = f"{line[: MAX_TEXT - 4]} ..."
    return line
