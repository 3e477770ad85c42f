"""How commands end: bad input is reported in one paragraph with exit code 2, a bug of ours keeps its traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from calfat_plugin.errors import CalfatError

BAD_INPUT = 2
INTERRUPTED = 130  # what shells expect after Ctrl-C


@contextmanager
def user_errors(after: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Report a :class:`CalfatError` without a traceback and exit with 2.

    Args:
        after: a further line, made when the error happens, such as how to resume.
    """
    try:
        yield
    except CalfatError as error:
        fail(str(error), after())


def fail(message: str, hint: str = "", code: int = BAD_INPUT) -> NoReturn:
    """Print ``error: message`` on stderr, in bold red on a terminal, and exit."""
    prefix = "\x1b[1;31merror:\x1b[0m" if sys.stderr.isatty() else "error:"
    print(f"{prefix} {message}", file=sys.stderr)
    if hint:
        print(hint, file=sys.stderr)
    sys.exit(code)


def warn(*messages: str) -> None:
    """Print ``warning: message`` on stderr for each."""
    prefix = "\x1b[1;33mwarning:\x1b[0m" if sys.stderr.isatty() else "warning:"
    for message in messages:
        print(f"{prefix} {message}", file=sys.stderr)


def write_page(write: Callable[[], Path], directory: Path) -> None:
    """Write a report beside results that are safe already, and print where; a failure is only a warning."""
    from calfat_plugin.report import try_report

    if page := try_report(write, directory, warn):
        print(f"report: {page}")
