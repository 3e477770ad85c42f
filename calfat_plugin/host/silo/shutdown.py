"""The end of a run between parties: every client learns that no round is left."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping

from calfat_plugin.host import launch  # noqa: F401 (before all else of fedml, whose import it prepares)

# isort: split

from fedml.cross_silo.server.message_define import MyMessage

from calfat_plugin.host.silo.roll_call import check_sign_of_life
from calfat_plugin.host.transports.base import Transport
from calfat_plugin.host.transports.message import Message, RefusedError

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 30.0  # in which a client that was killed at the end may be started again and ask
_GOODBYE_SECONDS = 5.0  # in which a client that is alive takes the goodbye


class Shutdown:
    """Takes the server's transport over when no round is left, and answers every sign of life with the goodbye.

    It does not ask :class:`~calfat_plugin.host.silo.roll_call.Presence`: a goodbye may go to every process of a rank.
    """

    def __init__(self, transport: Transport, fingerprint: str) -> None:
        self._transport = transport
        self._fingerprint = fingerprint
        self._num_rounds = 0
        self._deadline = 0.0
        self._awaited: set[int] = set()
        self._informed: set[int] = set()
        self._changed = threading.Condition()

    def begin(self, num_rounds: int, sessions: Mapping[int, str], awaited: Iterable[int], seconds: float) -> None:
        """Inform the clients that are known.

        Args:
            num_rounds: rounds that were done, of which the clients are informed.
            sessions: rank to session of the clients that are known.
            awaited: ranks for which :meth:`wait` stays.
            seconds: how long it stays for them.
        """
        self._num_rounds = num_rounds
        self._awaited = set(awaited)
        self._deadline = time.monotonic() + seconds
        self._transport.admit = self._admit
        for rank, session in sessions.items():
            self._inform(rank, session)

    def wait(self) -> None:
        """Stay until the awaited clients have taken the goodbye, or their time is over."""
        if self._wait_until(time.monotonic() + _GOODBYE_SECONDS):
            return
        missing = sorted(self._awaited - self._informed)
        seconds_left = self._deadline - time.monotonic()
        log.info("ranks %s do not know yet that the run is over; waiting up to %.0f s for them", missing, seconds_left)
        self._wait_until(self._deadline)

    def _wait_until(self, until: float) -> bool:
        """Whether all awaited clients are informed, at the latest at ``until``."""
        with self._changed:
            seconds = max(0.0, min(until, self._deadline) - time.monotonic())
            return self._changed.wait_for(lambda: self._awaited <= self._informed, seconds)

    def _admit(self, envelope: Message) -> None:
        if envelope.get_type() != MyMessage.MSG_TYPE_C2S_CLIENT_STATUS:
            raise RefusedError("all rounds are done")
        session = check_sign_of_life(envelope, self._fingerprint)
        self._inform(envelope.get_sender_id(), session)

    def _inform(self, rank: int, session: str) -> None:
        def note_receipt() -> None:
            with self._changed:
                self._informed.add(rank)
                self._changed.notify_all()

        goodbye = Message(MyMessage.MSG_TYPE_S2C_FINISH, 0, rank, session=session, rounds=self._num_rounds)
        self._transport.send_message(goodbye, RECONNECT_SECONDS, note_receipt)
