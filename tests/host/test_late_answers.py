"""What a server across silos does with an answer that comes too late, or shows no ticket; whom it says was absent."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from calfat_plugin.federation.wire import Wire
from calfat_plugin.host.silo.server import Round, SiloServer
from calfat_plugin.host.transports.message import Message, RefusedError
from calfat_plugin.results import RoundRecord
from tests.report.made import record


def test_an_answer_read_after_the_last_round_is_left_aside() -> None:
    """A client of a server that was killed and resumed may have sent its update twice."""
    server = object.__new__(SiloServer)  # without its transport: only what the handler looks at
    server._round, server._heard, server._missed = None, {}, {2}
    late = Message(3, 2, 0)
    late.add_params("round", 3)
    server.handle_message_receive_model_from_client(late)
    assert (list(server._heard), server._missed) == ([2], set())


def test_a_client_that_is_started_again_is_sent_a_model_that_replaces_the_one_on_its_way() -> None:
    """Over MQTT that one, which the client was fetching, would be waited for until the round's deadline."""
    server, sent = object.__new__(SiloServer), list[Message]()
    server._round = Round(1, (1,), {1: "ticket"}, time.monotonic() + 3600.0)
    server._used, server.rank, server.aggregator, server._run_name = {}, 0, None, "run"
    server._sessions, server._heard, server._missed = {}, {}, {1}
    server.server = SimpleNamespace(downlink=lambda: Wire({"w": torch.zeros(4)}))
    server.com_manager = SimpleNamespace(send_message=lambda message, *patience: sent.append(message))
    for session in ("first", "first", "second", "third"):
        if session == "third":  # it has answered: nothing is left for it to do in this round
            server._round.answers[0] = (9, Wire())
        server.process_online_status("ONLINE", Message(5, 1, 0, session=session))
    assert (server._sessions, list(server._heard), server._missed) == ({1: "third"}, [1], set())
    assert [message.get("session") for message in sent] == ["first", "second"]
    assert len({message.get_type() for message in sent}) == 1  # what a queue goes by


def test_a_round_that_ends_without_clients_that_are_gone_says_so_and_counts_the_models_that_arrived() -> None:
    """Client 0 answered, client 2 got the model; 1 to 3 were gone before, and nobody waits for the deadline.

    Nor for their goodbye; and the answer, which the server refused, is not what client 0 goes on from.
    """
    wire, told, goodbyes = Wire({"w": torch.zeros(4)}), list[RoundRecord](), list[object]()
    server = object.__new__(SiloServer)  # without its transport: only what ends a round
    server._round = Round(5, (1, 2, 3, 4), {}, time.monotonic() + 3600.0)
    server._round.sent |= {1: "first", 2: "second", 3: "third"}
    server._round.received.add("third")
    server._round.answers[0] = (9, wire)
    server._sessions, server._heard, server._used = {1: "first", 2: "second", 3: "third"}, {}, {0: 3}
    server._missed, server._silo = {2, 3, 4}, SimpleNamespace(min_clients=1, round_deadline=600.0)
    server.server = SimpleNamespace(
        round=5,
        is_over=True,
        downlink=lambda: wire,
        finish_round=lambda number, answers: record(number, {}, clients=0),
        snapshot=lambda: None,
    )
    server._on_round = lambda record, snapshot: told.append(record)
    server.round_num, server.com_manager = 5, SimpleNamespace(leave_loop=lambda: None)
    server._shutdown = SimpleNamespace(say=lambda sessions, awaited, seconds: goodbyes.append((sessions, awaited)))
    assert server._finish_round_if_over()
    gone = "no sign of life since an earlier round"
    assert told[0].refused == {1: f"client 1: {gone}", 2: f"client 2: {gone}", 3: "client 3: never came"}
    assert told[0].bytes_down == 2 * 16
    assert server._used == {0: 3}
    assert goodbyes == [(server._sessions, {1})]


def test_who_is_silent_at_the_deadline_is_not_waited_for_again_and_who_is_late_is_told_so() -> None:
    wire, told, now = Wire({"w": torch.zeros(4)}), list[RoundRecord](), time.monotonic()
    server = object.__new__(SiloServer)
    server._round = Round(4, (1, 2, 3), {1: "a", 2: "b", 3: "c"}, now)
    server._sessions = server._round.sent = {1: "first", 2: "second", 3: "third"}
    server._round.answers[0] = (9, wire)
    server._heard, server._missed, server._used = {1: now, 2: now - 3600.0, 3: now + 3600.0}, set(), {}
    server._silo = SimpleNamespace(min_clients=1, round_deadline=600.0)
    server.server = SimpleNamespace(
        round=4,
        is_over=False,
        downlink=lambda: wire,
        finish_round=lambda number, answers: record(number, {}, clients=1),
        snapshot=lambda: None,
        start_round=lambda number: (0, 1, 2),
    )
    server._on_round = lambda record, snapshot: told.append(record)
    server.round_num, server.rank, server.aggregator, server._run_name = 5, 0, None, "run"
    server.com_manager = SimpleNamespace(send_message=lambda *words: None)
    assert server._finish_round_if_over()
    late = "no answer within 600 s"
    assert told[0].refused == {1: f"client 1: {late}, and no sign of life", 2: f"client 2: {late}"}
    assert (server._round.number, server._missed) == (5, {2})
    with pytest.raises(RefusedError, match=r"^an update of rank 3 for round 4, which is over; this is round 5$"):
        server._admit(Message(3, 3, 0, ticket="c", round=4, num_samples=9))


@pytest.mark.parametrize(
    ("rank", "ticket", "reason"),
    [
        (1, "one", ""),
        (1, "two", "an update of rank 1 without the ticket that this rank was sent"),
        (3, "", "an update of rank 3 without the ticket that this rank was sent"),
        (1, "older", "an update of rank 1 for round 4, which is over; this is round 5"),
    ],
    ids=["its own", "another's", "of who is not in the round", "of a round before"],
)
def test_an_update_shows_the_ticket_of_its_rank_and_round(rank: int, ticket: str, reason: str) -> None:
    server = object.__new__(SiloServer)
    server._round = Round(5, (1, 2), {1: "one", 2: "two"}, time.monotonic() + 3600.0)
    server._old_tickets = {"older": 4}
    with pytest.raises(RefusedError, match=f"^{reason}$") if reason else nullcontext():
        server._admit(Message(3, rank, 0, ticket=ticket, round=5, num_samples=9))
