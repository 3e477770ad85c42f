"""The log of refused messages: in one form for every backend, and never longer than a stranger should make it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from calfat_plugin.peer_text import peer_text

log = logging.getLogger(__name__)

_WINDOW = 60.0  # seconds
_PER_ADDRESS = 40  # lines a window: one that floods the log must not hide what the others did
_IN_ALL = 200


class RefusalLog:
    """Logs refused messages, a limited number a minute; those left out are counted. Callable from any thread.

    Args:
        now: the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._begun = now, now()
        self._lines: Counter[str] = Counter()
        self._left_out = 0
        self._lock = threading.Lock()

    def add(self, sender: str, reason: object) -> None:
        """Log one, or count it.

        Args:
            sender: network address (``host:port``), name or rank.
            reason: why it was refused.
        """
        address = sender.rpartition(":")[0] or sender
        with self._lock:
            if self._now() - self._begun >= _WINDOW:
                self._begin_window()
            if self._lines[address] >= _PER_ADDRESS or self._lines.total() >= _IN_ALL:
                self._left_out += 1
                return
            self._lines[address] += 1
        log.warning("message from %s refused: %s", peer_text(sender), peer_text(reason))

    def close(self) -> None:
        """Log the last count."""
        with self._lock:
            self._begin_window()

    def _begin_window(self) -> None:
        if self._left_out:
            seconds = self._now() - self._begun
            log.warning("%d more messages were refused within %.0f s, and are not listed", self._left_out, seconds)
        self._lines.clear()
        self._left_out, self._begun = 0, self._now()
