"""The roll-call: which process is which party, and which clients the server has heard from.

:class:`Presence` is asked in receiving threads, before a sign of life is let in. :class:`RollCall` belongs to the
server's loop and knows the clients that were let in.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from calfat_plugin.host.transports.base import PostponedError
from calfat_plugin.host.transports.message import Message, RefusedError

log = logging.getLogger(__name__)

BEAT = 2.0  # seconds between two signs of life of a client
_ENDED_AFTER = 3 * BEAT  # a process that is silent for so long has ended, and another may take its rank
_SILENT_AFTER = 5 * BEAT  # a client that was not heard of for so long may be gone
_BEATS_OF_PROOF = 2  # signs of life beside those of a rival, after which the rival is refused for good


def check_sign_of_life(envelope: Message, fingerprint: str) -> str:
    """The session of the client that sent it; one with another recipe than ``fingerprint`` is refused."""
    session = envelope.get("session")
    if not isinstance(session, str):
        raise RefusedError("a sign of life without a session")
    if envelope.get("recipe") != fingerprint:
        raise RefusedError("it runs another recipe, seed or version than the server; give all parties the same")
    return session


@dataclass
class _Holder:
    """The process that is a party."""

    session: str
    last_heard: float
    beats: int = 0
    rival: str = ""  # session of another process that says it is this party
    beats_before_rival: int = 0


class Presence:
    """Decides which process is a rank, by signs of life. Callable from any thread.

    When a process is refused, ``on_rival`` is given its rank and the session of the process that is this party.
    """

    def __init__(self, on_rival: Callable[[int, str], object], now: Callable[[], float] = time.monotonic) -> None:
        self._on_rival = on_rival
        self._now = now
        self._holders: dict[int, _Holder] = {}
        self._lock = threading.Lock()

    def sign_of_life(self, rank: int, session: str) -> None:
        """Take note of a process that says it is this rank.

        Raises:
            PostponedError: another process was this rank a moment ago, and may have ended.
            RefusedError: another process is this rank.
        """
        with self._lock:
            now = self._now()
            holder = self._holders.get(rank)
            if holder is None or now - holder.last_heard > _ENDED_AFTER:
                holder = _Holder(session, now)
                self._holders[rank] = holder
            if holder.session == session:
                holder.last_heard = now
                holder.beats += 1
                return
            if holder.rival != session:
                holder.rival = session
                holder.beats_before_rival = holder.beats
            is_alive = holder.beats - holder.beats_before_rival >= _BEATS_OF_PROOF
        if not is_alive:
            raise PostponedError(f"another process was rank {rank} until a moment ago; waiting whether it has ended")
        self._on_rival(rank, holder.session)
        raise RefusedError(
            f"rank {rank} is already in use. Two processes cannot be one party: end one of them, or give "
            "this one its own --rank"
        )


class RollCall:
    """The clients of a run by rank, as the server's loop knows them."""

    def __init__(self, num_clients: int) -> None:
        self.ranks = range(1, num_clients + 1)
        self.sessions: dict[
            int, str
        ] = {}  # of the clients that have come; a client that is started again has a new one
        self.gone: set[int] = set()  # clients for which no round waits until they are heard again
        self._last_heard: dict[int, float] = {}

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come yet."""
        return [rank for rank in self.ranks if rank not in self.sessions]

    def enter(self, rank: int, session: str) -> None:
        """Note the sign of life of a client."""
        earlier_session = self.sessions.get(rank)
        if earlier_session is not None and earlier_session != session:
            log.info("rank %d was started again", rank)
        self.sessions[rank] = session
        self.hear(rank)

    def hear(self, rank: int) -> None:
        """Note that anything of a client has arrived."""
        self._last_heard[rank] = time.monotonic()
        self.gone.discard(rank)

    def note_silence(self, ranks: Iterable[int]) -> None:
        """Take those of ``ranks`` for gone that were not heard of for some time."""
        now = time.monotonic()
        for rank in ranks:
            last_heard = self._last_heard.get(rank, -math.inf)
            if now - last_heard > _SILENT_AFTER:
                self.gone.add(rank)
