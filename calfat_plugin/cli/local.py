"""``calfat run RECIPE --local``: every party of a cross-silo recipe as a process on this machine."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from calfat_plugin.experiment import Experiment

_COLOURS = (36, 32, 33, 35, 34, 31)
_POLL = 0.5  # seconds
_GRACE = 15.0  # seconds that the clients have to end after the server has


@dataclass
class Party:
    """A running party and the thread that passes its lines on."""

    name: str
    process: subprocess.Popen[str]
    reader: threading.Thread


def free_addresses(count: int) -> list[str]:
    """Addresses on this machine's loopback with ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def run_all(experiment: Experiment, words: Sequence[str], run_dir: Path, *, resume: bool) -> int:
    """Start server and clients, show what they say, and end them together.

    Args:
        experiment: the recipe, resolved.
        words: recipe, ``--set`` and ``--seed`` as the parties' commands need them.
        run_dir: the server's directory; clients get ``rank-<k>`` below it.
        resume: go on with a stopped run.

    Returns:
        The server's exit status.
    """
    num_parties = experiment.num_clients + 1
    if experiment.recipe.comm.backend == "MPI":
        return _run_job(num_parties, words, run_dir, resume=resume)
    if not experiment.recipe.silo.parties:
        words = [*words, "--set", f"calfat.silo.parties=[{', '.join(free_addresses(num_parties))}]"]
    parties: list[Party] = []
    try:
        for rank in range(num_parties):
            parties.append(_start(rank, num_parties, words, run_dir, resume=resume))
        needed = experiment.recipe.silo.settings.min_clients or experiment.num_clients
        status = _watch(parties, needed)
        deadline = time.monotonic() + (_GRACE if status == 0 else 0)
        for party in parties[1:]:
            try:
                party.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                party.process.terminate()
        return status
    finally:
        _end(parties)


def _run_job(num_parties: int, words: Sequence[str], run_dir: Path, *, resume: bool) -> int:
    """Start the parties as one MPI job; MPI itself ends them together."""
    beside = Path(sys.executable).with_name("mpiexec")
    command = [str(beside) if beside.exists() else "mpiexec", "-n", str(num_parties), "-prepend-rank"]
    command += [sys.executable, "-m", "calfat_plugin.cli.main", "run", *words, "--plain", "--run-dir", str(run_dir)]
    command += ["--resume"] if resume else []
    process = _spawn(command)
    try:
        for line in process.stdout or ():
            rank, _, rest = line.removeprefix("[").partition("] ")
            prefix = _prefix_of(int(rank), num_parties) if rank.isdecimal() else ""
            sys.stdout.write(prefix + (rest if prefix else line))
            sys.stdout.flush()
        return process.wait()
    finally:
        _end([Party("the MPI job", process, threading.current_thread())])


def _watch(parties: Sequence[Party], needed: int) -> int:
    """Wait for the server; end it at once when too few clients are left for it to go on."""
    server, *clients = parties
    failed: set[str] = set()
    while server.process.poll() is None:
        for client in clients:
            if client.process.poll() and client.name not in failed:
                failed.add(client.name)
                _say(f"{client.name} ended with status {client.process.returncode}")
        if len(clients) - len(failed) < needed:
            _say(f"{len(clients) - len(failed)} clients are left, {needed} are needed: ending the run")
            return 1
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(_POLL)
    return server.process.returncode


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _start(rank: int, num_parties: int, words: Sequence[str], run_dir: Path, *, resume: bool) -> Party:
    directory = run_dir if rank == 0 else run_dir / f"rank-{rank}"
    resumed = resume and (directory / "recipe.yaml").exists()
    command = [sys.executable, "-m", "calfat_plugin.cli.main", "run", *words, "--plain"]
    command += ["--role", "server" if rank == 0 else "client", "--rank", str(rank), "--run-dir", str(directory)]
    command += ["--resume"] if resumed else []
    process = _spawn(command)
    reader = threading.Thread(target=_pass_on, args=(process, _prefix_of(rank, num_parties)), daemon=True)
    reader.start()
    return Party(_name(rank), process, reader)


def _spawn(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches us alone; we end the parties in order
    )


def _name(rank: int) -> str:
    return f"client {rank - 1}" if rank else "server"


def _prefix_of(rank: int, num_parties: int) -> str:
    width = len(_name(num_parties - 1))
    text = f"{_name(rank):<{width}} |"
    return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if sys.stdout.isatty() else f"{text} "


def _pass_on(process: subprocess.Popen[str], prefix: str) -> None:
    if process.stdout is None:
        return
    for line in process.stdout:
        sys.stdout.write(prefix + line)
        sys.stdout.flush()


def _end(parties: Sequence[Party]) -> None:
    """End whoever still runs: politely, then not."""
    for party in parties:
        if party.process.poll() is None:
            party.process.send_signal(signal.SIGTERM)
    for party in parties:
        try:
            party.process.wait(5)
        except subprocess.TimeoutExpired:
            party.process.kill()
            party.process.wait()
        if party.reader is not threading.current_thread():
            party.reader.join(2)
