"""The server's last words: every client learns that the run is over, also one that is started again meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping

from fedml.core.distributed.communication.message import Message
from fedml.cross_silo.server.message_define import MyMessage

from calfat_plugin.host.silo.presence import BEAT
from calfat_plugin.host.transports.base import Transport
from calfat_plugin.host.transports.messages import Envelope, RefusedError

log = logging.getLogger(__name__)

_TO_LEAVE = 5.0  # seconds in which a client that is alive takes the goodbye
RECONNECT_SECONDS = 30.0  # seconds in which a client that was killed at the end may be started again and ask
TO_ASK = 5 * BEAT  # seconds in which a client that waits for a server asks


def check_sign_of_life(envelope: Envelope, fingerprint: str) -> str:
    """The session of a client that says it is there.

    Args:
        envelope: its message, a client's status.
        fingerprint: of what the server runs.

    Raises:
        RefusedError: it names no session, or runs something else.
    """
    session = envelope.fields.get("session")
    if not isinstance(session, str):
        raise RefusedError("a sign of life without a session")
    if envelope.fields.get("recipe") != fingerprint:
        raise RefusedError("it runs another recipe, seed or version than the server; give all parties the same")
    return session


class Shutdown:
    """Takes the server's transport over when no round is left, and answers every sign of life with the goodbye.

    It does not ask whether another process was that rank a moment ago: nothing is left that two could dispute.

    Args:
        transport: the server's.
        fingerprint: of what the server runs.
    """

    def __init__(self, transport: Transport, fingerprint: str) -> None:
        self._transport, self._fingerprint = transport, fingerprint
        self._awaited, self._until = set[int](), 0.0
        self._informed: set[int] = set()
        self._changed = threading.Condition()

    def say(self, sessions: Mapping[int, str], awaited: Iterable[int], seconds: float) -> None:
        """Begin; returns at once.

        Args:
            sessions: rank to session of the clients that are known, who are informed now.
            awaited: ranks for which :meth:`wait` stays.
            seconds: for how long, from now on.
        """
        self._awaited, self._until = set(awaited), time.monotonic() + seconds
        self._transport.admit = self._admit
        for rank, session in sessions.items():
            self._inform(rank, session)

    def wait(self) -> None:
        """Stay until the awaited have taken the goodbye, or their time is over."""
        if not self._all_informed(time.monotonic() + _TO_LEAVE):
            missing, left = sorted(self._awaited - self._informed), self._until - time.monotonic()
            log.info("ranks %s do not know yet that the run is over; waiting up to %.0f s for them", missing, left)
            self._all_informed(self._until)

    def _all_informed(self, until: float) -> bool:
        with self._changed:
            left = max(0.0, min(until, self._until) - time.monotonic())
            return self._changed.wait_for(lambda: self._awaited <= self._informed, left)

    def _admit(self, envelope: Envelope) -> None:
        if envelope.type != MyMessage.MSG_TYPE_C2S_CLIENT_STATUS:
            raise RefusedError("all rounds are done")
        self._inform(envelope.sender, check_sign_of_life(envelope, self._fingerprint))

    def _inform(self, rank: int, session: str) -> None:
        message = Message(MyMessage.MSG_TYPE_S2C_FINISH, 0, rank)
        message.add_params("session", session)
        self._transport.send_message(message, RECONNECT_SECONDS, lambda: self._note(rank))

    def _note(self, rank: int) -> None:
        with self._changed:
            self._informed.add(rank)
            self._changed.notify_all()
