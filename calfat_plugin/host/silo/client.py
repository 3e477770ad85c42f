"""The host's cross-silo client manager with our worker inside."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

from calfat_plugin.host.launch import run_host, silo_arguments  # before all else of fedml, whose import it prepares

# isort: split

import torch
from fedml.cross_silo.client.fedml_client_master_manager import ClientMasterManager
from fedml.cross_silo.client.fedml_trainer_dist_adapter import TrainerDistAdapter
from fedml.cross_silo.client.message_define import MyMessage

from calfat_plugin.errors import CalfatError, HostError, UpdateError
from calfat_plugin.host.adapters import OnTransport, WorkerTrainer
from calfat_plugin.host.tasks import ClientTask, OpenTransport, fingerprint, max_message
from calfat_plugin.host.transports.base import FAILED, AnothersError, Transport
from calfat_plugin.host.transports.message import ImpostorError, Message, RefusedError
from calfat_plugin.host.transports.queues import UnreachableError
from calfat_plugin.peer_text import peer_text
from calfat_plugin.profiling import begin_part, timed

BEAT = 2.0  # seconds between two signs of life of a client
MODEL_TYPES = frozenset({MyMessage.MSG_TYPE_S2C_INIT_CONFIG, MyMessage.MSG_TYPE_S2C_SYNC_MODEL_TO_CLIENT})
_FROM_SERVER = MODEL_TYPES | {MyMessage.MSG_TYPE_S2C_CHECK_CLIENT_STATUS, MyMessage.MSG_TYPE_S2C_FINISH}


class SiloClient(OnTransport, ClientMasterManager):
    """The host's client manager: its messages and their order are the host's; waiting, trust and memory are ours."""

    def __init__(self, args: Any, transport: Transport, task: ClientTask) -> None:
        worker, client = task.worker, task.rank - 1
        silo, num_examples = worker.experiment.silo, worker.num_examples(client)
        self._task, self._settings = task, silo
        self._fingerprint, self._trainer = fingerprint(worker.experiment), WorkerTrainer(worker, args)
        adapter = TrainerDistAdapter(
            args,
            worker.device,
            task.rank,
            torch.nn.Identity(),  # the worker has the model; the host only wants to move one to the device
            num_examples,
            {client: num_examples},
            {client: None},
            None,
            self._trainer,
        )
        self._session = secrets.token_hex(16)
        self._server = f"the server (rank 0{f', {silo.addresses[0]}' if silo.addresses else ''})"
        self._answering: dict[str, Any] = {}
        self._run = ""  # the name of the server's run; empty before the first model
        self._noted = False
        self._noting = threading.Lock()
        self._beat_now = threading.Event()
        super().__init__(args, adapter, transport, args.rank, args.worker_num, args.backend)
        transport.admit = self._admit

    def finish(self) -> None:
        super().finish()
        self._beat_now.set()

    def register_message_receive_handlers(self) -> None:
        super().register_message_receive_handlers()
        self.register_message_receive_handler(FAILED, self._handle_failed)

    # --- messages of the server ---

    def handle_message_connection_ready(self, msg_params: Message) -> None:
        threading.Thread(target=self._keep_in_touch, name="heartbeat", daemon=True).start()

    def handle_message_check_status(self, msg_params: Message) -> None:
        if msg_params.get("notice"):
            self._task.on_notice(str(msg_params.get("notice")))
        self._beat_now.set()

    def handle_message_init(self, msg_params: Message) -> None:
        self.handle_message_receive_model_from_server(msg_params)

    def handle_message_receive_model_from_server(self, msg_params: Message) -> None:
        """Train a round and answer. A model that is older than one that waits is not worth training."""
        if self.com_manager.inbox.holds(MODEL_TYPES):
            return
        fields, worker, client = msg_params.get_params(), self._trainer.worker, self.rank - 1
        round, used, downlink = fields["round"], fields["used"], fields[MyMessage.MSG_ARG_KEY_MODEL_PARAMS]
        try:
            worker.check_downlink(downlink)
        except UpdateError as error:
            text = f"round {round}: the server's model does not fit this recipe's. {peer_text(error)}"
            raise HostError(text) from None
        begin_part(f"round {round}")
        run = peer_text(fields.get("run", ""))
        if run and run != self._run:
            self._run = run
            self._task.on_joined(run, round)
        self._task.on_round(round, "training")
        worker.client_states[client] = self._task.state_after(used)
        self._answering = {"round": round, "ticket": fields["ticket"]}
        self.round_idx = round - 1
        self._trainer.round = round
        self.trainer_dist_adapter.update_dataset(client)
        self.trainer_dist_adapter.update_model(downlink)
        weights, num_examples = self.trainer_dist_adapter.train(self.round_idx)
        with timed("checkpoint"):
            self._task.keep_state(round, worker.client_states[client], used)
        if self.com_manager.inbox.holds(MODEL_TYPES):
            self._task.on_round(round, "too late: the server continued without it")
            return
        self.send_model_to_server(0, weights, num_examples)
        self._task.on_round(round, "sent")

    def handle_message_finish(self, msg_params: Message) -> None:
        self.finish()
        if notice := msg_params.get("notice"):
            raise HostError(f"{self._server} ended before its first round: {notice}.")

    # --- sending ---

    def send_message(self, message: Message) -> None:
        """Add what the server asks an update to show, and queue it."""
        if message.get_type() == MyMessage.MSG_TYPE_C2S_SEND_MODEL_TO_SERVER:
            for name, value in self._answering.items():
                message.add_params(name, value)
        self.com_manager.send_message(message)

    def _keep_in_touch(self) -> None:
        """Say every few seconds that this client is there; a server that stays away too long ends the client."""
        says = {MyMessage.MSG_ARG_KEY_CLIENT_STATUS: self.ONLINE_STATUS_FLAG, "session": self._session}
        status = Message(MyMessage.MSG_TYPE_C2S_CLIENT_STATUS, self.rank, 0, recipe=self._fingerprint, **says)
        came, last_seen = False, time.monotonic()
        while not self.com_manager.stopped:
            try:
                self.com_manager.send_now(status, timeout=3 * BEAT)
                came, last_seen = True, time.monotonic()
            except ImpostorError as error:
                self._fail(
                    f"{self._server} is not trusted: {error}. Let it use its own certificate, or correct its address."
                )
                return
            except RefusedError as refused:
                self._fail(f"{self._server} refused rank {self.rank}: {refused}")
                return
            except UnreachableError as error:
                key = "server_deadline" if came else "start_deadline"
                deadline = getattr(self._settings, key)
                if time.monotonic() - last_seen > deadline:
                    verb = "has not answered for" if came else "did not come within"
                    self._fail(f"{self._server} {verb} {deadline:g} s (calfat.silo.{key}). Last try: {error}.")
                    return
            self._beat_now.wait(BEAT)
            self._beat_now.clear()

    def _fail(self, reason: str) -> None:
        if not self.com_manager.stopped:
            self.com_manager.inbox.put(Message(FAILED, self.rank, self.rank, reason=reason))

    def _handle_failed(self, message: Message) -> None:
        raise HostError(str(message.get("reason")))

    def _admit(self, envelope: Message) -> None:
        """Let in what the server sends; without certificates it shows that it is the one by our session's name."""
        type_, fields = envelope.get_type(), envelope.get_params()
        if type_ not in _FROM_SERVER:
            raise RefusedError(f"a message of type {type_} is not for a client")
        if type_ == MyMessage.MSG_TYPE_S2C_CHECK_CLIENT_STATUS and "notice" not in fields:
            return
        if fields.get("session") != self._session:
            raise AnothersError("it does not answer this client's session")
        if type_ in MODEL_TYPES and not {"round", "used", "ticket"} <= fields.keys():
            raise RefusedError("a model without round or ticket")
        if type_ == MyMessage.MSG_TYPE_S2C_FINISH and "notice" not in fields:
            self._note_the_end(fields.get("rounds"))

    def _note_the_end(self, rounds: object) -> None:
        """Once: the goodbye comes again until one is acknowledged, and each may be on a thread of its own."""
        with self._noting:
            if self._noted:
                return
            try:
                all_rounds = self._task.worker.experiment.num_rounds
                if type(rounds) is not int or not 0 <= rounds <= all_rounds:  # a peer sent it
                    rounds = all_rounds
                self._task.on_finished(rounds)
            except CalfatError as error:  # the disk refuses; the user learns it from the loop
                self._fail(str(error))
            self._noted = True


def run_client(task: ClientTask, open_transport: OpenTransport) -> None:
    """Be a client until the server says that the run is over."""
    experiment, arguments = task.worker.experiment, silo_arguments(task.worker.experiment, rank=task.rank)
    with open_transport(task.rank, max_message(experiment, task.worker.model_bytes)) as transport:
        transport.patience = experiment.silo.server_deadline
        run_host(arguments, task.worker.device, lambda args: SiloClient(args, transport, task))
