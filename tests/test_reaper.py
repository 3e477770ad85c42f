"""No process outlives a pytest process that is killed: neither what it started nor the children of that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from tests import programs
from tests.silo.federation import wait_for

ROOT = Path(__file__).parents[1]
# What the holder's processes are known by; each of them has to be there before the kill, and none after.
KINDS = {"sleep", "moto.server", "warm_server.py", "mpiexec", "# a rank", "multiprocessing.forkserver"}
KINDS |= {name for name, found in (("mosquitto", programs.MOSQUITTO), ("chrom", programs.CHROMIUM)) if found}


def kinds(processes: list[psutil.Process]) -> dict[psutil.Process, str]:
    """The command lines of those that are still there, with the kinds they are of."""
    found = {}
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
    return found


def test_no_process_outlives_a_killed_pytest(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "in")]

    def everything() -> list[psutil.Process]:
        assert holder.poll() is None, (tmp_path / "output.txt").read_text()
        processes = psutil.Process(holder.pid).children(recursive=True)
        lines = kinds(processes).values()
        # Two ranks besides mpiexec, and two parties besides their fork server.
        copies = [sum(name in line for line in lines) for name in ("# a rank", "forkserver")]
        there = all(any(kind in line for line in lines) for kind in KINDS)
        return processes if there and min(copies) >= 3 and (tmp_path / "ready").exists() else []

    # What is killed leaves its temporary files; tmp_path would be too long for the sockets among them.
    with TemporaryDirectory(ignore_cleanup_errors=True) as left, (tmp_path / "output.txt").open("wb") as output:
        environment = {**os.environ, "READY": str(tmp_path / "ready"), "TMPDIR": left}
        holder = subprocess.Popen(
            [*command, "tests/holder.py"], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        processes = wait_for(everything, "one of everything runs")
        holder.kill()
        holder.wait()
        wait_for(lambda: not kinds(processes), "all have ended")
