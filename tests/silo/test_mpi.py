"""Jobs of FedML's MPI runtimes: going on in another runtime, waiting asleep, and ending together whatever happens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.silo import parity
from tests.silo.federation import PATIENCE, Federation, assert_same_bits, assert_they_sleep, global_model, wait_for
from tests.silo.mpi_jobs import MPIEXEC, Job
from tests.snapshot import TextSnapshot

OVER_MPI = {"comm_args": {"backend": "MPI"}}
SIMULATION = {"common_args": {"training_type": "simulation"}}
SOME = {"client_num_in_total": 3, "client_num_per_round": 2}
KEEPING = {"scaffold": {"aggregator": {"name": "scaffold"}}, "fedrbn": {"trainer": {"name": "fedrbn"}}}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[parity.Tools]:
    with parity.Tools(tmp_path_factory.mktemp("mpi")) as shared:
        yield shared


@pytest.fixture
def job(tools: parity.Tools) -> Job:
    return tools.job(3)


def words(federation: Federation, *options: str) -> list[str]:
    return ["run", str(federation.recipe), "--plain", "--run-dir", str(federation.directory(0)), *options]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("sp", "MPI"), ("MPI", "sp")])
def test_a_run_continues_in_the_other_simulator(tmp_path: Path, job: Job, first: str, then: str) -> None:
    """Rounds 1 and 2 in one, 3 and 4 in the other: the model of an uninterrupted run, client states and all."""
    for method, changes in KEEPING.items():
        federation = Federation(tmp_path / method, train_args={**SOME, "comm_round": 4}, **SIMULATION, **changes)
        federation.reports = False
        for number, (backend, rounds, resume) in enumerate([(first, 2, []), (then, 4, ["--resume"])]):
            options = ["--set", f"comm_args.backend={backend}", "--set", f"train_args.comm_round={rounds}", *resume]
            if backend == "MPI":
                job.run(words(federation, *options))
            else:
                federation.simulate(federation.directory(0), *options)
            assert len(federation.rounds()) == (number + 1) * 2
        assert_same_bits(global_model(federation.directory(0)), federation.simulate())


@pytest.mark.parametrize(
    ("runtime", "case"),
    [
        ("MPI simulator", parity.Case("Groups", "2 of 3")),
        ("MPI simulator", parity.Case("Attackers", "2 of 3")),
        ("MPI", parity.Case("Groups", "all of 2")),
    ],
)
def test_both_runtimes_end_with_the_simulators_model(
    tmp_path: Path, tools: parity.Tools, runtime: str, case: parity.Case
) -> None:
    """The methods that differ most; ``test_parity.py`` has them all."""
    simulated = parity.model_hash("simulator", case, tmp_path, tools)
    assert parity.model_hash(runtime, case, tmp_path, tools) == simulated


def test_two_workers_share_five_clients(tmp_path: Path, job: Job) -> None:
    """More clients in a round than workers; what clients keep goes to whichever worker trains them next."""
    for method, changes in KEEPING.items():
        of_a_round = {"client_num_in_total": 7, "client_num_per_round": 5, "comm_round": 2}
        federation = Federation(tmp_path / method, train_args=of_a_round, **SIMULATION, **OVER_MPI, **changes)
        federation.reports = False
        job.run(words(federation))
        assert_same_bits(global_model(federation.directory(0)), federation.simulate())


@pytest.mark.parametrize("training_type", ["simulation", "cross_silo"])
def test_idle_processes_sleep(tmp_path: Path, job: Job, training_type: str) -> None:
    """Under 5 % of a core each, while they wait for rank 2, which comes late."""
    federation = Federation(tmp_path, common_args={"training_type": training_type}, **OVER_MPI)
    job.begin(words(federation), ranks=[0, 1])
    wait_for(lambda: "running 3 rounds" in job.said(0), "the server waits")
    assert_they_sleep(job.pid(rank) for rank in (0, 1))
    job.join_in([2])
    job.finish()
    assert [row["clients"] for row in federation.rounds()] == ["0 1"] * 3


@pytest.mark.parametrize("training_type", ["simulation", "cross_silo"])
def test_a_run_stopped_in_its_final_evaluation(tmp_path: Path, job: Job, training_type: str) -> None:
    """All rounds are done: the server evaluates, and sends the others home, also one that comes late."""
    federation = Federation(tmp_path, common_args={"training_type": training_type}, **OVER_MPI)
    job.run(words(federation))
    results = federation.directory(0) / "results.json"
    results.unlink()
    job.begin(words(federation, "--resume"), ranks=[0, 1])
    wait_for(lambda: "resuming at the final evaluation" in job.said(0), "the server evaluates")
    job.join_in([2])
    job.finish()
    assert "all 3 rounds are done, resuming at the final evaluation" in job.said(0)
    assert results.exists()
    assert len(federation.rounds()) == 3


@pytest.mark.parametrize(
    ("reason", "status", "last_line"),
    [
        ("user", 2, "error: this model cannot be trained."),
        pytest.param("bug", 1, "ZeroDivisionError: rank 1 divides by zero", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("training_type", ["simulation", pytest.param("cross_silo", marks=pytest.mark.slow)])
def test_a_worker_that_fails_ends_the_job(
    tmp_path: Path, job: Job, training_type: str, reason: str, status: int, last_line: str
) -> None:
    """The server and the other worker wait for it, and would do so longer than the test waits for them.

    In a simulation the other worker may do several rounds alone before rank 1 is there to take a client, but not all.
    It is the last test that uses the job.
    """
    rounds = 1000
    deadlines = ("start_deadline", "round_deadline", "server_deadline")
    changes: dict[str, Any] = {
        "silo": dict.fromkeys(deadlines, 100 * PATIENCE),
        "common_args": {"training_type": training_type},
        "model_args": {"model": f"explosive_model:{reason}"},
        "train_args": {"comm_round": rounds},
    }
    federation = Federation(tmp_path / "run", **changes, **OVER_MPI)
    for rank in range(job.size):
        job.pid(rank)  # all have started
    job.begin(words(federation))
    assert job.exit_status() == status, job.output()
    assert job.said(1).splitlines()[-1] == last_line
    assert "error" not in job.said(0) + job.said(2)
    assert len(federation.rounds()) <= (0 if training_type == "cross_silo" else rounds - 1)


ENDS = """
import sys, time
from contextlib import ExitStack
from calfat_plugin.cli.party import _end_of_job
from calfat_plugin.host.transports import mpi_job

mpi_job._LAST_WORDS = {for_ever}  # no job ends because nobody waits any longer
with ExitStack() as at_end:
    at_end.push(_end_of_job)
    rank = mpi_job.rank()
    {body}
"""
FOR_EVER = 10_000  # seconds, far more than the test waits for the job's end


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("time.sleep(2 if rank == 0 else 0)", 0, ""),
        ("sys.exit(2) if rank == 1 else time.sleep({for_ever})", 2, ""),
        ("print(1 / 0) if rank == 2 else time.sleep({for_ever})", 1, "ZeroDivisionError: division by zero\n"),
        # Ctrl-C reaches all; rank 0 has the word.
        ("time.sleep(1 if rank == 0 else 0); print('stopped', rank, file=sys.stderr); sys.exit(130)", 130, "stopped 0"),
    ],
)
def test_a_job_ends_together(body: str, status: int, said: str) -> None:
    program = ENDS.format(body=body.format(for_ever=FOR_EVER), for_ever=FOR_EVER)
    command = [MPIEXEC, "-n", "3", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == status, done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    ("start", "changes"),
    [
        ([], SIMULATION),
        ([MPIEXEC, "-n", "2"], {}),
        ([], {}),
    ],
)
def test_a_job_of_another_size_is_refused(
    tmp_path: Path, start: list[str], changes: dict[str, Any], snapshot: TextSnapshot
) -> None:
    """Once, by rank 0, with the right number: a worker at least, or a party for each client."""
    federation = Federation(tmp_path / "run", train_args=SOME, **changes, **OVER_MPI)
    command = [*start, sys.executable, "-m", "calfat_plugin.cli.main", *words(federation)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    (said,) = (line for line in done.stderr.splitlines() if not line.startswith("Abort(2)"))
    snapshot(said)
    assert not federation.directory(0).exists()
