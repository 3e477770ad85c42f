"""One recipe and seed give one global model: in the host's simulator, over gRPC and over MPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.silo.federation import PATIENCE, Federation, assert_same_bits, global_model

ALL = {"client_num_in_total": 2}
SOME = {"client_num_in_total": 3, "client_num_per_round": 2}


@pytest.mark.parametrize(
    ("aggregator", "train_args"),
    [
        ("fedavg", ALL),
        ("scaffold", SOME),
        pytest.param("fedavg", SOME, marks=pytest.mark.slow),
        pytest.param("fedprox", ALL, marks=pytest.mark.slow),
        pytest.param("fedprox", SOME, marks=pytest.mark.slow),
        pytest.param("scaffold", ALL, marks=pytest.mark.slow),
    ],
)
def test_grpc_ends_with_the_simulators_model(tmp_path: Path, aggregator: str, train_args: dict[str, Any]) -> None:
    with Federation(tmp_path, aggregator={"name": aggregator}, train_args=train_args) as federation:
        federation.start_all()
        simulated = federation.simulate()
        federation.finish()
        assert_same_bits(federation.model(), simulated)
        rows = federation.rounds()
    assert [len(row["clients"].split()) for row in rows] == [2, 2, 2]
    assert not any(row["refused"] for row in rows)


def run_locally(federation: Federation, backend: str) -> str:
    """``calfat run --local``, as a user starts it; returns what it prints."""
    words = ["run", str(federation.recipe), "--local", "--run-dir", str(federation.directory(0))]
    words += ["--set", f"comm_args.backend={backend}", "--set", "calfat.silo.parties=null"]
    command = [sys.executable, "-m", "calfat_plugin.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("backend", ["MPI", pytest.param("GRPC", marks=pytest.mark.slow)])
def test_one_command_starts_all_parties(tmp_path: Path, backend: str) -> None:
    """Server and clients with their lines told apart, and the simulator's model at the end, with SCAFFOLD too."""
    changes = {"aggregator": {"name": "scaffold"}} if backend == "MPI" else {}
    with Federation(tmp_path, train_args={"comm_round": 2}, **changes) as federation:
        output = run_locally(federation, backend)
        assert_same_bits(global_model(federation.directory(0)), federation.simulate())
    said = {line.partition(" |")[0].rstrip(): line for line in output.splitlines() if " | " in line}
    assert set(said) == {"server", "client 0", "client 1"}
    assert said["client 0"].endswith("| the run is over")
    assert said["server"].endswith(f"| results: {federation.directory(0)}")
