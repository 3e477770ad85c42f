"""The host's cross-silo server manager with our server inside: roll-call, rounds with deadlines, and the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from calfat_plugin.host.launch import run_host, silo_arguments  # before all else of fedml, whose import it prepares

# isort: split

from fedml.cross_silo.server.fedml_server_manager import FedMLServerManager
from fedml.cross_silo.server.message_define import MyMessage

from calfat_plugin.errors import HostError
from calfat_plugin.federation.wire import num_bytes
from calfat_plugin.host.silo.client import MODEL_TYPES
from calfat_plugin.host.silo.rounds import BEAT, Presence, RollCall, Round, check_sign_of_life
from calfat_plugin.host.tasks import OpenTransport, ServerTask, fingerprint, max_message
from calfat_plugin.host.transports.base import ALARM, OnTransport, Transport
from calfat_plugin.host.transports.message import Message, RefusedError, sendable
from calfat_plugin.results import EvaluationResult

log = logging.getLogger(__name__)

_NOTICE_SECONDS = 5.0  # in which a notice must arrive
_SECONDS_TO_ASK = 5 * BEAT  # in which a client that waits for a server asks
_RECONNECT_SECONDS = 30.0  # in which a client that was killed at the end may be started again and ask
_GOODBYE_SECONDS = 5.0  # in which a client that is alive takes the goodbye


class SiloServer(OnTransport, FedMLServerManager):
    """The host's server manager: its messages and their order are the host's; time, trust and arithmetic are ours."""

    def __init__(self, args: Any, transport: Transport, task: ServerTask, shutdown: Shutdown) -> None:
        self.server = task.server
        self._settings = self.server.experiment.silo
        self._fingerprint = fingerprint(self.server.experiment)
        self._run_name = sendable(task.run_name)
        self._on_round = task.on_round
        self._used = dict(task.used)  # client to the last round that used its update
        self._shutdown = shutdown
        self._roll_call = RollCall(args.client_num_in_total)
        self._presence = Presence(self._report_rival)
        self._round: Round | None = None
        super().__init__(args, self.server, transport, 0, args.client_num_in_total, args.backend)
        transport.admit = self._admit

    def register_message_receive_handlers(self) -> None:
        super().register_message_receive_handlers()
        self.register_message_receive_handler(ALARM, self.handle_alarm)

    # --- what is let in, in receiving threads ---

    def _admit(self, envelope: Message) -> None:
        """Let in signs of life of clients that run the same, and updates that show the ticket of this round."""
        rank = envelope.get_sender_id()
        message_type = envelope.get_type()
        if message_type == MyMessage.MSG_TYPE_C2S_CLIENT_STATUS:
            session = check_sign_of_life(envelope, self._fingerprint)
            self._presence.sign_of_life(rank, session)
        elif message_type == MyMessage.MSG_TYPE_C2S_SEND_MODEL_TO_SERVER:
            if self._round is None:
                raise RefusedError(f"an update of rank {rank} without the ticket that this rank was sent")
            self._round.check_update(envelope)
        else:
            raise RefusedError(f"a message of type {message_type} is not for a server")

    def _report_rival(self, rank: int, session: str) -> None:
        """Inform the user of the process that is a party that another process of its rank was refused."""
        text = f"another process that says it is rank {rank} was refused by the server; end it"
        notice = Message(MyMessage.MSG_TYPE_S2C_CHECK_CLIENT_STATUS, 0, rank, session=session, notice=text)
        self.com_manager.send_message(notice, _NOTICE_SECONDS)

    # --- roll-call ---

    def handle_message_connection_ready(self, msg_params: Message) -> None:
        """Ask every client whether it is there: some came before the server, or were here before it was restarted."""
        self.com_manager.wake_at = time.monotonic() + self._settings.start_deadline
        for rank in self._roll_call.ranks:
            self.send_message_check_client_status(rank, rank - 1)

    def process_online_status(self, client_status: str, msg_params: Message) -> None:
        """A sign of life. A client that is new, or was started again, gets the current model if it is asked for."""
        rank = msg_params.get_sender_id()
        self._roll_call.enter(rank, msg_params.get("session"))
        if self._round is not None:
            if rank in self._round.open_ranks:
                self._send_model(rank)
        elif not self._roll_call.missing:
            self._begin_round()

    def process_finished_status(self, client_status: str, msg_params: Message) -> None:
        """Not used: the host would stop the server as soon as all clients had said goodbye."""

    def handle_alarm(self, message: Message) -> None:
        """A deadline has passed: that of the start, or that of a round."""
        if self._round is None:
            self._start_without_all()
        elif not self._finish_round_if_over():  # it was the deadline of the round before
            self.com_manager.wake_at = self._round.deadline

    def _start_without_all(self) -> None:
        settings = self._settings
        num_all = len(self._roll_call.ranks)
        num_present = len(self._roll_call.sessions)
        num_needed = settings.min_clients or num_all
        missing = self._listed(self._roll_call.missing)
        if num_present >= num_needed:
            log.warning("starting without %s", missing)
            self._begin_round()
            return
        reason = (
            f"{num_present} of {num_all} clients came within {settings.start_deadline:g} s "
            f"(calfat.silo.start_deadline), {num_needed} are needed (calfat.silo.min_clients)"
        )
        for rank in self._roll_call.sessions:  # or they would wait for a server that has ended
            self.send_message(Message(MyMessage.MSG_TYPE_S2C_FINISH, 0, rank, notice=reason))
        self.com_manager.flush(_NOTICE_SECONDS)
        raise HostError(
            f"{reason}. Missing: {missing}. Start all parties again, and these with --role client --rank K."
        )

    # --- rounds ---

    def _begin_round(self) -> None:
        number = self.server.round + 1
        clients = self.server.start_round(number)
        self._round = Round(number, clients, self._settings, self._round)
        self.com_manager.wake_at = self._round.deadline
        for rank in self._round.ranks:
            self._send_model(rank)

    def _send_model(self, rank: int) -> None:
        """Send the round's model, once for each time that a client was started.

        All these messages have one type. So a new one replaces one that is on its way to a process that has ended.
        """
        round = self._current_round
        session = self._roll_call.sessions.get(rank)
        if session is None or round.sent_to.get(rank) == session:
            return
        round.sent_to[rank] = session
        self.send_message_init_config(rank, self.server.downlink(), rank - 1)

    def handle_message_receive_model_from_client(self, msg_params: Message) -> None:
        """Take an answer of this round; :meth:`_admit` let no other in."""
        rank = msg_params.get_sender_id()
        self._roll_call.hear(rank)
        round = self._round
        if round is None or msg_params.get("round") != round.number:
            return  # the round ended while the answer waited in the inbox
        if rank not in round.open_ranks:
            return  # it came twice
        num_examples = msg_params.get(MyMessage.MSG_ARG_KEY_NUM_SAMPLES)
        update = msg_params.get(MyMessage.MSG_ARG_KEY_MODEL_PARAMS)
        round.answers[rank - 1] = (num_examples, update)
        self._finish_round_if_over()

    def _finish_round_if_over(self) -> bool:
        """End the round if it is over; returns whether it was."""
        round = self._current_round
        if not round.is_over(self._roll_call.gone):
            return False
        if len(round.answers) < round.quorum:
            raise HostError(
                f"round {round.number}: {len(round.answers)} of {len(round.ranks)} clients answered within "
                f"{self._settings.round_deadline:g} s (calfat.silo.round_deadline), {round.quorum} are needed "
                f"(calfat.silo.min_clients). Missing: {self._listed(round.open_ranks)}."
            )
        self._finish_round(round)
        return True

    def _finish_round(self, round: Round) -> None:
        absent = round.open_ranks
        self._roll_call.note_silence(absent)
        reasons = {rank - 1: round.why_absent(rank, self._roll_call) for rank in absent}
        bytes_down = round.num_models_arrived * num_bytes(self.server.downlink())
        record = self.server.finish_round(round.number, round.answers)
        refused = {**record.refused, **reasons}
        record = replace(record, refused=dict(sorted(refused.items())), bytes_down=bytes_down)
        for client in record.clients:
            self._used[client] = round.number
        self._on_round(record, self.server.snapshot())
        if not self.server.is_over:
            self._begin_round()
            return
        sessions = self._roll_call.sessions
        awaited = sessions.keys() - self._roll_call.gone
        self._shutdown.begin(self.server.round, sessions, awaited, _RECONNECT_SECONDS)
        self.com_manager.leave_loop()

    # --- sending ---

    def send_message(self, message: Message) -> None:
        """Add what the client expects of a message, and queue it."""
        rank = message.get_receiver_id()
        message_type = message.get_type()
        session = self._roll_call.sessions.get(rank)
        if session is not None:
            message.add_params("session", session)
        if message_type in MODEL_TYPES:
            round = self._current_round
            message.add_params("round", round.number)
            message.add_params("run", self._run_name)
            message.add_params("used", self._used.get(rank - 1, 0))
            message.add_params("ticket", round.tickets[rank])
            note_receipt = partial(round.arrived.add, round.sent_to[rank])
            self.com_manager.send_message(message, round.deadline - time.monotonic(), note_receipt)
        elif message_type == MyMessage.MSG_TYPE_S2C_FINISH:
            self.com_manager.send_message(message, _NOTICE_SECONDS)
        else:
            self.com_manager.send_message(message, self._settings.start_deadline)

    @property
    def _current_round(self) -> Round:
        if self._round is None:
            raise RuntimeError("no round is under way")
        return self._round

    def _listed(self, ranks: Iterable[int]) -> str:
        """Ranks with their addresses, for people."""
        addresses = self._settings.addresses
        if not addresses:
            return ", ".join(f"rank {rank}" for rank in ranks)
        return ", ".join(f"rank {rank} ({addresses[rank]})" for rank in ranks)


class Shutdown:
    """Takes over the server's transport when no round is left, and answers every sign of life with the goodbye.

    It does not ask :class:`~calfat_plugin.host.silo.rounds.Presence`: a goodbye may go to every process of a rank.
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
        self._transport.send_message(goodbye, _RECONNECT_SECONDS, note_receipt)


def run_server(task: ServerTask, open_transport: OpenTransport) -> tuple[EvaluationResult, ...]:
    """Be the server: run all remaining rounds with the clients that come, then the final evaluation."""
    server = task.server
    experiment = server.experiment
    rounds_left = not server.is_over
    try:
        transport = open_transport(0, max_message(experiment, num_bytes(server.downlink())))
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
        else:  # the run was stopped in its final evaluation; its clients may not know that the rounds are done
            all_ranks = range(1, experiment.num_clients + 1)
            shutdown.begin(server.round, {}, all_ranks, _SECONDS_TO_ASK)
        evaluations = server.final_evaluation(task.scratch)
        shutdown.wait()
    return evaluations
