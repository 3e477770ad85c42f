"""The host's cross-silo server manager with our server inside, and with deadlines; who is which party; and the end."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from calfat_plugin.host.launch import run_host, silo_arguments  # before all else of fedml, whose import it prepares

# isort: split

from fedml.cross_silo.server.fedml_server_manager import FedMLServerManager
from fedml.cross_silo.server.message_define import MyMessage

from calfat_plugin.errors import HostError
from calfat_plugin.federation.wire import Wire, num_bytes
from calfat_plugin.host.adapters import OnTransport
from calfat_plugin.host.silo.client import BEAT, MODEL_TYPES
from calfat_plugin.host.tasks import OpenTransport, ServerTask, fingerprint, max_message
from calfat_plugin.host.transports.base import ALARM, PostponedError, Transport
from calfat_plugin.host.transports.message import Message, RefusedError, sendable
from calfat_plugin.results import EvaluationResult

log = logging.getLogger(__name__)

_GONE = 3 * BEAT  # a party that is silent for so long has ended, and may be started again
_PROOF = 2  # signs of life that a party gives beside another of its rank, before that one is refused for good
_TO_LEAVE = 5.0  # seconds in which a client that is alive takes the goodbye
RECONNECT_SECONDS = 30.0  # seconds in which a client that was killed at the end may be started again and ask
TO_ASK = 5 * BEAT  # seconds in which a client that waits for a server asks
_SILENCE = 5 * BEAT  # a client not heard of for so long may be gone
_NOTICE = 5.0  # seconds in which a notice must arrive


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

    When a process is refused, ``on_rival`` is given its rank and the session of the one that is this party.
    """

    def __init__(self, on_rival: Callable[[int, str], object], now: Callable[[], float] = time.monotonic) -> None:
        self._on_rival, self._now = on_rival, now
        self._holders: dict[int, _Holder] = {}
        self._lock = threading.Lock()

    def sign_of_life(self, rank: int, session: str) -> None:
        """Take note of a process that says it is this rank."""
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
            f"rank {rank} is already in use. Two processes cannot be one party: end one of them, or give "
            "this one its own --rank"
        )


def check_sign_of_life(envelope: Message, fingerprint: str) -> str:
    """The session of a client that says it is there."""
    session = envelope.get("session")
    if not isinstance(session, str):
        raise RefusedError("a sign of life without a session")
    if envelope.get("recipe") != fingerprint:
        raise RefusedError("it runs another recipe, seed or version than the server; give all parties the same")
    return session


class Shutdown:
    """Takes the server's transport over when no round is left, and answers every sign of life with the goodbye.

    It does not ask whether another process was that rank a moment ago: nothing is left that two could dispute.
    """

    def __init__(self, transport: Transport, fingerprint: str) -> None:
        self._transport, self._fingerprint = transport, fingerprint
        self._awaited, self._until = set[int](), 0.0
        self._informed: set[int] = set()
        self._changed = threading.Condition()
        self.rounds = 0  #: that were done, as clients are told

    def say(self, sessions: Mapping[int, str], awaited: Iterable[int], seconds: float) -> None:
        """Begin: inform the clients that are known, by rank, and stay ``seconds`` for those that are awaited."""
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

    def _admit(self, envelope: Message) -> None:
        if envelope.get_type() != MyMessage.MSG_TYPE_C2S_CLIENT_STATUS:
            raise RefusedError("all rounds are done")
        self._inform(envelope.get_sender_id(), check_sign_of_life(envelope, self._fingerprint))

    def _inform(self, rank: int, session: str) -> None:
        def note() -> None:
            with self._changed:
                self._informed.add(rank)
                self._changed.notify_all()

        message = Message(MyMessage.MSG_TYPE_S2C_FINISH, 0, rank, session=session, rounds=self.rounds)
        self._transport.send_message(message, RECONNECT_SECONDS, note)


@dataclass
class Round:
    """A round under way. Parties go by rank here, clients (rank - 1) only in ``answers``."""

    number: int
    ranks: tuple[int, ...]
    tickets: Mapping[int, str]  # by rank; an update has to show its own
    deadline: float  # monotonic
    sent: dict[int, str] = field(default_factory=dict)  # rank to the session that was sent the model
    received: set[str] = field(default_factory=set)  # sessions that have confirmed that it arrived
    answers: dict[int, tuple[int, Wire]] = field(default_factory=dict)  # client to (number of examples, message)
    stale: dict[int, int] = field(default_factory=dict)  # rank to the older round that it answered meanwhile


class SiloServer(OnTransport, FedMLServerManager):
    """The host's server manager: its messages and their order are the host's; time, trust and arithmetic are ours."""

    def __init__(self, args: Any, transport: Transport, task: ServerTask, shutdown: Shutdown) -> None:
        self.server, self._on_round, self._used, self._shutdown = task.server, task.on_round, dict(task.used), shutdown
        self._run_name = sendable(task.run_name)
        self._silo = self.server.experiment.silo
        self._fingerprint = fingerprint(self.server.experiment)
        self._ranks = range(1, args.client_num_in_total + 1)
        self._sessions: dict[int, str] = {}
        self._heard: dict[int, float] = {}
        self._missed: set[int] = set()
        self._round: Round | None = None
        self._presence = Presence(self._report_rival)
        self._old_tickets: dict[str, int] = {}
        super().__init__(args, self.server, transport, 0, args.client_num_in_total, args.backend)
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
        """Send the round's model, once for each time that a client was started.

        All are messages of one type, so that a new one takes the place of one whose receiver has died with it.
        """
        now, session = self._current, self._sessions.get(rank)
        if session is not None and now.sent.get(rank) != session:
            now.sent[rank] = session
            self.send_message_init_config(rank, self.server.downlink(), rank - 1)

    def handle_message_receive_model_from_client(self, msg_params: Message) -> None:
        """Take an answer of this round; :meth:`_admit` let no other in."""
        rank, fields = msg_params.get_sender_id(), msg_params.get_params()
        now = self._round
        self._heard[rank] = time.monotonic()
        self._missed.discard(rank)
        if now is None or fields["round"] != now.number or rank - 1 in now.answers:
            return  # the round, perhaps the last one, ended while it waited; or it came twice
        now.answers[rank - 1] = (fields[MyMessage.MSG_ARG_KEY_NUM_SAMPLES], fields[MyMessage.MSG_ARG_KEY_MODEL_PARAMS])
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
            for rank in self._sessions:  # let them go: the server ends without having begun
                self.send_message(Message(MyMessage.MSG_TYPE_S2C_FINISH, 0, rank, notice=came))
            self.com_manager.flush(_NOTICE)
            raise HostError(f"{came}. Missing: {who}. Start all parties again, and these with --role client --rank K.")
        log.warning("starting without %s", who)
        self._begin_round()

    def _finish_round_if_over(self) -> bool:
        """End the round when all have answered who can, or at its deadline."""
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
        missing = {rank - 1: self._why_absent(now, rank) for rank in absent}
        received = now.received | {now.sent[client + 1] for client in now.answers}  # an answer may outrun its receipt
        bytes_down = len(received) * num_bytes(self.server.downlink())
        record = self.server.finish_round(now.number, now.answers)
        refused = dict(sorted({**record.refused, **missing}.items()))
        record = replace(record, refused=refused, bytes_down=bytes_down)
        self._used.update(dict.fromkeys(record.clients, now.number))
        self._on_round(record, self.server.snapshot())
        if not self.server.is_over:
            self._begin_round()
            return
        self._shutdown.rounds = self.server.round
        self._shutdown.say(self._sessions, self._sessions.keys() - self._missed, RECONNECT_SECONDS)
        self.com_manager.leave_loop()

    def _why_absent(self, now: Round, rank: int) -> str:
        if rank in now.stale:
            return f"client {rank - 1}: only an answer to round {now.stale[rank]} came"
        if rank not in self._sessions:
            return f"client {rank - 1}: never came"
        if time.monotonic() < now.deadline:  # nobody waited for it
            return f"client {rank - 1}: no sign of life since an earlier round"
        gone = ", and no sign of life" if rank in self._missed else ""
        return f"client {rank - 1}: no answer within {self._silo.round_deadline:g} s{gone}"

    # --- sending and letting in ---

    def send_message(self, message: Message) -> None:
        """Add what the client asks a message to show, and queue it."""
        rank, type_ = message.get_receiver_id(), message.get_type()
        if rank in self._sessions:
            message.add_params("session", self._sessions[rank])
        if type_ in MODEL_TYPES:
            now = self._current
            message.add_params("round", now.number)
            message.add_params("run", self._run_name)
            message.add_params("used", self._used.get(rank - 1, 0))
            message.add_params("ticket", now.tickets[rank])
            received = partial(now.received.add, self._sessions[rank])
            self.com_manager.send_message(message, now.deadline - time.monotonic(), received)
        else:
            patience = _NOTICE if type_ == MyMessage.MSG_TYPE_S2C_FINISH else self._silo.start_deadline
            self.com_manager.send_message(message, patience)

    def _admit(self, envelope: Message) -> None:
        """Let in signs of life of clients that run the same, and updates that show the ticket of this round.

        A ticket travels with the model to the address that the recipe gives the client's rank, so that without
        certificates, too, a stranger cannot answer in its place.
        """
        fields, rank, now = envelope.get_params(), envelope.get_sender_id(), self._round
        if envelope.get_type() == MyMessage.MSG_TYPE_C2S_CLIENT_STATUS:
            self._presence.sign_of_life(rank, check_sign_of_life(envelope, self._fingerprint))
            return
        if envelope.get_type() != MyMessage.MSG_TYPE_C2S_SEND_MODEL_TO_SERVER:
            raise RefusedError(f"a message of type {envelope.get_type()} is not for a server")
        ticket, given = str(fields.get("ticket")), "" if now is None else now.tickets.get(rank, "")
        if now is None or not given or not secrets.compare_digest(ticket.encode(), given.encode()):
            stale = self._old_tickets.get(ticket)
            if stale is None or now is None:
                raise RefusedError(f"an update of rank {rank} without the ticket that this rank was sent")
            now.stale[rank] = stale
            raise RefusedError(f"an update of rank {rank} for round {stale}, which is over; this is round {now.number}")
        if "num_samples" not in fields or fields.get("round") != now.number:
            raise RefusedError("an update without round or number of examples")

    def _report_rival(self, rank: int, session: str) -> None:
        """Let the process that is a party see that another of its rank was refused."""
        text = f"another process that says it is rank {rank} was refused by the server; end it"
        notice = Message(MyMessage.MSG_TYPE_S2C_CHECK_CLIENT_STATUS, 0, rank, session=session, notice=text)
        self.com_manager.send_message(notice, _NOTICE)

    @property
    def _current(self) -> Round:
        if self._round is None:
            raise RuntimeError("no round is under way")
        return self._round

    def _listed(self, ranks: list[int]) -> str:
        parties = self._silo.addresses
        return ", ".join(f"rank {rank}" + (f" ({parties[rank]})" if parties else "") for rank in ranks)


def run_server(task: ServerTask, open_transport: OpenTransport) -> tuple[EvaluationResult, ...]:
    """Be the server: run all remaining rounds with the clients that come, then the final evaluation."""
    server, experiment = task.server, task.server.experiment
    limit = max_message(experiment, num_bytes(server.downlink()))
    rounds_left = not server.is_over
    try:
        transport = open_transport(0, limit)
    except HostError as error:
        if rounds_left:
            raise
        log.warning("evaluating without informing clients that the rounds are done: %s", error)
        return server.final_evaluation(task.scratch)
    with transport:
        shutdown = Shutdown(transport, fingerprint(experiment))
        if rounds_left:
            arguments = silo_arguments(experiment, rank=0)
            run_host(arguments, server.device, lambda args: SiloServer(args, transport, task, shutdown))
        else:
            shutdown.rounds = server.round
            shutdown.say({}, range(1, experiment.num_clients + 1), TO_ASK)
        evaluations = server.final_evaluation(task.scratch)
        shutdown.wait()
    return evaluations
