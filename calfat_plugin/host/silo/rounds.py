"""What the server knows of its clients: which process is which party, who was heard, and who has answered a round.

:class:`Presence` is asked in receiving threads, before a sign of life is let in. :class:`RollCall` belongs to the
server's loop and knows the clients that were let in. A :class:`Round` lets their answers in.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from calfat_plugin.federation.wire import Wire
from calfat_plugin.host.transports.base import PostponedError
from calfat_plugin.host.transports.message import Message, RefusedError
from calfat_plugin.recipe.silo import Silo

log = logging.getLogger(__name__)

BEAT = 2.0  # seconds between two signs of life of a client
_ENDED_AFTER = 3 * BEAT  # a process that is silent for so long has ended, and another may take its rank
_SILENT_AFTER = 5 * BEAT  # a client that is silent for so long may be gone
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
        self.sessions: dict[int, str] = {}  # of the clients that have come; one that is started again has a new session
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
        """Note as gone those of ``ranks`` that have been silent for some time."""
        now = time.monotonic()
        for rank in ranks:
            last_heard = self._last_heard.get(rank, -math.inf)
            if now - last_heard > _SILENT_AFTER:
                self.gone.add(rank)


class Round:
    """A round under way. Parties go by rank, except in ``answers``, which has client ids (rank - 1).

    A ticket travels with the model to the address that the recipe gives the client's rank, and the answer shows it. So
    a stranger cannot answer for a client, also where there are no certificates.
    """

    def __init__(self, number: int, clients: Sequence[int], settings: Silo, previous: Round | None) -> None:
        self.number = number
        self.ranks = [client + 1 for client in clients]
        self.deadline = time.monotonic() + settings.round_deadline
        self.tickets = {rank: secrets.token_hex(16) for rank in self.ranks}
        self.sent_to: dict[int, str] = {}  # rank to the session to which the model was sent
        self.arrived: set[str] = set()  # sessions that have confirmed the model; filled by sending threads
        self.answers: dict[int, tuple[int, Wire]] = {}  # client to (number of examples, message)
        self._settings = settings
        self._previous_tickets: dict[str, int] = {}
        if previous is not None:
            self._previous_tickets = dict.fromkeys(previous.tickets.values(), previous.number)
        self._late: dict[int, int] = {}  # rank to the earlier round that it has answered during this one

    @property
    def open_ranks(self) -> list[int]:
        """The clients that have not answered."""
        return [rank for rank in self.ranks if rank - 1 not in self.answers]

    @property
    def quorum(self) -> int:
        """How many answers the round needs."""
        if self._settings.min_clients is None:
            return len(self.ranks)
        return min(self._settings.min_clients, len(self.ranks))

    @property
    def num_models_arrived(self) -> int:
        arrived = set(self.arrived)
        for client in self.answers:  # an answer may come before the receipt of the model
            arrived.add(self.sent_to[client + 1])
        return len(arrived)

    def is_over(self, gone: set[int]) -> bool:
        """Whether all have answered, the deadline has passed, or there are enough answers and no other is expected."""
        if not self.open_ranks or time.monotonic() >= self.deadline:
            return True
        waited_for = set(self.open_ranks) - gone
        return not waited_for and len(self.answers) >= self.quorum

    def check_update(self, envelope: Message) -> None:
        """Refuse an update without the ticket that its sender got in this round. Called in receiving threads."""
        rank = envelope.get_sender_id()
        ticket = str(envelope.get("ticket"))
        expected = self.tickets.get(rank)
        if expected is None or not secrets.compare_digest(ticket.encode(), expected.encode()):
            previous = self._previous_tickets.get(ticket)
            if previous is None:
                raise RefusedError(f"an update of rank {rank} without the ticket that this rank was sent")
            self._late[rank] = previous
            raise RefusedError(
                f"an update of rank {rank} for round {previous}, which is over; this is round {self.number}"
            )
        if envelope.get("num_samples") is None or envelope.get("round") != self.number:
            raise RefusedError("an update without round or number of examples")

    def why_absent(self, rank: int, roll_call: RollCall) -> str:
        """Why the round ended without this client's answer, for its record."""
        client = f"client {rank - 1}"
        if rank in self._late:
            return f"{client}: only an answer to round {self._late[rank]} came"
        if rank not in roll_call.sessions:
            return f"{client}: never came"
        if time.monotonic() < self.deadline:  # the round did not wait for this client
            return f"{client}: no sign of life since an earlier round"
        reason = f"{client}: no answer within {self._settings.round_deadline:g} s"
        if rank in roll_call.gone:
            reason += ", and no sign of life"
        return reason
