"""How commands end: bad input is reported in one paragraph with exit code 2, a bug of ours keeps its traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from calfat_plugin.disk import ALLOW_MORE, NO_ROOM, TOO_MANY_OPEN, TRY_AGAIN
from calfat_plugin.errors import CalfatError, short
from calfat_plugin.peer_text import printable

BAD_INPUT = 2
INTERRUPTED = 130  # what shells expect after Ctrl-C
_RED, _YELLOW = 31, 33


@contextmanager
def user_errors(after: Callable[[], str] = str, after_stop: Callable[[], str] = str) -> Iterator[None]:
    """Report an error that the user can fix without a traceback, and exit with 2.

    Such an error is a :class:`CalfatError`, a path that the system refuses, a full disk, or a standard output that
    cannot be written. ``after`` makes a further line, such as how to resume; ``after_stop`` makes it where nobody reads
    the output any more.
    """
    try:
        yield
    except CalfatError as error:
        fail(str(error), after())
    except OSError as error:
        if error.filename is None and _output_is_lost():
            fail(f"standard output cannot be written ({error.strerror}).", after_stop())
        if error.filename is None and error.errno in NO_ROOM:
            fail(f"a file cannot be written ({error.strerror}). {TRY_AGAIN}", after())
        if error.errno in TOO_MANY_OPEN:  # the file's name does not matter: the next one would fail, too
            fail(f"a file cannot be opened ({error.strerror}). {ALLOW_MORE}", after())
        # A file that may be missing is looked for before it is opened, so a missing one is a bug.
        if error.filename is None or isinstance(error, FileNotFoundError):
            raise
        path = short(os.fsdecode(error.filename), 120)
        fail(f"{path}: cannot be used ({error.strerror}). Check this path and its permissions.", after())


@contextmanager
def stop_signals() -> Iterator[tuple[signal.Signals, ...]]:
    """Let SIGTERM (a polite kill) and SIGHUP (a closed terminal) stop as Ctrl-C does; gives the signals that stop."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, and that stays so
            numbers.append(number)
    previous = [signal.signal(number, stop) for number in numbers]
    try:
        yield (signal.SIGINT, *numbers)
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def _output_is_lost() -> bool:
    """Whether standard output cannot be written; if so, it is replaced, so that Python's last flush does not fail."""
    try:
        print(flush=True)
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return True
    return False


def coloured(stream: TextIO | None) -> bool:
    """Whether to write colours there: to a terminal that shows them, unless the user has set ``NO_COLOR``."""
    is_terminal = stream is not None and stream.isatty()
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")


def fail(message: str, hint: str = "", code: int = BAD_INPUT) -> NoReturn:
    """Print ``error: message`` on stderr, in bold red on a terminal, and exit."""
    _say("error", _RED, message)
    if hint:
        with suppress(OSError):
            print(hint, file=sys.stderr)
    sys.exit(code)


def warn(*messages: str) -> None:
    """Print ``warning: message`` on stderr for each."""
    for message in messages:
        _say("warning", _YELLOW, message)


def _say(word: str, colour: int, message: str) -> None:
    prefix = f"{word}:"
    if coloured(sys.stderr):
        prefix = f"\x1b[1;{colour}m{prefix}\x1b[0m"
    with suppress(OSError):  # the exit status remains
        print(prefix, printable(message), file=sys.stderr)  # a plugin may have written it


def write_page(write: Callable[[], Path], directory: Path) -> None:
    """Write a report after the results were saved, and print where it is; a failure is only a warning."""
    from calfat_plugin.report import try_report

    page = try_report(write, directory, warn)
    if page is not None:
        print(f"report: {page}")
