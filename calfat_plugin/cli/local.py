"""``calfat run RECIPE --local``: all processes of a cross-silo run on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from calfat_plugin.cli.errors import coloured
from calfat_plugin.endings import ending
from calfat_plugin.host.runtimes import Runtime

_COLOURS = (36, 32, 33, 35, 34, 31)
_POLL = 0.5  # seconds
_GRACE = 15.0  # seconds that the clients have to end after the server has


class Party(threading.Thread):
    """A running party; the thread passes its lines on, and drops them once our output takes no more: ``failure``."""

    def __init__(self, name: str, process: subprocess.Popen[str], prefix: str = "") -> None:
        super().__init__(name=name, daemon=True)
        self.process, self._prefix = process, prefix
        self.failure: OSError | None = None

    def run(self) -> None:
        for line in self.process.stdout or ():
            try:
                if self.failure is None:
                    sys.stdout.write(self._prefix + line)
                    sys.stdout.flush()
            except OSError as error:
                self.failure = error


def free_addresses(count: int) -> list[str]:
    """Addresses on this machine's loopback with ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def run_all(runtime: Runtime, words: Sequence[str], run_dir: Path, *, resume: bool) -> int:
    """Start server and clients, show what they say, and end them together.

    ``words`` are recipe, ``--set`` and ``--seed``; the server writes to ``run_dir``, clients to ``rank-<k>`` below it.
    """
    experiment = runtime.experiment
    names = ["server", *(f"client {client}" for client in range(experiment.num_clients))]
    if runtime.lacks_addresses:
        words = [*words, "--set", f"calfat.silo.parties=[{', '.join(free_addresses(len(names)))}]"]
    parties: list[Party] = []
    try:
        for rank, name in enumerate(names):
            directory = run_dir if rank == 0 else run_dir / f"rank-{rank}"
            command = [sys.executable, "-m", "calfat_plugin.cli.main", "run", *words, "--plain"]
            command += ["--role", "server" if rank == 0 else "client", "--rank", str(rank)]
            command += ["--run-dir", str(directory)]
            command += ["--resume"] if resume and (directory / "recipe.yaml").exists() else []
            prefix = f"{name:<{max(map(len, names))}} |"
            if coloured(sys.stdout):
                prefix = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m"
            parties.append(Party(name, _spawn(command), f"{prefix} "))
            parties[-1].start()
        needed = experiment.silo.min_clients or experiment.num_clients
        status = _watch(parties, needed)
        deadline = time.monotonic() + (_GRACE if status == 0 else 0)
        for party in parties[1:]:
            with suppress(subprocess.TimeoutExpired):
                party.process.wait(max(0.0, deadline - time.monotonic()))
        return status
    finally:
        _end(parties)


def _watch(parties: Sequence[Party], needed: int) -> int:
    """Wait for the server; end it at once when too few clients are left for it to continue."""
    server, *clients = parties
    failed: set[str] = set()
    while server.process.poll() is None:
        if failure := next((party.failure for party in parties if party.failure), None):
            raise failure
        for client in clients:
            if client.process.poll() and client.name not in failed:
                failed.add(client.name)
                print(f"{client.name} ended with {ending(client.process.returncode)}", file=sys.stderr, flush=True)
        if (left := len(clients) - len(failed)) < needed:
            print(f"{left} clients are left, {needed} are needed: ending the run", file=sys.stderr, flush=True)
            return 1
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(_POLL)
    return server.process.returncode


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


def _end(parties: Sequence[Party]) -> None:
    """End whoever still runs: politely, then not."""
    for party in parties:
        party.process.terminate()
    for party in parties:
        try:
            party.process.wait(5)
        except subprocess.TimeoutExpired:
            party.process.kill()
            party.process.wait()
        if party.is_alive():
            party.join(2)
