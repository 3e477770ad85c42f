"""Federations of real processes on this machine's loopback, for tests.

Every party is a process of its own that runs ``calfat run ... --role``, forked from a server that has imported torch
and FedML once, so that a federation starts in a second and not in thirty. Nothing leaves 127.0.0.1.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))  # a party's process must find its code under a name of its own

import silo_party

PATIENCE = 300.0  # seconds; nothing waits so long on an idle machine, but a loaded one is no failure

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "sklearn.datasets",
        "matplotlib.figure",
        "calfat_plugin.cli.run",
        "calfat_plugin.progress",
        "calfat_plugin.builtin",
        "calfat_plugin.models.networks",
        "calfat_plugin.models.building",
        "calfat_plugin.report",
        "calfat_plugin.runs.party",
        "calfat_plugin.host.silo.server",  # but not gRPC, which must not be loaded before a fork
        "calfat_plugin.host.simulation",
    ]
)

RECIPE: dict[str, Any] = {
    "common_args": {"training_type": "cross_silo", "random_seed": 3},
    "data_args": {"dataset": "digits", "partition_method": "dirichlet", "partition_alpha": 0.5},
    "model_args": {"model": "cnn_small"},
    "train_args": {"client_num_in_total": 2, "comm_round": 3, "epochs": 1, "batch_size": 128, "learning_rate": 0.05},
    "comm_args": {"backend": "GRPC"},
    "calfat": {
        "trainer": {"name": "calfat"},
        "aggregator": {"name": "fedavg"},
        "threat": {"eps": 0.1, "step_size": "eps", "steps": 1},
        "evaluators": ["natural"],
        "monitor": {"evaluators": ["natural"], "max_examples": 100},
        "runtime": {"threads": 1},
        "silo": {"start_deadline": 200, "round_deadline": 200, "server_deadline": 200},
    },
}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_for(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """The condition's first true value."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {patience} s")


def assert_they_sleep(pids: Iterable[int], seconds: float = 2.0) -> None:
    """That these processes, once they have started up, use under 5 % of a core each while they wait."""
    import psutil

    watched = [psutil.Process(pid) for pid in pids]

    def asleep() -> bool:
        before = [sum(process.cpu_times()[:2]) for process in watched]
        time.sleep(seconds)
        used = [sum(process.cpu_times()[:2]) - start for process, start in zip(watched, before, strict=True)]
        return max(used) < 0.05 * seconds

    wait_for(asleep, "they use under 5 % of a core each")  # not in the first seconds, in which they import


class Federation:
    """A recipe in a folder, and the processes that run it. Use as a context manager: it ends them all."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        """``changes``: section to values, merged into :data:`RECIPE` (lists replace); ``silo=``: below ``calfat``."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        content = yaml.safe_load(yaml.safe_dump(RECIPE))
        for section, values in changes.items():
            where = content if section.endswith("_args") else content["calfat"]
            where[section] = {**where.get(section, {}), **values} if isinstance(values, dict) else values
        self.num_clients: int = content["train_args"]["client_num_in_total"]
        self.ports = free_ports(self.num_clients + 1)
        content["calfat"]["silo"].setdefault("parties", [f"127.0.0.1:{port}" for port in self.ports])
        self.content = content
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(content))
        self.simulated = folder / "simulated"  # the run directory of simulate()
        self.reports = True  # whether runs end with their report, which takes longer than a small run
        self.options: tuple[str, ...] = ()  # further words of each party's command
        self.processes: dict[int, Any] = {}
        self._starts = 0

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes.values():
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
            process.join()

    # --- processes ---

    def start(
        self,
        *ranks: int,
        resume: bool = False,
        hang_in: int | None = None,
        lies: bool = False,
        files: int = 0,
        dies_at_the_end: bool = False,
    ) -> None:
        """Start parties.

        ``hang_in``: they stop in the middle of this round's training until :meth:`let_go`. ``files``: so many
        descriptors are all that the system lets them have. ``dies_at_the_end``: they kill themselves when they have
        acknowledged that the run is over.
        """
        for rank in ranks:
            self._starts += 1
            words = ["run", str(self.recipe), "--plain", "--role", "client" if rank else "server", "--rank", str(rank)]
            words += ["--run-dir", str(self.directory(rank)), *self.options] + (["--resume"] if resume else [])
            arguments = (words, str(self._output(rank)), hang_in, lies, self.reports, files, dies_at_the_end)
            process = _context.Process(target=silo_party.be_party, args=arguments)
            process.start()
            self.processes[rank] = process

    def start_all(self) -> None:
        self.start(*range(self.num_clients + 1))

    def kill(self, rank: int) -> None:
        """``kill -9``."""
        self.processes[rank].kill()
        self.processes[rank].join()

    def stop(self, rank: int) -> None:
        """SIGSTOP: it is there, and does not answer."""
        os.kill(self.processes[rank].pid, signal.SIGSTOP)

    def wake(self, rank: int) -> None:
        """End :meth:`stop`."""
        os.kill(self.processes[rank].pid, signal.SIGCONT)

    def exit_status(self, rank: int) -> int:
        """Wait for the end of a party."""
        self.processes[rank].join(PATIENCE)
        status = self.processes[rank].exitcode
        assert status is not None, f"rank {rank} did not end:\n{self.output(rank)}\n{self.log(rank)}"
        return int(status)

    def finish(self) -> None:
        """Wait for the good end of all parties that were started last."""
        for rank in sorted(self.processes):
            assert self.exit_status(rank) == 0, self.output(rank) + self.log(rank)

    def let_go(self) -> None:
        """End the waiting of hanging parties."""
        (self.folder / "go").touch()

    def wait_until_hanging(self, rank: int) -> None:
        wait_for((self.folder / f"hanging-{rank}").exists, f"rank {rank} hangs")

    # --- what they leave ---

    def directory(self, rank: int) -> Path:
        return self.folder / f"party-{rank}"

    def _output(self, rank: int) -> Path:
        return self.folder / f"output-{rank}.txt"

    def output(self, rank: int) -> str:
        path = self._output(rank)
        return path.read_text() if path.exists() else ""

    def log(self, rank: int) -> str:
        path = self.directory(rank) / "log.txt"
        return path.read_text() if path.exists() else ""

    def rounds(self) -> list[dict[str, str]]:
        return read_rounds(self.directory(0))

    def wait_for_round(self, number: int) -> None:
        wait_for(lambda: len(self.rounds()) >= number, f"round {number}")

    def model(self) -> dict[str, Any]:
        return global_model(self.directory(0))

    def simulate(self, directory: Path | None = None, *options: str) -> dict[str, Any]:
        """The final global model of the same recipe in FedML's single-process simulator, in a process of its own."""
        directory = directory or self.simulated
        words = ["run", str(self.recipe), "--plain", "--run-dir", str(directory)]
        words += ["--set", "common_args.training_type=simulation", "--set", "comm_args.backend=sp", *options]
        output = self.folder / "simulated.txt"
        process = _context.Process(target=silo_party.be_party, args=(words, str(output), None, False, self.reports))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0, output.read_text()
        return global_model(directory)


def read_rounds(directory: Path) -> list[dict[str, str]]:
    """The rows of a run's ``rounds.csv``; none before the first round is over."""
    path = directory / "rounds.csv"
    return list(csv.DictReader(path.open())) if path.exists() else []


def global_model(directory: Path) -> dict[str, Any]:
    """The tensors of a run's last checkpoint that are the model's or the aggregator's."""
    from safetensors.torch import load_file

    tensors = load_file(directory / "checkpoints" / "last.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("client/")}


def assert_same_bits(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not first[name].equal(second[name])]
    assert not different
