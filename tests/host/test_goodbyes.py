"""What a client across silos does with a model, and when the run is over, which the server says several times."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from calfat_plugin.compat import make_torchvision_importable

make_torchvision_importable()  # FedML imports it

from calfat_plugin.host.transports.base import Transport  # noqa: E402
from calfat_plugin.host.transports.message import READY, Message, RefusedError  # noqa: E402
from tests.host.one_party import NotingTransport, client_alone  # noqa: E402

CHECK, MODEL, UPDATE, STATUS, FINISH = 6, 1, 3, 5, 7  # message types of the host
PATIENCE = 300.0  # seconds


def session_of(client: Any, transport: Any) -> str:
    """The session that the client shows in its signs of life."""
    client.handle_message_connection_ready(Message(READY))
    until = time.monotonic() + PATIENCE
    while not transport.sent and time.monotonic() < until:
        time.sleep(0.01)
    return str(transport.sent[0].get("session"))


@pytest.mark.parametrize(("said", "rounds"), [(2, 2), (None, 3), ("2", 3), (True, 3), (-1, 3), (4, 3)])
def test_the_end_is_noted_once_and_before_any_goodbye_is_acknowledged(said: object, rounds: int) -> None:
    """With the rounds that were done, if the server says a number that can be: else with all three of the recipe.

    Each goodbye has a thread of its own; two that wrote ``finished.json`` at once took each other's file away.
    """
    noted = []

    def note(number: int) -> None:
        time.sleep(0.2)
        noted.append(number)

    transport = NotingTransport()
    client = client_alone(transport, on_finished=note)
    goodbye = Message(FINISH, 0, 1, session=session_of(client, transport), rounds=said)

    def admitted(number: int) -> int:
        transport.admit(goodbye)
        return len(noted)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(admitted, range(4))) == [1, 1, 1, 1]
    assert noted == [rounds]
    client.finish()


@pytest.mark.parametrize("reason", ["", "all rounds are done"])
def test_the_heartbeat_ends_with_the_transport_whatever_ended_it(reason: str) -> None:
    """A loop that an error leaves does not call ``finish``, and gRPC's closed channels raise at each further try."""

    class Failing(Transport):
        num_tries = 0

        def deliver(self, peer: int, outgoing: object) -> None:
            raise NotImplementedError

        def send_now(self, message: object, timeout: float) -> None:
            self.num_tries += 1
            self.stop_receive_message()  # as the end of its ``with`` does
            if reason:
                raise RefusedError(reason)

    transport = Failing(1, 2)
    client = client_alone(transport)
    client.handle_message_check_status(Message(CHECK, 0, 1))  # or it would wait for the next beat
    client.handle_message_connection_ready(Message(READY))
    for thread in threading.enumerate():
        if thread.name == "heartbeat":
            thread.join(PATIENCE)
    assert transport.num_tries == 1
    assert transport.inbox.get(until=0.0) is None  # nobody reads it any more


def test_a_round_goes_on_from_the_last_one_that_the_server_used() -> None:
    """In round 7 that is 4, where the updates of 5 and 6 came too late; it stays on the disk, too."""
    told: list[object] = []
    transport = NotingTransport()
    client = client_alone(
        transport,
        state_after=lambda used: f"after {used}",
        keep_state=lambda *words: told.append(("keeps", *words)),
    )
    worker = client.trainer_dist_adapter.trainer.trainer.worker

    def fit(client: int, round: int, downlink: object) -> str:
        told.append(("begins from", worker.client_states[client], round))
        worker.client_states[client] = f"after {round}"
        return "weights"

    worker.fit = fit
    client.handle_message_receive_model_from_server(Message(MODEL, 0, 1, round=7, used=4, ticket="a", model_params={}))
    assert told == [("begins from", "after 4", 7), ("keeps", 7, "after 7", 4)]
    (update,) = transport.sent
    names = ("msg_type", "round", "ticket", "model_params", "num_samples")
    assert [update.get(name) for name in names] == [UPDATE, 7, "a", "weights", 30]
