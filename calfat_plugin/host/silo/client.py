"""The host's cross-silo client manager with our worker inside."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

from calfat_plugin.host.launch import (  # before all else of fedml, whose import it prepares
    WorkerTrainer,
    run_host,
    silo_arguments,
)

# isort: split

import torch
from fedml.cross_silo.client.fedml_client_master_manager import ClientMasterManager
from fedml.cross_silo.client.fedml_trainer_dist_adapter import TrainerDistAdapter
from fedml.cross_silo.client.message_define import MyMessage
from torch import Tensor

from calfat_plugin.errors import CalfatError, HostError, UpdateError
from calfat_plugin.federation.wire import Wire
from calfat_plugin.host.silo.rounds import BEAT
from calfat_plugin.host.tasks import ClientTask, OpenTransport, fingerprint, max_message
from calfat_plugin.host.transports.base import FAILED, AnothersError, OnTransport, Transport, UnreachableError
from calfat_plugin.host.transports.message import ImpostorError, Message, RefusedError
from calfat_plugin.peer_text import peer_text
from calfat_plugin.profiling import begin_part, timed

MODEL_TYPES = frozenset({MyMessage.MSG_TYPE_S2C_INIT_CONFIG, MyMessage.MSG_TYPE_S2C_SYNC_MODEL_TO_CLIENT})
_FROM_SERVER = MODEL_TYPES | {MyMessage.MSG_TYPE_S2C_CHECK_CLIENT_STATUS, MyMessage.MSG_TYPE_S2C_FINISH}
_BEAT_TIMEOUT = 3 * BEAT  # seconds in which the server must acknowledge a sign of life


class SiloClient(OnTransport, ClientMasterManager):
    """The host's client manager: its messages and their order are the host's; waiting, trust and memory are ours."""

    def __init__(self, args: Any, transport: Transport, task: ClientTask) -> None:
        self._task = task
        self._client = task.rank - 1
        self._settings = task.worker.experiment.silo
        self._fingerprint = fingerprint(task.worker.experiment)
        self._session = secrets.token_hex(16)  # the name of this process in its messages
        self._server = "the server (rank 0)"
        if self._settings.addresses:
            self._server = f"the server (rank 0, {self._settings.addresses[0]})"
        self._run_name = ""  # of the server's run; empty before the first model
        self._answering: dict[str, Any] = {}  # what the update of this round shows the server
        self._end_noted = False
        self._noting_end = threading.Lock()
        self._beat_now = threading.Event()
        self._trainer = WorkerTrainer(task.worker, args)
        num_examples = task.worker.num_examples(self._client)
        adapter = TrainerDistAdapter(
            args,
            task.worker.device,
            task.rank,
            torch.nn.Identity(),  # the worker has the model; the host only wants to move one to the device
            num_examples,
            {self._client: num_examples},
            {self._client: None},
            None,
            self._trainer,
        )
        super().__init__(args, adapter, transport, args.rank, args.worker_num, args.backend)
        transport.admit = self._admit

    def finish(self) -> None:
        super().finish()
        self._beat_now.set()

    def register_message_receive_handlers(self) -> None:
        super().register_message_receive_handlers()
        self.register_message_receive_handler(FAILED, self.handle_failed)

    # --- what is let in, in receiving threads ---

    def _admit(self, envelope: Message) -> None:
        """Let in what the server sends; without certificates it is known by showing this process's session."""
        message_type = envelope.get_type()
        fields = envelope.get_params()
        if message_type not in _FROM_SERVER:
            raise RefusedError(f"a message of type {message_type} is not for a client")
        if message_type == MyMessage.MSG_TYPE_S2C_CHECK_CLIENT_STATUS and "notice" not in fields:
            return  # a restarted server asks before it knows any session
        if fields.get("session") != self._session:
            raise AnothersError("it does not answer this client's session")
        if message_type in MODEL_TYPES and not {"round", "used", "ticket"} <= fields.keys():
            raise RefusedError("a model without round or ticket")
        if message_type == MyMessage.MSG_TYPE_S2C_FINISH and "notice" not in fields:
            self._note_end(fields.get("rounds"))

    def _note_end(self, num_rounds: object) -> None:
        """Note once that the run is over, before the goodbye is acknowledged: the server may end then.

        The goodbye is sent until one is acknowledged, and each may come in a thread of its own.
        """
        with self._noting_end:
            if self._end_noted:
                return
            most_rounds = self._task.worker.experiment.num_rounds
            if type(num_rounds) is not int or not 0 <= num_rounds <= most_rounds:  # a peer sent it
                num_rounds = most_rounds
            try:
                self._task.on_finished(num_rounds)
            except CalfatError as error:  # such as a full disk
                self._fail(str(error))
            self._end_noted = True

    # --- signs of life, in a thread ---

    def handle_message_connection_ready(self, msg_params: Message) -> None:
        threading.Thread(target=self._keep_in_touch, name="heartbeat", daemon=True).start()

    def _keep_in_touch(self) -> None:
        """Say every few seconds that this client is there; a server that stays away too long ends the client."""
        status = Message(MyMessage.MSG_TYPE_C2S_CLIENT_STATUS, self.rank, 0)
        status.add_params(MyMessage.MSG_ARG_KEY_CLIENT_STATUS, self.ONLINE_STATUS_FLAG)
        status.add_params("session", self._session)
        status.add_params("recipe", self._fingerprint)
        settings = self._settings
        longest_silence = settings.start_deadline
        complaint = f"did not come within {longest_silence:g} s (calfat.silo.start_deadline)"
        last_heard = time.monotonic()
        while not self.com_manager.stopped:
            try:
                self.com_manager.send_now(status, _BEAT_TIMEOUT)
                last_heard = time.monotonic()
                longest_silence = settings.server_deadline
                complaint = f"has not answered for {longest_silence:g} s (calfat.silo.server_deadline)"
            except ImpostorError as error:
                self._fail(
                    f"{self._server} is not trusted: {error}. Let it use its own certificate, or correct its address."
                )
                return
            except RefusedError as error:
                self._fail(f"{self._server} refused rank {self.rank}: {error}")
                return
            except UnreachableError as error:
                if time.monotonic() - last_heard > longest_silence:
                    self._fail(f"{self._server} {complaint}. Last try: {error}.")
                    return
            self._beat_now.wait(BEAT)
            self._beat_now.clear()

    def _fail(self, reason: str) -> None:
        """Let the loop raise an error that another thread has found."""
        if not self.com_manager.stopped:
            self.com_manager.inbox.put(Message(FAILED, self.rank, self.rank, reason=reason))

    def handle_failed(self, message: Message) -> None:
        raise HostError(str(message.get("reason")))

    # --- messages of the server, in the loop ---

    def handle_message_check_status(self, msg_params: Message) -> None:
        notice = msg_params.get("notice")
        if notice:
            self._task.on_notice(str(notice))
        self._beat_now.set()

    def handle_message_init(self, msg_params: Message) -> None:
        self.handle_message_receive_model_from_server(msg_params)

    def handle_message_receive_model_from_server(self, msg_params: Message) -> None:
        """Train a round and answer. A model that is older than one that waits is not worth training."""
        if self.com_manager.inbox.holds(MODEL_TYPES):
            return
        fields = msg_params.get_params()
        round = fields["round"]
        downlink = fields[MyMessage.MSG_ARG_KEY_MODEL_PARAMS]
        try:
            self._task.worker.check_downlink(downlink)
        except UpdateError as error:
            text = f"round {round}: the server's model does not fit this recipe's. {peer_text(error)}"
            raise HostError(text) from None
        begin_part(f"round {round}")
        run_name = peer_text(fields.get("run", ""))
        if run_name and run_name != self._run_name:
            self._run_name = run_name
            self._task.on_joined(run_name, round)
        self._task.on_round(round, "training")
        weights, num_examples = self._train(round, fields["used"], downlink)
        if self.com_manager.inbox.holds(MODEL_TYPES):
            self._task.on_round(round, "too late: the server continued without it")
            return
        self._answering = {"round": round, "ticket": fields["ticket"]}
        self.send_model_to_server(0, weights, num_examples)
        self._task.on_round(round, "sent")

    def _train(self, round: int, used: int, downlink: Wire) -> tuple[dict[str, Tensor], int]:
        """Train from what the client kept after round ``used``, the last one whose update the server used."""
        client_states = self._task.worker.client_states
        client_states[self._client] = self._task.state_after(used)
        self.round_idx = round - 1
        self._trainer.round = round
        self.trainer_dist_adapter.update_dataset(self._client)
        self.trainer_dist_adapter.update_model(downlink)
        weights, num_examples = self.trainer_dist_adapter.train(self.round_idx)
        with timed("checkpoint"):
            self._task.keep_state(round, client_states[self._client], used)
        return weights, num_examples

    def handle_message_finish(self, msg_params: Message) -> None:
        self.finish()
        notice = msg_params.get("notice")
        if notice:
            raise HostError(f"{self._server} ended before its first round: {notice}.")

    # --- sending ---

    def send_message(self, message: Message) -> None:
        """Add what the server expects of an update, and queue it."""
        if message.get_type() == MyMessage.MSG_TYPE_C2S_SEND_MODEL_TO_SERVER:
            for name, value in self._answering.items():
                message.add_params(name, value)
        self.com_manager.send_message(message)


def run_client(task: ClientTask, open_transport: OpenTransport) -> None:
    """Be a client until the server says that the run is over."""
    experiment = task.worker.experiment
    arguments = silo_arguments(experiment, rank=task.rank)
    with open_transport(task.rank, max_message(experiment, task.worker.model_bytes)) as transport:
        transport.patience = experiment.silo.server_deadline
        run_host(arguments, task.worker.device, lambda args: SiloClient(args, transport, task))
