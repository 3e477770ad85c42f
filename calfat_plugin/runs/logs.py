"""Where the chatter goes: log records, warnings and everything the host prints, into the run's ``log.txt``."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Send records, warnings and prints of this process to ``path`` (appended) and nowhere else."""
    root = logging.getLogger()
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    previous_handlers, previous_level = root.handlers[:], root.level
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    prints = _PrintsToLog(logging.getLogger("prints"))
    try:
        with redirect_stdout(prints), redirect_stderr(prints):
            yield
    finally:
        prints.flush()
        logging.captureWarnings(False)
        root.handlers = previous_handlers
        root.setLevel(previous_level)
        handler.close()


class _PrintsToLog(io.TextIOBase):
    """A text stream whose lines become log records."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._pending = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.info("%s", line.rstrip())
        return len(text)

    def flush(self) -> None:
        if self._pending.strip():
            self._logger.info("%s", self._pending.rstrip())
        self._pending = ""
