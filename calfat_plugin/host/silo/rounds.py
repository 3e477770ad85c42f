"""A round between parties: who is asked, which answers are let in, when it is over, and why a client is absent."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from calfat_plugin.federation.wire import Wire
from calfat_plugin.host.silo.roll_call import RollCall
from calfat_plugin.host.transports.message import Message, RefusedError
from calfat_plugin.recipe.silo import Silo


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
        """Whether its deadline has passed, or no answer is expected any more and there are enough."""
        waited_for = set(self.open_ranks) - gone
        if not self.open_ranks or time.monotonic() >= self.deadline:
            return True
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
