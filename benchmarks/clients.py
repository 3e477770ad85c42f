"""What it costs to have many clients: a round of 10 out of 1,000 against a round of 10 out of 10, with SCAFFOLD.

    python -m benchmarks.clients

Prints Markdown: seconds, peak memory and bytes written, with medians, least and greatest of alternated repeats, and the
ratio. Run it from the root of a checkout, on an idle machine, with 3 GB of room for `--runs`; it reads /proc, so it
needs Linux.

In both runs each client has the same number of examples, out of the same training set (random images of CIFAR-10's
form), so the arithmetic of a round is the same. Before the first measurement all clients have a state, as after many
rounds. Each repeat resumes the same two runs for some more rounds, in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import ROOT, Report, Spread, alternated_quantities, command, machine
from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.entries import DatasetEntry, PartitionEntry
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.observer import RunObserver
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.registry import Registry
from calfat_plugin.results import RoundRecord
from calfat_plugin.runs import session
from calfat_plugin.runs.checkpoints import load_checkpoint, save_checkpoint
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import Request
from calfat_plugin.runs.workers import num_cores
from calfat_plugin.runs.writer import RunWriter

MEGABYTE = 1e6
RECIPE = """
common_args: {training_type: simulation, random_seed: 0}
data_args: {dataset: random_images, partition_method: equal_parts}
model_args: {model: %(model)s}
train_args: {client_num_in_total: %(clients)d, client_num_per_round: %(per_round)d, comm_round: %(rounds)d,
             batch_size: 32, learning_rate: 0.01}
calfat:
  trainer: fedpgd
  aggregator: scaffold
  threat: {steps: 1}
  evaluators: [natural]
  monitor: {evaluators: [natural], every: 1000000, max_examples: 20}
  runtime: {threads: %(threads)d}
"""


@dataclass(frozen=True)
class Setting:
    """A run: how many clients it has, and what both runs share."""

    clients: int
    per_round: int
    examples: int  # of each client
    most_clients: int  # of the larger run, which the training set is made for
    model: str
    threads: int

    def experiment(self, rounds: int) -> Experiment:
        """The experiment, up to a round."""
        text = RECIPE % {**dataclasses.asdict(self), "rounds": rounds}
        return assemble(parse_document(text, "clients.yaml"), Registry.load(entry_points=False, plugins=[Plugin(self)]))


class Plugin:
    """A data set of random images, and a partition in which each client has as many of them, however many clients."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @hookimpl
    def calfat_datasets(self) -> list[DatasetEntry]:
        return [DatasetEntry("random_images", build=self._images, summary="random images", num_classes=10)]

    @hookimpl
    def calfat_partitions(self) -> list[PartitionEntry]:
        summary = "as many examples for each client"
        return [PartitionEntry("equal_parts", build=self._parts, summary=summary, may_leave_out=True)]

    def _images(self, root: Path) -> Dataset:
        stream = torch.Generator().manual_seed(0)

        def images(count: int) -> ImageData:
            x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=stream)
            return ImageData(x, torch.arange(count) % 10)

        names = tuple(str(label) for label in range(10))
        return Dataset(
            "random_images", images(self.setting.most_clients * self.setting.examples), images(20), 10, names
        )

    def _parts(self, labels: Any, num_clients: int, **options: Any) -> list[Any]:
        count = self.setting.examples
        return [np.arange(client * count, (client + 1) * count) for client in range(num_clients)]


class Meter(RunObserver):
    """Notes time and bytes written at the end of each round."""

    def __init__(self) -> None:
        self.notes: list[tuple[float, int]] = []
        self.memory = 0.0

    def round_finished(self, record: RoundRecord) -> None:
        self.notes.append((time.perf_counter(), _bytes_written()))
        self.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0

    def measured(self) -> dict[str, float]:
        """Medians a round, and the greatest resident set of the process so far.

        The first round is left out: it also warms up. So is the last one, which evaluates.
        """
        pairs = list(zip(self.notes[:-2], self.notes[1:-1], strict=True))
        return {
            "seconds a round": statistics.median(later[0] - earlier[0] for earlier, later in pairs),
            "peak memory, MB": self.memory / MEGABYTE,
            "MB written a round": statistics.median(later[1] - earlier[1] for earlier, later in pairs) / MEGABYTE,
        }


def _bytes_written() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def run_rounds(setting: Setting, path: Path, rounds: int) -> dict[str, float]:
    """Resume the run in this process for so many measured rounds."""
    done = load_checkpoint(RunDirectory(path).last_checkpoint)[0].round
    meter = Meter()
    _run(setting, path, done + rounds + 2, meter)
    return meter.measured()


def make(setting: Setting, path: Path) -> None:
    """Make a run, after its first round; but all of its clients have a state: that of one which trained."""
    _run(setting, path, 1, RunObserver())
    directory = RunDirectory(path)
    snapshot, notes = load_checkpoint(directory.last_checkpoint)
    states = RunWriter(directory, setting.experiment(1), resume_from=snapshot).client_states
    some = next(iter(states.values()))
    for client in range(setting.clients):
        states.setdefault(client, some)
    save_checkpoint(directory.last_checkpoint, dataclasses.replace(snapshot, client_states=states), notes)


def _run(setting: Setting, path: Path, rounds: int, observer: RunObserver) -> None:
    request = Request(setting.experiment(rounds), path, path.exists(), ["benchmarks/clients.py"])
    session.run(request, RunDirectory.open(request), observer, lambda text: print(text, file=sys.stderr))


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = command(__doc__)
    parser.add_argument("--clients", type=int, default=1000, help="of the larger run; the other one has --per-round")
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--examples", type=int, default=20, help="of each client")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--rounds", type=int, default=10, help="measured in each repeat")
    parser.add_argument("--runs", type=Path, help="where to run; default: a temporary folder, removed at the end")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)  # a run, and nothing else
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # a repeat of a run, and nothing else
    given = parser.parse_args(words)
    threads = given.threads or num_cores()
    torch.set_num_threads(threads)
    shared = (given.per_round, given.examples, given.clients, given.model, threads)
    if path := given.make or given.measure:
        setting = Setting(int(path.name), *shared)
        print(json.dumps(make(setting, path) if given.make else run_rounds(setting, path, given.rounds)))
        return
    report = Report("Many clients", machine(torch.device("cpu")))
    with ExitStack() as at_end:
        folder = given.runs or Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="calfat-clients-")))
        folder.mkdir(parents=True, exist_ok=True)
        runs = {f"{count:,}": folder / str(count) for count in (given.per_round, given.clients)}
        for path in runs.values():
            _in_a_process(*words, "--make", str(path))
        measure = {name: partial(_in_a_process, *words, "--measure", str(path)) for name, path in runs.items()}
        found = alternated_quantities(measure, given.repeats)
    add_table(report, found, given.per_round)
    report.finish(given.json)


def add_table(report: Report, found: Mapping[str, Mapping[str, Spread]], per_round: int) -> None:
    """A row for each run, and one with the ratio of the last to the first, repeat by repeat.

    Args:
        report: gets the table and the numbers.
        found: number of clients to what was measured.
        per_round: clients a round.
    """
    for name, spreads in found.items():
        report.keep(f"{name} clients", spreads)
    few, many = next(iter(found.values())), list(found.values())[-1]
    rows: list[tuple[object, ...]] = [(name, per_round, *spreads.values()) for name, spreads in found.items()]
    rows.append(("ratio", "", *(many[each].over(few[each]) for each in few)))
    report.table("", ["clients", "a round", *few], rows)


def _in_a_process(*words: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.clients", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)}\nended with {done.returncode}.\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
