"""``calfat run --local``: one command starts every process of a run, which ends with the simulator's model.

That all runtimes end with one model, whatever the method, is ``test_parity.py``'s.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.silo.federation import PATIENCE, Federation, assert_same_bits, global_model


def run_locally(federation: Federation, *changes: str) -> str:
    """``calfat run --local``, as a user starts it; returns what it prints."""
    words = ["run", str(federation.recipe), "--local", "--run-dir", str(federation.directory(0))]
    words += [word for change in (*changes, "calfat.silo.parties=null") for word in ("--set", change)]
    command = [sys.executable, "-m", "calfat_plugin.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_one_command_starts_all_parties(tmp_path: Path) -> None:
    """Server and clients with their lines told apart, and the simulator's model at the end."""
    with Federation(tmp_path, train_args={"comm_round": 2}) as federation:
        output = run_locally(federation, "comm_args.backend=GRPC")
        assert_same_bits(global_model(federation.directory(0)), federation.simulate())
    said = {line.partition(" |")[0].rstrip(): line for line in output.splitlines() if " | " in line}
    assert set(said) == {"server", "client 0", "client 1"}
    assert said["client 0"].endswith("| the run is over")
    assert f"| results: {federation.directory(0)}\n" in output


@pytest.mark.slow
def test_ctrl_c_takes_all_down_and_says_how_to_resume(tmp_path: Path) -> None:
    with Federation(tmp_path, train_args={"comm_round": 500}) as federation:
        command = [sys.executable, "-m", "calfat_plugin.cli.main", "run", str(federation.recipe), "--local"]
        process = subprocess.Popen(
            [*command, "--run-dir", str(federation.directory(0))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        federation.wait_for_round(2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    resume = shlex.join([*command, "--resume", "--run-dir", str(federation.directory(0))])
    assert said == f"stopped. Finished rounds are kept in {federation.directory(0)}. Resume with:\n  {resume}\n"
    running = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in running if str(federation.recipe) in line]
