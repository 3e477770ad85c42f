"""The queue of a round's clients over workers that only exist in this process."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

import calfat_plugin.host.launch  # noqa: F401 (prepares FedML's import)

# isort: split
from fedml.core.distributed.communication.message import Message
from fedml.simulation.mpi.fedavg.message_define import MyMessage

from calfat_plugin.errors import HostError
from calfat_plugin.host.transports.base import decode, encode, read_envelope
from calfat_plugin.host.transports.pool import FINISH, HELLO, Pool, Workers
from tests.silo.federation import wait_for
from tests.snapshot import TextSnapshot

MODEL, UPDATE = MyMessage.MSG_TYPE_S2C_INIT_CONFIG, MyMessage.MSG_TYPE_C2S_SEND_MODEL_TO_SERVER
EXAMPLES = {10: 5, 11: 30, 12: 5, 13: 20}
PATIENCE = 60.0


class Scripted(Workers):
    """Workers that do what a test says; ``sent`` gets (worker, message)."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._events: queue.Queue[tuple[int, bytes | str] | None] = queue.Queue()
        self.sent: queue.Queue[tuple[int, Message]] = queue.Queue()

    @property
    def numbers(self) -> range:
        return range(1, self._number + 1)

    def send(self, worker: int, data: bytes) -> None:
        self.sent.put((worker, decode(data, read_envelope(data))))

    def listen(self) -> Iterator[tuple[int, bytes | str]]:
        while (event := self._events.get()) is not None:
            yield event

    def close(self) -> None:
        self._events.put(None)

    def say(self, worker: int, type: int) -> None:
        self._events.put((worker, encode(Message(type, worker, 0))))

    def die(self, worker: int) -> None:
        self._events.put((worker, "was hit by a meteorite"))

    def next_task(self) -> tuple[int, int]:
        """(worker, client) of the next task handed out."""
        worker, message = self.sent.get(timeout=PATIENCE)
        assert message.get_receiver_id() == worker
        return worker, int(message.get("client_idx"))


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def workers() -> Scripted:
    return Scripted(2)


@pytest.fixture
def pool(workers: Scripted, warnings: list[str]) -> Iterator[Pool]:
    with Pool(workers, EXAMPLES, warnings.append) as pool:
        yield pool


def begin_round(pool: Pool) -> None:
    """As the host does: a message for each place, 1 and up, in the order of the clients."""
    for place, client in enumerate(EXAMPLES, start=1):
        message = Message(MODEL, 0, place)
        message.add_params("client_idx", str(client))
        message.add_params("round", 4)
        pool.send_message(message)
    pool.begin_round()


def answered_place(pool: Pool) -> int:
    message = pool.inbox.get(time.monotonic() + PATIENCE)
    assert message is not None
    assert message.get_sender_id() == message.get("sender")
    return int(message.get_sender_id())


def test_the_longest_client_first_and_whoever_is_free_takes_the_next(pool: Pool, workers: Scripted) -> None:
    workers.say(2, HELLO)
    begin_round(pool)
    assert workers.next_task() == (2, 11)  # the other one has not come yet
    workers.say(1, HELLO)
    assert workers.next_task() == (1, 13)
    workers.say(1, UPDATE)
    assert workers.next_task() == (1, 10)
    workers.say(1, UPDATE)
    assert workers.next_task() == (1, 12)
    workers.say(2, UPDATE)
    workers.say(1, UPDATE)
    assert [answered_place(pool) for _ in range(4)] == [4, 1, 2, 3]


def test_what_a_dead_worker_trained_is_next(
    pool: Pool, workers: Scripted, warnings: list[str], snapshot: TextSnapshot
) -> None:
    for worker in (1, 2):
        workers.say(worker, HELLO)
    begin_round(pool)
    assert {workers.next_task(), workers.next_task()} == {(1, 11), (2, 13)}
    workers.die(1)
    workers.say(2, UPDATE)
    assert workers.next_task() == (2, 11)
    workers.say(2, UPDATE)
    assert workers.next_task() == (2, 10)
    assert warnings == [
        "worker 1 was hit by a meteorite in round 4 while it trained client 11. The run continues with 1 worker, and "
        "the same result."
    ]
    workers.die(2)
    pool.add_observer(Mock())
    pool.inbox.get(time.monotonic() + PATIENCE)
    pool.inbox.get(time.monotonic() + PATIENCE)
    with snapshot.raises(HostError):
        pool.handle_receive_message()


def test_a_worker_that_dies_idle_gets_nothing_more(pool: Pool, workers: Scripted, warnings: list[str]) -> None:
    for worker in (1, 2):
        workers.say(worker, HELLO)
    workers.die(1)
    wait_for(lambda: warnings, "it is found dead")
    begin_round(pool)
    assert workers.next_task() == (2, 11)
    assert workers.sent.empty()
    assert warnings == ["worker 1 was hit by a meteorite. The run continues with 1 worker, and the same result."]


def test_the_end_is_sent_once_to_those_who_live(workers: Scripted, warnings: list[str]) -> None:
    with Pool(workers, EXAMPLES, warnings.append) as pool:
        workers.die(2)
        wait_for(lambda: warnings, "it is found dead")
        pool.stop_receive_message()
    worker, message = workers.sent.get(timeout=PATIENCE)
    assert (worker, message.get_type()) == (1, FINISH)
    assert workers.sent.empty()


def test_nothing_that_goes_wrong_in_the_thread_leaves_the_manager_waiting(workers: Scripted) -> None:
    """A closed terminal, for one: the warning cannot be printed."""

    def closed(text: str) -> None:
        raise BrokenPipeError(text)

    with Pool(workers, EXAMPLES, closed) as pool:
        workers.die(1)
        pool.inbox.get(time.monotonic() + PATIENCE)
        with pytest.raises(BrokenPipeError):
            pool.handle_receive_message()
