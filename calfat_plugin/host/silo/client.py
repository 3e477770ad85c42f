"""A client of the host, with our worker inside: the host's trainer interface, and its cross-silo client manager."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from fedml.core.distributed.communication.message import Message
from fedml.cross_silo.client.fedml_client_master_manager import ClientMasterManager
from fedml.cross_silo.client.message_define import MyMessage

from calfat_plugin.errors import HostError, UpdateError
from calfat_plugin.federation.worker import Worker
from calfat_plugin.host.manager import OnTransport
from calfat_plugin.host.transports.base import FAILED, Transport, UnreachableError
from calfat_plugin.host.transports.messages import Envelope, RefusedError
from calfat_plugin.interfaces import State

log = logging.getLogger(__name__)

BEAT = 2.0  # seconds between two signs of life of a client
MODEL_TYPES = frozenset({MyMessage.MSG_TYPE_S2C_INIT_CONFIG, MyMessage.MSG_TYPE_S2C_SYNC_MODEL_TO_CLIENT})
_FROM_SERVER = MODEL_TYPES | {MyMessage.MSG_TYPE_S2C_CHECK_CLIENT_STATUS, MyMessage.MSG_TYPE_S2C_FINISH}


class ClientStates:
    """What a client keeps, by round: after the last round the server used, and after the last it trained.

    A round that is trained again (the server was restarted, the update came too late) begins from the state that
    belongs to the model, so SCAFFOLD's variates never run ahead of the server's.

    Args:
        load: round to state, None where there is none; round 0 is before the first.
        save: stores a state after a round and drops all rounds but those given.
    """

    def __init__(self, load: Callable[[int], State | None], save: Callable[[int, State, set[int]], None]) -> None:
        self._load, self._save = load, save

    def after(self, used: int) -> State:
        """The state after the round that the server last used; empty before the first."""
        if used == 0:
            return {}
        state = self._load(used)
        if state is None:
            log.warning("nothing is kept here from round %d; continuing with an empty client state", used)
            return {}
        return state

    def keep(self, round: int, state: State, used: int) -> None:
        """Store the state after ``round``, and forget all but that and ``used``."""
        self._save(round, state, {used, round})


class SiloClient(OnTransport, ClientMasterManager):  # type: ignore[misc]
    """The host's client manager: its messages and their order are the host's; waiting, trust and memory are ours.

    Args:
        args: the host's arguments.
        adapter: the host's ``TrainerDistAdapter`` around a :class:`WorkerTrainer`.
        transport: the backend.
        states: this client's memory.
        fingerprint: of what this party runs; the server lets in no other.
        deadlines: seconds to wait for the server to come, and for a lost server to come back.
        on_round: called when a round begins and ends here.
    """

    def __init__(
        self,
        args: Any,
        adapter: Any,
        transport: Transport,
        states: ClientStates,
        *,
        fingerprint: str,
        deadlines: tuple[float, float],
        on_round: Callable[[int, str], None],
    ) -> None:
        self._states, self._fingerprint, self._on_round = states, fingerprint, on_round
        self._start_deadline, self._server_deadline = deadlines
        self._session = secrets.token_hex(16)
        self._answering: dict[str, Any] = {}
        self._finished = False
        self._beat_now = threading.Event()
        super().__init__(args, adapter, transport, args.rank, args.worker_num, args.backend)
        transport.admit = self._admit

    def finish(self) -> None:
        """End the loop, and the heartbeat."""
        self._finished = True
        self._beat_now.set()
        super().finish()

    def register_message_receive_handlers(self) -> None:
        super().register_message_receive_handlers()
        self.register_message_receive_handler(FAILED, self._handle_failed)

    # --- messages of the server ---

    def handle_message_connection_ready(self, msg_params: Message) -> None:
        threading.Thread(target=self._keep_in_touch, name="heartbeat", daemon=True).start()

    def handle_message_check_status(self, msg_params: Message) -> None:
        self._beat_now.set()

    def handle_message_init(self, msg_params: Message) -> None:
        self.handle_message_receive_model_from_server(msg_params)

    def handle_message_receive_model_from_server(self, msg_params: Message) -> None:
        """Train a round and answer. A model that is older than one that waits is not worth training."""
        if self.com_manager.inbox.holds(MODEL_TYPES):
            return
        fields = msg_params.get_params()
        round, used = fields["round"], fields["used"]
        worker: Worker = self.trainer_dist_adapter.trainer.trainer.worker
        client = self.rank - 1
        downlink = fields[MyMessage.MSG_ARG_KEY_MODEL_PARAMS]
        try:
            worker.check_downlink(downlink)
        except UpdateError as error:
            raise HostError(f"round {round}: the server's model does not fit this recipe's. {error}") from None
        self._on_round(round, "training")
        worker.client_states[client] = self._states.after(used)
        self._answering = {"round": round, "ticket": fields["ticket"]}
        self.round_idx = round - 1
        self.trainer_dist_adapter.trainer.trainer.round = round
        self.trainer_dist_adapter.update_dataset(client)
        self.trainer_dist_adapter.update_model(downlink)
        weights, num_examples = self.trainer_dist_adapter.train(self.round_idx)
        self._states.keep(round, worker.client_states[client], used)
        if self.com_manager.inbox.holds(MODEL_TYPES):
            self._on_round(round, "too late: the server has gone on")
            return
        self.send_model_to_server(0, weights, num_examples)
        self._on_round(round, "sent")

    def handle_message_finish(self, msg_params: Message) -> None:
        self.finish()

    # --- sending ---

    def send_message(self, message: Message) -> None:
        """Add what the server asks an update to show, and queue it."""
        if message.get_type() == MyMessage.MSG_TYPE_C2S_SEND_MODEL_TO_SERVER:
            for name, value in self._answering.items():
                message.add_params(name, value)
        self.com_manager.send_message(message)

    def _status(self) -> Message:
        message = Message(MyMessage.MSG_TYPE_C2S_CLIENT_STATUS, self.rank, 0)
        message.add_params(MyMessage.MSG_ARG_KEY_CLIENT_STATUS, self.ONLINE_STATUS_FLAG)
        message.add_params("session", self._session)
        message.add_params("recipe", self._fingerprint)
        return message

    def _keep_in_touch(self) -> None:
        """Say every few seconds that this client is there; a server that stays away too long ends the client."""
        came, last_seen = False, time.monotonic()
        while not self._finished:
            try:
                self.com_manager.send_now(self._status(), timeout=3 * BEAT)
                came, last_seen = True, time.monotonic()
            except RefusedError as refused:
                self._fail(f"the server refused rank {self.rank}: {refused}")
                return
            except UnreachableError as error:
                deadline = self._server_deadline if came else self._start_deadline
                if time.monotonic() - last_seen > deadline:
                    key = "server_deadline" if came else "start_deadline"
                    verb = "has not answered for" if came else "did not come within"
                    self._fail(f"the server {verb} {deadline:g} s (calfat.silo.{key}). Last try: {error}.")
                    return
            self._beat_now.wait(BEAT)
            self._beat_now.clear()

    def _fail(self, reason: str) -> None:
        if self._finished:
            return
        message = self.com_manager.local_message(FAILED)
        message.add_params("reason", reason)
        self.com_manager.inbox.put(message)

    def _handle_failed(self, message: Message) -> None:
        raise HostError(str(message.get("reason")))

    def _admit(self, envelope: Envelope) -> None:
        """Let in what the server sends; without certificates it shows that it is the one by our session's name."""
        if envelope.type not in _FROM_SERVER:
            raise RefusedError(f"a message of type {envelope.type} is not for a client")
        if envelope.type == MyMessage.MSG_TYPE_S2C_CHECK_CLIENT_STATUS:
            return
        if envelope.fields.get("session") != self._session:
            raise RefusedError("it does not answer this client's session")
        if envelope.type in MODEL_TYPES and not {"round", "used", "ticket"} <= envelope.fields.keys():
            raise RefusedError("a model without round or ticket")
