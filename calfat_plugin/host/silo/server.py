"""The host's cross-silo server manager with our server inside, and with deadlines."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

from fedml.core.distributed.communication.message import Message
from fedml.cross_silo.server.fedml_server_manager import FedMLServerManager
from fedml.cross_silo.server.message_define import MyMessage

from calfat_plugin.errors import HostError
from calfat_plugin.federation.server import Server
from calfat_plugin.federation.wire import Wire
from calfat_plugin.host.arguments import fingerprint
from calfat_plugin.host.manager import OnTransport
from calfat_plugin.host.silo.presence import BEAT, Presence
from calfat_plugin.host.silo.shutdown import RECONNECT_SECONDS, Shutdown, check_sign_of_life
from calfat_plugin.host.task import ServerTask
from calfat_plugin.host.transports.base import ALARM, Transport
from calfat_plugin.host.transports.messages import Envelope, RefusedError

log = logging.getLogger(__name__)

_SILENCE = 5 * BEAT  # a client not heard of for so long may be gone
_NOTICE = 5.0  # seconds in which a notice must arrive
_STATUS = MyMessage.MSG_TYPE_C2S_CLIENT_STATUS
_UPDATE = MyMessage.MSG_TYPE_C2S_SEND_MODEL_TO_SERVER
_MODEL_TYPES = (MyMessage.MSG_TYPE_S2C_INIT_CONFIG, MyMessage.MSG_TYPE_S2C_SYNC_MODEL_TO_CLIENT)


@dataclasses.dataclass
class Round:
    """A round under way. Parties go by rank here, clients (rank - 1) only in ``answers``.

    Attributes:
        number: 1-based.
        ranks: who was asked.
        tickets: rank to the ticket that its update has to show.
        deadline: monotonic time at which it ends.
        sent: rank to the session that was sent the model.
        answers: client to (number of examples, message).
        stale: rank to the older round that it answered meanwhile.
    """

    number: int
    ranks: tuple[int, ...]
    tickets: Mapping[int, str]
    deadline: float
    sent: dict[int, str] = dataclasses.field(default_factory=dict)
    answers: dict[int, tuple[int, Wire]] = dataclasses.field(default_factory=dict)
    stale: dict[int, int] = dataclasses.field(default_factory=dict)


class SiloServer(OnTransport, FedMLServerManager):
    """The host's server manager: its messages and their order are the host's; time, trust and arithmetic are ours.

    Args:
        args: the host's arguments.
        server: holds the global model.
        transport: the backend.
        task: the experiment, with quorum and deadlines, and who is informed of a round.
        shutdown: said after the last round.
    """

    def __init__(self, args: Any, server: Server, transport: Transport, task: ServerTask, shutdown: Shutdown) -> None:
        self.server, self._silo, self._on_round = server, task.experiment.silo, task.on_round
        self._fingerprint, self._used, self._shutdown = fingerprint(task.experiment), dict(task.used), shutdown
        self._ranks = range(1, args.client_num_in_total + 1)
        self._sessions: dict[int, str] = {}
        self._heard: dict[int, float] = {}
        self._missed: set[int] = set()
        self._round: Round | None = None
        self._presence = Presence(self._report_rival)
        self._old_tickets: dict[str, int] = {}
        super().__init__(args, server, transport, 0, args.client_num_in_total, args.backend)
        transport.admit = self._admit

    def register_message_receive_handlers(self) -> None:
        super().register_message_receive_handlers()
        self.register_message_receive_handler(ALARM, self._handle_alarm)

    # --- start ---

    def handle_message_connection_ready(self, msg_params: Message) -> None:
        """Ask every client whether it is there: those that came first, and those a restarted server has to find."""
        self.com_manager.wake_at = time.monotonic() + self._silo.start_deadline
        for rank in self._ranks:
            self.send_message_check_client_status(rank, rank - 1)

    def process_online_status(self, client_status: str, msg_params: Message) -> None:
        """A sign of life. A client that is new, or was started again, gets the current model if it is asked for."""
        rank = msg_params.get_sender_id()
        session = msg_params.get("session")
        if self._sessions.get(rank) not in (None, session):
            log.info("rank %d was started again", rank)
        self._sessions[rank], self._heard[rank] = session, time.monotonic()
        self._missed.discard(rank)
        if self._round is None:
            if len(self._sessions) == len(self._ranks):
                self._begin_round()
        elif rank in self._round.ranks and rank - 1 not in self._round.answers:
            self._send_model(rank)

    def process_finished_status(self, client_status: str, msg_params: Message) -> None:
        """Nothing: the host would stop the server as soon as all clients had said goodbye."""

    # --- rounds ---

    def _begin_round(self) -> None:
        number = self.server.round + 1
        ranks = tuple(client + 1 for client in self.server.start_round(number))
        if self._round is not None:
            self._old_tickets = dict.fromkeys(self._round.tickets.values(), self._round.number)
        tickets = {rank: secrets.token_hex(16) for rank in ranks}
        self._round = Round(number, ranks, tickets, time.monotonic() + self._silo.round_deadline)
        self.com_manager.wake_at = self._round.deadline
        for rank in ranks:
            self._send_model(rank)

    def _send_model(self, rank: int) -> None:
        """Send the round's model, once for each time that a client was started."""
        now = self._current
        session = self._sessions.get(rank)
        if session is None or now.sent.get(rank) == session:
            return
        send = self.send_message_sync_model_to_client if rank in now.sent else self.send_message_init_config
        now.sent[rank] = session
        send(rank, self.server.downlink(), rank - 1)

    def handle_message_receive_model_from_client(self, msg_params: Message) -> None:
        """Take an answer of this round; :meth:`_admit` let no other in."""
        rank, fields = msg_params.get_sender_id(), msg_params.get_params()
        now = self._round
        self._heard[rank] = time.monotonic()
        self._missed.discard(rank)
        if now is None or fields["round"] != now.number or rank - 1 in now.answers:
            return  # the round, perhaps the last one, ended while it waited; or it came twice
        now.answers[rank - 1] = (
            fields[MyMessage.MSG_ARG_KEY_NUM_SAMPLES],
            fields[MyMessage.MSG_ARG_KEY_MODEL_PARAMS],
        )
        self._finish_round_if_over()

    def _handle_alarm(self, message: Message) -> None:
        if self._round is None:
            self._start_without_all()
        elif not self._finish_round_if_over():
            self.com_manager.wake_at = self._current.deadline

    def _start_without_all(self) -> None:
        settings = self._silo
        missing = [rank for rank in self._ranks if rank not in self._sessions]
        wanted = settings.min_clients or len(self._ranks)
        who = self._listed(missing)
        if len(self._sessions) < wanted:
            came = (
                f"{len(self._sessions)} of {len(self._ranks)} clients came within {settings.start_deadline:g} s "
                f"(calfat.silo.start_deadline), {wanted} are needed (calfat.silo.min_clients)"
            )
            self._send_home(came)
            raise HostError(f"{came}. Missing: {who}. Start all parties again, and these with --role client --rank K.")
        log.warning("starting without %s", who)
        self._begin_round()

    def _finish_round_if_over(self) -> bool:
        """End the round when all have answered who can, or at its deadline.

        Raises:
            HostError: at the deadline without a quorum.
        """
        now, settings = self._current, self._silo
        open_ranks = [rank for rank in now.ranks if rank - 1 not in now.answers]
        quorum = min(settings.min_clients or len(now.ranks), len(now.ranks))
        enough = len(now.answers) >= quorum
        gone = [rank for rank in open_ranks if rank in self._missed]
        if open_ranks and time.monotonic() < now.deadline and not (enough and len(gone) == len(open_ranks)):
            return False
        if not enough:
            raise HostError(
                f"round {now.number}: {len(now.answers)} of {len(now.ranks)} clients answered within "
                f"{settings.round_deadline:g} s (calfat.silo.round_deadline), {quorum} are needed "
                f"(calfat.silo.min_clients). Missing: {self._listed(open_ranks)}."
            )
        self._finish_round(now, open_ranks)
        return True

    def _finish_round(self, now: Round, absent: list[int]) -> None:
        silent = {rank for rank in absent if time.monotonic() - self._heard.get(rank, 0.0) > _SILENCE}
        self._missed |= silent
        record = self.server.finish_round(now.number, now.answers)
        missing = {rank - 1: self._why_absent(now, rank) for rank in absent}
        record = dataclasses.replace(record, refused=dict(sorted({**record.refused, **missing}.items())))
        self._used.update(dict.fromkeys(record.clients, now.number))
        self._on_round(record, self.server.snapshot())
        if now.number < self.round_num:
            self._begin_round()
            return
        self._shutdown.say(self._sessions, self._sessions.keys() - self._missed, RECONNECT_SECONDS)
        self.com_manager.leave_loop()

    def _why_absent(self, now: Round, rank: int) -> str:
        if rank in now.stale:
            return f"client {rank - 1}: only an answer to round {now.stale[rank]} came"
        if rank not in self._sessions:
            return f"client {rank - 1}: never came"
        gone = ", and no sign of life" if rank in self._missed else ""
        return f"client {rank - 1}: no answer within {self._silo.round_deadline:g} s{gone}"

    # --- sending and letting in ---

    def send_message(self, message: Message) -> None:
        """Add what the client asks a message to show, and queue it."""
        rank, type_ = message.get_receiver_id(), message.get_type()
        patience = self._silo.start_deadline
        if rank in self._sessions:
            message.add_params("session", self._sessions[rank])
        if type_ in _MODEL_TYPES:
            now = self._current
            message.add_params("round", now.number)
            message.add_params("used", self._used.get(rank - 1, 0))
            message.add_params("ticket", now.tickets[rank])
            patience = now.deadline - time.monotonic()
        elif type_ == MyMessage.MSG_TYPE_S2C_FINISH:
            patience = _NOTICE
        self.com_manager.send_message(message, patience)

    def _admit(self, envelope: Envelope) -> None:
        """Let in signs of life of clients that run the same, and updates that show the ticket of this round.

        A ticket travels with the model to the address that the recipe gives the client's rank, so that without
        certificates, too, a stranger cannot answer in its place.
        """
        if envelope.type == _STATUS:
            self._presence.sign_of_life(envelope.sender, check_sign_of_life(envelope, self._fingerprint))
        elif envelope.type == _UPDATE:
            self._admit_update(envelope)
        else:
            raise RefusedError(f"a message of type {envelope.type} is not for a server")

    def _send_home(self, notice: str) -> None:
        """Let clients go: the server ends without having begun."""
        for rank in self._sessions:
            message = Message(MyMessage.MSG_TYPE_S2C_FINISH, 0, rank)
            message.add_params("notice", notice)
            self.send_message(message)
        self.com_manager.flush(_NOTICE)

    def _report_rival(self, rank: int, session: str) -> None:
        """Let the process that is a party see that another of its rank was refused."""
        notice = Message(MyMessage.MSG_TYPE_S2C_CHECK_CLIENT_STATUS, 0, rank)
        notice.add_params("session", session)
        notice.add_params("notice", f"another process that says it is rank {rank} was refused by the server; end it")
        self.com_manager.send_message(notice, _NOTICE)

    def _admit_update(self, envelope: Envelope) -> None:
        fields, rank, now = envelope.fields, envelope.sender, self._round
        ticket = str(fields.get("ticket"))
        if (
            now is None
            or rank not in now.ranks
            or not secrets.compare_digest(ticket.encode(), now.tickets[rank].encode())
        ):
            stale = self._old_tickets.get(ticket)
            if stale is None or now is None:
                raise RefusedError(f"an update of rank {rank} without the ticket that this rank was sent")
            now.stale[rank] = stale
            raise RefusedError(f"an update of rank {rank} for round {stale}, which is over; this is round {now.number}")
        if "num_samples" not in fields or fields.get("round") != now.number:
            raise RefusedError("an update without round or number of examples")

    @property
    def _current(self) -> Round:
        if self._round is None:
            raise RuntimeError("no round is under way")
        return self._round

    def _listed(self, ranks: list[int]) -> str:
        parties = self._silo.addresses
        return ", ".join(f"rank {rank}" + (f" ({parties[rank]})" if parties else "") for rank in ranks)
