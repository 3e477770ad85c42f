"""A round of 10 out of 100 clients on Flower and on FedML with workers: seconds and memory; the bits must be the same.

    python -m benchmarks.hosts --fedml .venv/bin/python --flower .venv-flower/bin/python --json hosts.json

Prints Markdown. Run it from the root of a checkout, on an idle machine. The two hosts cannot share an environment, so
each has its own Python, with the same version of torch; both train one client on each core. The first round may also
pay for the start of processes. Memory is the greatest sum over all processes of a run, sampled, in which a page that
several of them share counts once (PSS); it needs Linux.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from benchmarks.measuring import Report, Spread, alternated_quantities, command, machine
from benchmarks.round_overhead import run
from benchmarks.scaling import EACH, RECIPE, write_images
from calfat_plugin.compat import num_cores
from calfat_plugin.rounds import read_rounds
from calfat_plugin.runs.checkpoints import load_checkpoint
from calfat_plugin.runs.directory import RunDirectory

CLIENTS, PER_ROUND = 100, 10
_INTERVAL = 0.5  # seconds between two looks at the memory: each walks the page tables of all processes


@contextmanager
def peak_memory() -> Iterator[Callable[[], float]]:
    """Watch all processes that this one starts, and theirs."""
    peak, over = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(_INTERVAL):
            found = 0
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):  # it has ended
                    found += process.memory_full_info().pss
            peak = max(peak, found)

    thread = threading.Thread(target=watch, name="memory")
    thread.start()
    try:
        yield lambda: peak
    finally:
        over.set()
        thread.join()


class Hosts:
    """Runs of one recipe on several hosts."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self._folder, self._recipe = folder, recipe
        self._first: dict[str, torch.Tensor] | None = None

    def on(self, python: Path, *options: str) -> Callable[[], dict[str, float]]:
        """What runs the recipe once by this Python, and gives its seconds and memory."""

        def measure() -> dict[str, float]:
            started = time.perf_counter()
            with peak_memory() as peak:
                directory = RunDirectory(run(self._folder, self._recipe, *options, python=python))
            whole = time.perf_counter() - started
            model = dict(load_checkpoint(directory.last_checkpoint)[0].global_state)
            self._first = self._first or model
            if any(not torch.equal(tensor, self._first[name]) for name, tensor in model.items()):
                raise SystemExit(f"{directory.path}: other bits than in the first run; is torch the same in both?")
            first, *later = (record.seconds for record in read_rounds(directory.rounds))
            return {
                "seconds of the first round": first,
                "seconds a later round": Spread(tuple(later)).median,
                "seconds of the command": whole,
                "peak memory, MB": peak() / 1e6,
            }

        return measure


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    parser = command(__doc__, repeats=3)
    parser.add_argument("--fedml", type=Path, required=True, metavar="PYTHON", help="of the environment with FedML")
    parser.add_argument("--flower", type=Path, required=True, metavar="PYTHON", help="of the environment with Flower")
    parser.add_argument("--rounds", type=int, default=20, help="of each run; default: 20")
    given = parser.parse_args(arguments)
    if given.rounds < 2:
        parser.error("--rounds: expected 2 or more, for the first is told apart")
    report = Report(f"Hosts: {PER_ROUND} of {CLIENTS} clients a round", machine(torch.device("cpu")))
    with tempfile.TemporaryDirectory() as folder:
        data, runs = Path(folder, "data"), Path(folder, "runs")
        runs.mkdir()
        recipe = RECIPE.format(
            data=write_images(data, EACH * CLIENTS),
            **{"clients": CLIENTS, "per_round": PER_ROUND, "rounds": given.rounds, "epochs": 1, "steps": 10},
            **{"model": "cnn_small", "threads": given.threads or 1},
        )
        hosts = Hosts(runs, recipe)
        ways = {
            "Flower": hosts.on(given.flower, "--host", "flower"),
            "FedML": hosts.on(given.fedml, "--workers", str(num_cores())),
        }
        found = alternated_quantities(ways, given.repeats)
    for name, spreads in found.items():
        report.keep(name, spreads)
    columns = list(next(iter(found.values())))
    report.table(
        f"{num_cores()} clients at a time, {given.rounds} rounds, {given.repeats} alternated repeats, the same bits",
        ["host", *columns],
        [(name, *spreads.values()) for name, spreads in found.items()],
    )
    report.finish(given.json)


if __name__ == "__main__":
    main()
