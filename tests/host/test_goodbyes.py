"""What a client across silos does with a model, and when the run is over, which the server says several times."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from calfat_plugin.compat import make_torchvision_importable


@pytest.mark.parametrize(("said", "rounds"), [(2, 2), (None, 3), ("2", 3), (True, 3), (-1, 3), (4, 3)])
def test_the_end_is_noted_once_and_before_any_goodbye_is_acknowledged(said: object, rounds: int) -> None:
    """With the rounds that were done, if the server says a number that can be: else with all three of the recipe.

    Each goodbye has a thread of its own; two that wrote ``finished.json`` at once took each other's file away.
    """
    make_torchvision_importable()  # FedML imports it
    from calfat_plugin.host.silo.client import MyMessage, SiloClient
    from calfat_plugin.host.transports.message import Message

    noted = []

    def note(number: int) -> None:
        time.sleep(0.2)
        noted.append(number)

    worker = SimpleNamespace(experiment=SimpleNamespace(num_rounds=3))
    client = object.__new__(SiloClient)  # without its transport: only what the message meets
    client._task, client._session = SimpleNamespace(on_finished=note, worker=worker), "ours"  # type: ignore[assignment]
    client._noted, client._noting = False, threading.Lock()
    goodbye = Message(MyMessage.MSG_TYPE_S2C_FINISH, 0, 1, session="ours", rounds=said)

    def admitted(number: int) -> int:
        client._admit(goodbye)
        return len(noted)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(admitted, range(4))) == [1, 1, 1, 1]
    assert noted == [rounds]


def test_the_heartbeat_ends_with_the_transport_whatever_ended_it() -> None:
    """A loop that an error leaves does not call ``finish``, and gRPC's closed channels raise at each further try."""
    make_torchvision_importable()
    from calfat_plugin.host.silo.client import SiloClient
    from calfat_plugin.host.transports.base import Transport

    class Failing(Transport):
        def deliver(self, peer: int, outgoing: object) -> None:
            raise NotImplementedError

        def send_now(self, message: object, timeout: float) -> None:
            if self.stopped:
                raise ValueError("Cannot invoke RPC on closed channel!")
            self.stop_receive_message()  # as the end of its ``with`` does

    client = object.__new__(SiloClient)
    client.com_manager, client.rank = Failing(1, 2), 1  # type: ignore[assignment]
    client._session, client._fingerprint, client._beat_now = "ours", "", threading.Event()
    client._beat_now.set()
    client._keep_in_touch()
    client._fail("nobody reads this any more")
    assert client.com_manager.inbox.get(until=0.0) is None


def test_a_round_goes_on_from_the_last_one_that_the_server_used() -> None:
    """In round 7 that is 4, where the updates of 5 and 6 came too late; it stays on the disk, too."""
    make_torchvision_importable()
    from calfat_plugin.host.silo.client import MyMessage, SiloClient
    from calfat_plugin.host.transports.message import Message

    told: list[object] = []
    worker = SimpleNamespace(client_states={}, check_downlink=lambda downlink: None)

    def train(round_idx: int) -> tuple[str, int]:
        told.append(("begins from", worker.client_states[0]))
        worker.client_states[0] = "after 7"
        return "weights", 30

    client: Any = object.__new__(SiloClient)
    client.rank = 1
    client.com_manager = SimpleNamespace(inbox=SimpleNamespace(holds=lambda types: False))
    client._trainer = SimpleNamespace(worker=worker, round=0)
    nothing = {"update_dataset": lambda client: None, "update_model": lambda downlink: None}
    client.trainer_dist_adapter = SimpleNamespace(train=train, **nothing)
    client._task = SimpleNamespace(
        state_after=lambda used: f"after {used}",
        keep_state=lambda *words: told.append(("keeps", *words)),
        on_round=lambda *words: None,
    )
    client.send_model_to_server = lambda *words: told.append(("sends", *words))
    fields = {"round": 7, "used": 4, "ticket": "a", MyMessage.MSG_ARG_KEY_MODEL_PARAMS: {}}
    client.handle_message_receive_model_from_server(Message(2, 0, 1, **fields))
    assert told == [("begins from", "after 4"), ("keeps", 7, "after 7", 4), ("sends", 0, "weights", 30)]
    assert (client._answering, client._trainer.round) == ({"round": 7, "ticket": "a"}, 7)
