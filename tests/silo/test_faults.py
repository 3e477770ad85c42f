"""Parties that die, hang, come late or not at all: processes that are really killed, and nothing waits for ever."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest

from tests.silo.federation import Federation, assert_same_bits, assert_they_sleep, wait_for

SHORT_ROUND = {"min_clients": 1, "round_deadline": 15}  # seconds; a loaded machine must train within


def test_killed_client_is_done_without_and_comes_back(tmp_path: Path) -> None:
    """kill -9 in the middle of round 2: the round ends at its deadline; started again, the client trains on.

    What it kept is gone by then, and its user is told.
    """
    scaffold = {"name": "scaffold"}
    with Federation(tmp_path, silo=SHORT_ROUND, train_args={"comm_round": 500}, aggregator=scaffold) as federation:
        federation.start(0, 1)
        federation.start(2, hang_in=2)
        federation.wait_until_hanging(2)
        federation.kill(2)
        federation.wait_for_round(3)
        _, second, *_ = federation.rounds()
        assert second["clients"] == "0"
        assert second["refused"].startswith("1: client 1: no answer within 15 s")

        federation.let_go()
        for path in (federation.directory(2) / "checkpoints").iterdir():
            path.unlink()
        federation.start(2, resume=True)
        back = wait_for(lambda: [row for row in federation.rounds()[2:] if row["clients"] == "0 1"], "the client again")
        assert math.isfinite(float(back[0]["loss_1"]))
        assert "rank 2 was started again" in federation.log(0)
        assert "was trained without what this client kept after round 1" in federation.output(2)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [2, 0])
def test_a_party_killed_in_a_round_and_started_again_ends_with_the_same_model(tmp_path: Path, killed: int) -> None:
    """kill -9 while round 2 is trained: a client gets the round's model again, with no deadline; a server does it anew.

    Bit for bit; meanwhile the others wait.
    """
    with Federation(tmp_path, aggregator={"name": "scaffold"}) as federation:
        federation.start(0, 1)
        federation.start(2, hang_in=2)
        federation.wait_until_hanging(2)
        federation.kill(killed)
        assert len(federation.rounds()) == 1
        federation.let_go()
        federation.start(killed, resume=True)
        simulated = federation.simulate()
        federation.finish()
        assert_same_bits(federation.model(), simulated)
        assert [row["clients"] for row in federation.rounds()] == ["0 1"] * 3


def _with_one_client_left_in_the_last_round(federation: Federation) -> None:
    """Rank 1 has sent its last update, rank 2 trains until it is let go."""
    federation.start(0, 1)
    federation.start(2, hang_in=3)
    federation.wait_until_hanging(2)
    wait_for(lambda: "round 3/3  sent" in federation.output(1), "the last update of rank 1")


def test_client_killed_after_its_last_update_learns_that_the_run_is_over(tmp_path: Path) -> None:
    """Started again when no round is left: the server stays for it, and asks no more which process is rank 1."""
    with Federation(tmp_path) as federation:
        _with_one_client_left_in_the_last_round(federation)
        federation.kill(1)
        federation.let_go()
        assert federation.exit_status(2) == 0
        federation.start(1, resume=True)
        federation.finish()


def test_client_killed_when_it_has_acknowledged_the_end_knows_that_the_run_is_over(tmp_path: Path) -> None:
    """It wrote so before: the server leaves once it is acknowledged, and nobody would answer another start."""
    with Federation(tmp_path) as federation:
        federation.start(0, 2)
        federation.start(1, dies_at_the_end=True)
        assert federation.exit_status(0) == federation.exit_status(2) == 0
        assert federation.exit_status(1) == -signal.SIGKILL
        federation.start(1, resume=True)
        assert federation.exit_status(1) == 0
        assert federation.output(1).splitlines()[-1] == (
            "client 0 of recipe is finished after 3 rounds. To go further, resume all parties with --set "
            "train_args.comm_round=13."
        )


@pytest.mark.slow
def test_client_that_waits_for_a_server_killed_after_the_last_round_ends_with_it(tmp_path: Path) -> None:
    """The server's second process has only the evaluation left, and stays long enough for those that wait to ask."""
    with Federation(tmp_path) as federation:
        _with_one_client_left_in_the_last_round(federation)
        federation.stop(1)  # it takes no goodbye, so that the server waits
        federation.let_go()
        assert federation.exit_status(2) == 0
        federation.kill(0)
        assert len(federation.rounds()) == 3
        assert not (federation.directory(0) / "results.json").exists()
        federation.wake(1)
        federation.start(0, resume=True)
        federation.finish()
        assert (federation.directory(0) / "results.json").exists()


@pytest.mark.slow
def test_client_that_stops_answering(tmp_path: Path) -> None:
    """SIGSTOP: connections to it still open, and it never answers."""
    with Federation(tmp_path, silo=SHORT_ROUND, train_args={"comm_round": 4}) as federation:
        federation.start_all()
        federation.wait_for_round(1)
        federation.stop(2)
        assert federation.exit_status(0) == 0, federation.output(0)
        assert [row["clients"] for row in federation.rounds()[-2:]] == ["0", "0"]


@pytest.mark.slow
def test_peers_that_never_come(tmp_path: Path) -> None:
    """Both sides give up at the start deadline and say for whom they waited."""
    with Federation(tmp_path, silo={"start_deadline": 3}, train_args={"client_num_in_total": 3}) as federation:
        federation.start(0)
        assert federation.exit_status(0) == 2
        ports = federation.ports
        missing = ", ".join(f"rank {rank} (127.0.0.1:{ports[rank]})" for rank in (1, 2, 3))
        assert federation.output(0).splitlines()[-1] == (
            "error: 0 of 3 clients came within 3 s (calfat.silo.start_deadline), 3 are needed "
            f"(calfat.silo.min_clients). Missing: {missing}. Start all parties again, and these with --role "
            "client --rank K."
        )
        federation.start(1)
        assert federation.exit_status(1) == 2
        message = federation.output(1).splitlines()[-1]
        assert message.startswith(
            f"error: the server (rank 0, 127.0.0.1:{ports[0]}) did not come within 3 s (calfat.silo.start_deadline). "
            f"Last try: 127.0.0.1:{ports[0]}: "
        )


def test_clients_of_a_server_that_fails_to_start_end_with_it(tmp_path: Path) -> None:
    """They do not wait for the server's deadline (200 s here), and say which server it was, and why."""
    with Federation(tmp_path, silo={"start_deadline": 8}) as federation:
        federation.options = ("--set", "calfat.silo.start_deadline=200")
        federation.start(1)
        wait_for(lambda: "waiting for the server" in federation.output(1), "the client waits")
        federation.options = ()
        federation.start(0)
        assert federation.exit_status(0) == 2
        assert federation.exit_status(1) == 2
        assert federation.output(1).splitlines()[-1] == (
            f"error: the server (rank 0, 127.0.0.1:{federation.ports[0]}) ended before its first round: 1 of 2 clients "
            "came within 8 s (calfat.silo.start_deadline), 2 are needed (calfat.silo.min_clients)."
        )


def test_a_failing_first_round_keeps_its_log_alone(tmp_path: Path) -> None:
    with Federation(tmp_path, silo={"round_deadline": 1}) as federation:
        federation.start(0)
        federation.start(1, 2, hang_in=1)
        assert federation.exit_status(0) == 2
        log = federation.directory(0) / "log.txt"
        assert federation.output(0).splitlines()[-1] == f"No round was finished. The log is kept: {log}"
        assert list(federation.directory(0).iterdir()) == [log]
        assert "received client status ONLINE" in log.read_text()


@pytest.mark.slow
def test_round_without_a_quorum_ends_the_run_at_its_deadline(tmp_path: Path) -> None:
    with Federation(tmp_path, silo={"round_deadline": 15}) as federation:
        federation.start(0, 1)
        federation.start(2, hang_in=2)
        assert federation.exit_status(0) == 2
        assert (
            "error: round 2: 1 of 2 clients answered within 15 s (calfat.silo.round_deadline), 2 are needed "
            f"(calfat.silo.min_clients). Missing: rank 2 (127.0.0.1:{federation.ports[2]})."
        ) in federation.output(0)
        assert len(federation.rounds()) == 1


def test_idle_parties_sleep(tmp_path: Path) -> None:
    """Under 5 % of a core each, server and client, while they wait for a third party."""
    with Federation(tmp_path) as federation:
        federation.start(0, 1)
        wait_for(lambda: "waiting for the server" in federation.output(1), "the client waits")
        wait_for(lambda: "running 3 rounds" in federation.output(0), "the server waits")
        assert_they_sleep(federation.processes[rank].pid for rank in (0, 1))
