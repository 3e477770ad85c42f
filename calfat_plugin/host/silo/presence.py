"""Which process is which party: the first of a rank is that party until it falls silent, and the next is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from calfat_plugin.host.transports.messages import PostponedError, RefusedError

BEAT = 2.0  # seconds between two signs of life of a client
_GONE = 3 * BEAT  # a party that is silent for so long has ended, and may be started again
_PROOF = 2  # signs of life that a party gives beside another of its rank, before that one is refused for good


@dataclass
class _Holder:
    """The process that is a party, and another that wants to be it."""

    session: str
    heard: float
    beats: int = 0
    rival: str = ""
    beats_before: int = 0


class Presence:
    """Signs of life by rank. Callable from any thread.

    Args:
        on_rival: called with (rank, session of the process that is this party) when another is refused.
        now: the clock, in seconds.
    """

    def __init__(self, on_rival: Callable[[int, str], object], now: Callable[[], float] = time.monotonic) -> None:
        self._on_rival, self._now = on_rival, now
        self._holders: dict[int, _Holder] = {}
        self._lock = threading.Lock()

    def sign_of_life(self, rank: int, session: str) -> None:
        """Take note of a process that says it is this rank.

        Raises:
            PostponedError: another was this rank a moment ago, and it is not known yet whether it still is.
            RefusedError: another is this rank, and alive.
        """
        with self._lock:
            holder = self._holders.get(rank)
            if holder is None or self._now() - holder.heard > _GONE:
                holder = self._holders[rank] = _Holder(session, self._now())
            if holder.session == session:
                holder.heard, holder.beats = self._now(), holder.beats + 1
                return
            if holder.rival != session:
                holder.rival, holder.beats_before = session, holder.beats
            alive = holder.beats - holder.beats_before >= _PROOF
        if not alive:
            raise PostponedError(f"another process was rank {rank} until a moment ago; waiting whether it has ended")
        self._on_rival(rank, holder.session)
        raise RefusedError(
            f"another process is rank {rank}, and alive. Two processes cannot be one party: end one of them, or give "
            "this one its own --rank"
        )
