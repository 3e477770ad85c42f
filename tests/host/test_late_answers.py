"""What a server across silos does with an answer that comes too late, or shows no ticket; whom it says was absent."""

from __future__ import annotations

import re
import time

import pytest

from calfat_plugin.compat import make_torchvision_importable

make_torchvision_importable()  # FedML imports it

from calfat_plugin.host.transports.message import Message, RefusedError  # noqa: E402
from tests.host.one_party import UPDATE, ServerAlone  # noqa: E402


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes when a test says so."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_an_answer_read_before_a_round_is_left_aside() -> None:
    """A client of a server that was killed and resumed may have sent its update twice."""
    server = ServerAlone(2, num_rounds=3)
    server.manager.handle_message_receive_model_from_client(Message(UPDATE, 2, 0, round=3))
    assert (server.records, server.transport.sent) == ([], [])


def test_an_answer_that_comes_twice_or_is_read_too_late_is_left_aside() -> None:
    server = ServerAlone(2, num_rounds=2)
    for rank in (1, 2):
        server.sign_of_life(rank, "first")
    server.answer(1)
    late = server.update(2)
    twice = server.update(1, num_samples=7)
    server.manager.handle_message_receive_model_from_client(twice)
    assert server.records == []
    server.answer(2)
    server.manager.handle_message_receive_model_from_client(late)
    server.answer(1)
    assert [record.round for record in server.records] == [1]


def test_a_client_that_is_started_again_is_sent_a_model_that_replaces_the_one_on_its_way() -> None:
    """Over MQTT that one, which the client was fetching, would be waited for until the round's deadline."""
    server = ServerAlone(2, num_rounds=2)
    server.sign_of_life(2, "other")
    for session in ("first", "first", "second"):
        server.sign_of_life(1, session)
    server.answer(1)
    server.sign_of_life(1, "third")  # it has answered: nothing is left for it to do in this round
    models = server.models(1)
    assert [message.get("session") for message in models] == ["first", "second"]
    assert len({message.get_type() for message in models}) == 1  # a send queue replaces messages by type


def test_a_round_that_ends_without_clients_that_are_gone_says_so_and_counts_the_models_that_arrived(
    clock: list[float],
) -> None:
    """Client 0 answers, client 2 gets the model; 1 to 3 were gone before, and nobody waits for the deadline.

    Nor for their goodbye; and the answer, which the server does not use, is not what client 0 goes on from.
    """
    server = ServerAlone(4, num_rounds=3, used={0: 7}, min_clients=1, start_deadline=60.0, round_deadline=600.0)
    for rank, session in {1: "first", 2: "second", 3: "third"}.items():
        server.sign_of_life(rank, session)
    clock[0] += 60.0
    server.alarm()
    server.answer(1)
    clock[0] += 600.0
    server.alarm()
    assert [record.round for record in server.records] == [1]
    server.used_clients = ()
    third_model = server.transport.sent.index(server.models(3)[-1])
    server.transport.receipts[third_model]()
    server.answer(1)
    gone = "no sign of life since an earlier round"
    assert server.records[1].refused == {1: f"client 1: {gone}", 2: f"client 2: {gone}", 3: "client 3: never came"}
    assert server.records[1].bytes_down == 2 * 16
    server.answer(1)
    assert [model.get("used") for model in server.models(1)] == [7, 1, 1]
    assert server.goodbyes == [({1: "first", 2: "second", 3: "third"}, {1})]
    assert server.transport.loop_left


def test_who_is_silent_at_the_deadline_is_not_waited_for_again_and_who_is_late_is_told_so(clock: list[float]) -> None:
    server = ServerAlone(3, num_rounds=3, min_clients=1, round_deadline=600.0)
    for rank in (1, 2, 3):
        server.sign_of_life(rank, "a session")
    server.answer(1)
    late = server.update(3)
    clock[0] += 599.0
    server.sign_of_life(3, "a session")
    clock[0] += 1.0
    server.alarm()
    reason = "no answer within 600 s"
    assert server.records[0].refused == {1: f"client 1: {reason}, and no sign of life", 2: f"client 2: {reason}"}
    with pytest.raises(RefusedError, match=r"^an update of rank 3 for round 1, which is over; this is round 2$"):
        server.transport.admit(late)
    server.answer(1)
    assert len(server.records) == 1  # client 2 is waited for
    clock[0] += 600.0
    server.alarm()
    assert server.records[1].refused[2] == "client 2: only an answer to round 1 came"
    server.sign_of_life(2, "a session")  # it is waited for again
    server.answer(1)
    assert len(server.records) == 2


def test_an_alarm_of_an_earlier_deadline_ends_no_round(clock: list[float]) -> None:
    server = ServerAlone(2, num_rounds=2, round_deadline=600.0)
    for rank in (1, 2):
        server.sign_of_life(rank, "a session")
    clock[0] += 599.0
    server.transport.wake_at = None
    server.alarm()
    assert (server.records, server.transport.wake_at) == ([], clock[0] + 1.0)


@pytest.mark.parametrize(
    ("rank", "ticket_of", "reason"),
    [
        (1, 1, ""),
        (1, 2, "an update of rank 1 without the ticket that this rank was sent"),
        (3, 1, "an update of rank 3 without the ticket that this rank was sent"),
    ],
    ids=["its own", "another's", "of who is not in the round"],
)
def test_an_update_shows_the_ticket_of_its_rank_and_round(rank: int, ticket_of: int, reason: str) -> None:
    server = ServerAlone(3, num_rounds=2)
    server.clients = (0, 1)
    for party in (1, 2, 3):
        server.sign_of_life(party, "a session")
    update = server.update(ticket_of, sender=rank)
    if not reason:
        server.transport.admit(update)
        return
    with pytest.raises(RefusedError, match=f"^{re.escape(reason)}$"):
        server.transport.admit(update)


@pytest.mark.parametrize("spoilt", [{"num_samples": None}, {"round": 2}])
def test_an_update_has_its_round_and_its_number_of_examples(spoilt: dict[str, object]) -> None:
    server = ServerAlone(2, num_rounds=2)
    for rank in (1, 2):
        server.sign_of_life(rank, "a session")
    with pytest.raises(RefusedError, match=r"^an update without round or number of examples$"):
        server.transport.admit(server.update(1, **spoilt))
