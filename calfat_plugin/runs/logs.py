"""Where the chatter goes: log records, warnings and everything the host prints, into the run's ``log.txt``."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from calfat_plugin.disk import refuse_link
from calfat_plugin.errors import RunError

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Send records, warnings and prints of this process to ``path`` (appended) and nowhere else, for a while.

    Afterwards the process's handlers, levels, streams and way of showing warnings are what they were.
    """
    refuse_link(path, "the log is written")
    if path.is_fifo():  # opening it would wait for its reader for ever
        raise RunError(f"{path}: is a pipe, so the log cannot be written there. Remove it.")
    root = logging.getLogger()
    handler = _QuietFileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    # A logger of its own, not below the root: a library that puts a handler for sys.stderr on the root logger would
    # else log its own output for ever.
    prints = logging.Logger("prints")
    prints.addHandler(handler)
    stream = _PrintsToLog(prints)
    shown = logging.Logger("py.warnings")
    shown.addHandler(handler)

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        shown.warning("%s", warnings.formatwarning(message, category, filename, lineno, line).rstrip())

    previous = root.handlers[:], root.level, warnings.showwarning
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    warnings.showwarning = show
    try:
        with redirect_stdout(stream), redirect_stderr(stream):
            yield
    finally:
        stream.write("\n")
        root.handlers, level, warnings.showwarning = previous
        root.setLevel(level)
        handler.close()


class _QuietFileHandler(logging.FileHandler):
    """A file handler that gives up a record it cannot write: a full disk must not end a run for want of a log line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the base class's name)
        """Nothing; the base class would print to stderr, which leads back here."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _PrintsToLog(io.TextIOBase):
    """A text stream whose lines become log records; of a bar, which is drawn over itself, the end alone."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._pending = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, pending = (self._pending + text.replace("\r\n", "\n")).split("\n")
        for line in lines:
            self._log(line)
        self._pending = pending[max(0, pending.rstrip("\r").rfind("\r")) :]
        return len(text)

    def flush(self) -> None:
        if "\r" not in self._pending:
            self._log(self._pending)
            self._pending = ""

    def _log(self, line: str) -> None:
        if shown := line.rstrip().rpartition("\r")[2]:
            self._logger.info("%s", shown)
