"""What it costs to have many clients: a round of 10 out of 1,000 against a round of 10 out of 10, with SCAFFOLD.

    python -m benchmarks.clients

Prints a Markdown table: seconds, peak memory and bytes written, with medians, least and greatest of alternated repeats,
and the ratio. Run it on an idle machine, with 3 GB of room for `--runs`; it reads /proc, so it needs Linux.

In both runs each client has the same number of examples, out of the same training set (random images of CIFAR-10's
form), so the arithmetic of a round is the same. Before the first measurement all clients have a state, as after many
rounds. Each repeat resumes the same two runs for some more rounds, in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
        return [PartitionEntry("equal_parts", build=self._parts, summary="as many examples for each client")]

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


@dataclass(frozen=True)
class Measured:
    """Of some rounds of one process: medians a round, and the greatest resident set of the process so far, in bytes."""

    seconds: float
    written: float
    memory: float


class Meter(RunObserver):
    """Notes time and bytes written at the end of each round."""

    def __init__(self) -> None:
        self.notes: list[tuple[float, int]] = []
        self.memory = 0.0

    def round_finished(self, record: RoundRecord) -> None:
        self.notes.append((time.perf_counter(), _bytes_written()))
        self.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0

    def measured(self) -> Measured:
        """The first round is left out: it also warms up. So is the last one, which evaluates."""
        pairs = list(zip(self.notes[:-2], self.notes[1:-1], strict=True))
        return Measured(
            statistics.median(later[0] - earlier[0] for earlier, later in pairs),
            statistics.median(later[1] - earlier[1] for earlier, later in pairs),
            self.memory,
        )


def _bytes_written() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def run_rounds(setting: Setting, path: Path, rounds: int) -> Measured:
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
    states.sync()
    save_checkpoint(directory.last_checkpoint, dataclasses.replace(snapshot, client_states=states), notes)


def _run(setting: Setting, path: Path, rounds: int, observer: RunObserver) -> None:
    request = Request(setting.experiment(rounds), path, path.exists(), ["benchmarks/clients.py"])
    session.run(request, RunDirectory.open(request), observer, lambda text: print(text, file=sys.stderr))


def table(settings: Sequence[Setting], measured: Sequence[Sequence[Measured]]) -> str:
    """A row for each run, and one with the ratio of the last to the first, repeat by repeat.

    Args:
        settings: the runs.
        measured: of each run, a measurement for each repeat.
    """
    lines = ["| clients | a round | seconds a round | peak memory, MB | MB written a round |", "| ---: " * 5 + "|"]
    columns: list[Callable[[Measured], float]] = [
        lambda each: each.seconds,
        lambda each: each.memory / MEGABYTE,
        lambda each: each.written / MEGABYTE,
    ]
    for setting, repeats in zip(settings, measured, strict=True):
        cells = [_spread([column(each) for each in repeats]) for column in columns]
        lines.append(f"| {setting.clients:,} | {setting.per_round} | {' | '.join(cells)} |")
    ratios = [
        _spread([column(many) / column(few) for few, many in zip(measured[0], measured[-1], strict=True)])
        for column in columns
    ]
    return "\n".join([*lines, f"| ratio | | {' | '.join(ratios)} |"])


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000, help="of the larger run; the other one has --per-round")
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--examples", type=int, default=20, help="of each client")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=10, help="measured in each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--runs", type=Path, help="where to run; default: a temporary folder, removed at the end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there, too")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)  # a run, and nothing else
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # a repeat of a run, and nothing else
    words = parser.parse_args()
    shared = (words.per_round, words.examples, words.clients, words.model, words.threads)
    if path := words.make or words.measure:
        setting = Setting(int(path.name), *shared)
        print(
            json.dumps(
                make(setting, path) if words.make else dataclasses.asdict(run_rounds(setting, path, words.rounds))
            )
        )
        return
    settings = [Setting(clients, *shared) for clients in (words.per_round, words.clients)]
    folder = words.runs or Path(tempfile.mkdtemp(prefix="calfat-clients-"))
    folder.mkdir(parents=True, exist_ok=True)
    found: list[list[Measured]] = [[] for _ in settings]
    try:
        for setting in settings:
            _in_a_process("--make", folder / str(setting.clients))
        for repeat in range(words.repeats):
            for setting, repeats in zip(settings, found, strict=True):
                repeats.append(Measured(**_in_a_process("--measure", folder / str(setting.clients))))
                print(f"{repeat + 1}/{words.repeats}, {setting.clients} clients: {repeats[-1]}", file=sys.stderr)
    finally:
        if words.runs is None:
            shutil.rmtree(folder, ignore_errors=True)
    if words.json:
        numbers = {
            setting.clients: [dataclasses.asdict(each) for each in repeats]
            for setting, repeats in zip(settings, found, strict=True)
        }
        words.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    print(table(settings, found))


def _in_a_process(what: str, path: Path) -> Any:
    command = [sys.executable, "-m", "benchmarks.clients", *sys.argv[1:], what, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{path}: failed.\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
