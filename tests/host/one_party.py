"""A server or a client across silos in this process, on a transport that only notes what is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.wire import Wire
from calfat_plugin.host.launch import silo_arguments  # before all else of fedml, whose import it prepares

# isort: split

from fedml.core.mlops import MLOpsStore

from calfat_plugin.host.silo.client import MODEL_TYPES, SiloClient
from calfat_plugin.host.silo.server import SiloServer
from calfat_plugin.host.tasks import ClientTask, ServerTask
from calfat_plugin.host.transports.base import ALARM, Inbox
from calfat_plugin.host.transports.message import Message
from calfat_plugin.results import RoundRecord
from tests.host.federation import experiment
from tests.report.made import record

STATUS, UPDATE = 5, 3  # message types of the host


class NotingTransport:
    """A transport whose messages go nowhere."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.sent: list[Message] = []
        self.receipts: list[Callable[[], object]] = []  # of what was sent, in the same order
        self.admit: Callable[[Message], None] = lambda envelope: None
        self.wake_at: float | None = None
        self.stopped = False
        self.loop_left = False

    def add_observer(self, observer: Any) -> None:
        pass

    def send_message(
        self, message: Message, patience: float = 0.0, on_delivered: Callable[[], object] = lambda: None
    ) -> None:
        self.sent.append(message)
        self.receipts.append(on_delivered)

    def send_now(self, message: Message, timeout: float) -> None:
        self.sent.append(message)

    def leave_loop(self) -> None:
        self.loop_left = True

    def stop_receive_message(self) -> None:
        self.stopped = True


def silos(num_clients: int, **values: Any) -> Experiment:
    """A recipe across silos."""
    return experiment(
        common_args__training_type="cross_silo",
        comm_args__backend="GRPC",
        train_args__client_num_in_total=num_clients,
        **values,
    )


class ServerAlone:
    """A :class:`SiloServer` whose federation is this object: all clients train in each round."""

    def __init__(self, num_clients: int, num_rounds: int, used: dict[int, int] | None = None, **silo: Any) -> None:
        settings = {f"calfat__silo__{name}": value for name, value in silo.items()}
        self.experiment = silos(num_clients, **settings)
        self.clients = tuple(range(num_clients))
        self.num_rounds = num_rounds
        self.round = 0
        self.used_clients: tuple[int, ...] | None = None  # whose updates a round uses; None: all that came
        self.records: list[RoundRecord] = []
        self.goodbyes: list[tuple[dict[int, str], set[int]]] = []
        self.transport = NotingTransport()
        task = ServerTask(self, self._note_round, used=used or {}, run_name="run")  # type: ignore[arg-type]
        shutdown = SimpleNamespace(begin=self._note_goodbye)
        arguments = MLOpsStore.mlops_args = silo_arguments(self.experiment, rank=0)  # as fedml.init does
        self.manager = SiloServer(arguments, self.transport, task, shutdown)  # type: ignore[arg-type]

    @property
    def is_over(self) -> bool:
        return self.round == self.num_rounds

    def downlink(self) -> Wire:
        return Wire({"w": torch.zeros(4)})

    def start_round(self, number: int) -> tuple[int, ...]:
        return self.clients

    def finish_round(self, number: int, answers: dict[int, tuple[int, Wire]]) -> RoundRecord:
        self.round = number
        used = self.used_clients
        if used is None:
            used = tuple(answers)
        return replace(record(number, {}), clients=used)

    def snapshot(self) -> None:
        return None

    def _note_round(self, record: RoundRecord, snapshot: object) -> None:
        self.records.append(record)

    def _note_goodbye(self, rounds: int, sessions: dict[int, str], awaited: set[int], seconds: float) -> None:
        self.goodbyes.append((dict(sessions), set(awaited)))

    def sign_of_life(self, rank: int, session: str) -> None:
        message = Message(STATUS, rank, 0, client_status="ONLINE", session=session)
        self.manager.handle_message_client_status_update(message)

    def alarm(self) -> None:
        self.manager.handle_alarm(Message(ALARM))

    def models(self, rank: int) -> list[Message]:
        """The models that were sent to a rank."""
        to_rank = [message for message in self.transport.sent if message.get_receiver_id() == rank]
        return [message for message in to_rank if message.get_type() in MODEL_TYPES]

    def update(self, rank: int, **fields: Any) -> Message:
        """An update of that rank with the ticket and the round of the newest model that it was sent."""
        model = self.models(rank)[-1]
        update = Message(UPDATE, rank, 0, num_samples=9, model_params=Wire())
        update.add_params("ticket", model.get("ticket"))
        update.add_params("round", model.get("round"))
        for name, value in fields.items():
            update.add_params(name, value)
        return update

    def answer(self, rank: int) -> None:
        """Let that rank answer the newest model."""
        update = self.update(rank)
        self.transport.admit(update)
        self.manager.handle_message_receive_model_from_client(update)


def client_alone(transport: Any, **task: Any) -> SiloClient:
    """A :class:`SiloClient` of rank 1; ``task`` has what its :class:`ClientTask` is given beside a stub of a worker."""
    recipe = silos(2, train_args__comm_round=3)
    worker = SimpleNamespace(
        experiment=recipe,
        device=torch.device("cpu"),
        client_states={},
        num_examples=lambda client: 30,
        check_downlink=lambda downlink: None,
    )
    callbacks = ("state_after", "keep_state", "on_round", "on_notice", "on_joined", "on_finished")
    values: Any = {"worker": worker, "rank": 1, **dict.fromkeys(callbacks, _nothing), **task}
    arguments = MLOpsStore.mlops_args = silo_arguments(recipe, rank=1)  # as fedml.init does
    return SiloClient(arguments, transport, ClientTask(**values))


def _nothing(*words: object) -> dict[str, torch.Tensor]:
    return {}
