"""How a round's time and memory grow with clients, what these keep, workers, epochs, attack steps and the model's size.

    python -m benchmarks.scaling --clients 5,10,100,1000 --workers 1,2

Prints Markdown, a table for each axis. Run it from the root of a checkout, on an idle machine. Every run is a process
of its own: CalFAT on noise of 28x28 pixels, which lies on disk in the format of Fashion-MNIST. Along an axis, all else
stays as it is: five clients a round, 40 images each, so a federation of 1,000 trains as much in a round as one of 5.
Seconds are of the median round without the first; the peak of memory is the greatest of all rounds, in the process that
holds the global model.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.loops import images, network
from benchmarks.measuring import Report, Spread, alternated_quantities, command, machine, numbers, words
from benchmarks.round_overhead import run
from benchmarks.work import work_of
from calfat_plugin.rounds import read_rounds

SHAPE = (1, 28, 28)
RECIPE = """\
common_args: {{training_type: simulation, random_seed: 0}}
data_args: {{dataset: fmnist, data_cache_dir: {data}, partition_method: iid}}
model_args: {{model: {model}}}
train_args:
  {{client_num_in_total: {clients}, client_num_per_round: {per_round}, comm_round: {rounds}, epochs: {epochs},
    batch_size: 32, learning_rate: 0.01}}
calfat:
  trainer: calfat
  dataset: {{verify: false}}
  threat: {{eps: 0.1, step_size: eps/4, steps: {steps}}}
  evaluators: [natural]
  monitor: {{evaluators: [natural], max_examples: 1}}
  runtime: {{threads: {threads}}}
"""
SCAFFOLD = ("--set", "calfat.aggregator=scaffold")  # whose clients keep something
PER_ROUND = 5  # clients
EACH = 40  # images a client
_SECONDS, _PEAK = "seconds a round", "peak MB"


def write_images(root: Path, count: int) -> Path:
    """``count`` training images of noise, and ten for testing, as Fashion-MNIST lies on disk."""
    folder = root / f"images-{count}" / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for split, size in (("train", count), ("t10k", 10)):
        data = images(size, SHAPE)
        x, y = data.x.numpy().tobytes(), data.y.to(torch.uint8).numpy().tobytes()
        (folder / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, size, *SHAPE[1:]) + x)
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, size) + y)
    return folder.parents[1]


class Axis:
    """Runs that differ in one value."""

    def __init__(self, folder: Path, rounds: int, threads: int) -> None:
        self.folder, self.rounds, self.threads = folder, rounds, threads
        self._data: dict[int, Path] = {}

    def point(self, options: Sequence[str] = (), **changes: object) -> Callable[[], dict[str, float]]:
        """What measures a round with ``changes`` of the recipe once: its seconds, and the peak of memory in MB."""
        values: dict[str, object] = {"clients": PER_ROUND, "epochs": 1, "steps": 2, "model": "cnn_small", **changes}
        per_round = min(PER_ROUND, int(str(values["clients"]))) if "per_round" not in values else values["per_round"]
        count = EACH * int(str(values["clients"]))
        if count not in self._data:
            self._data[count] = write_images(self.folder, count)
        more = {"per_round": per_round, "rounds": self.rounds, "threads": self.threads, "data": self._data[count]}
        recipe = RECIPE.format(**{**values, **more})

        def measure() -> dict[str, float]:
            rounds = read_rounds(run(self.folder, recipe, *options) / "rounds.jsonl")
            peaks = [record.peak_memory_mb for record in rounds if record.peak_memory_mb is not None]
            seconds = Spread(tuple(record.seconds for record in rounds[1:]))
            return {_SECONDS: seconds.median, _PEAK: max(peaks, default=float("nan"))}

        return measure


def _table(report: Report, name: str, found: Mapping[str, Mapping[str, Spread]], beside: Mapping[str, str]) -> None:
    first, base = next(iter(found.items()))
    rows = []
    for label, spreads in found.items():
        report.keep(f"{name}: {label}", spreads)
        cells = (
            cell
            for quantity in (_SECONDS, _PEAK)
            for cell in (spreads[quantity], spreads[quantity].over(base[quantity]))
        )
        rows.append((label, *([beside[label]] if beside else []), *cells))
    more = ["necessary work"] if beside else []
    report.table("", [name, *more, _SECONDS, f"to {first}", _PEAK, f"to {first}"], rows)


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = command(__doc__)
    parser.add_argument("--clients", type=numbers, default=[5, 10, 50, 100, 500, 1000], help="of the federation")
    parser.add_argument("--workers", type=numbers, default=sorted({1, 2, cores}), help="of `calfat run --workers`")
    parser.add_argument("--epochs", type=numbers, default=[1, 2, 4])
    parser.add_argument("--steps", type=numbers, default=[1, 5, 10, 20], help="K, of the attack")
    parser.add_argument("--models", type=words, default=["cnn_small", "cnn_mcmahan", "cnn", "vgg8"])
    parser.add_argument("--parts", type=words, default=["clients", "states", "workers", "epochs", "steps", "models"])
    parser.add_argument("--rounds", type=int, default=6, help="of each run; default: 6")
    given = parser.parse_args(arguments)
    if given.rounds < 2:
        parser.error("--rounds: expected 2 or more, for the first is left out")
    threads = given.threads or 1
    torch.set_num_threads(threads)
    report = Report("Scaling", machine(torch.device("cpu")))
    with tempfile.TemporaryDirectory() as folder:
        axis = Axis(Path(folder), given.rounds, threads)
        points: dict[str, dict[str, Callable[[], dict[str, float]]]] = {
            "clients": {f"{count} clients": axis.point(clients=count) for count in given.clients},
            "states": {f"{count} clients": axis.point(SCAFFOLD, clients=count) for count in given.clients},
            "workers": {
                f"{count} workers": axis.point(
                    () if count == 1 else ("--workers", str(count)), clients=20, per_round=20
                )
                for count in given.workers
            },
            "epochs": {f"{count} epochs": axis.point(epochs=count) for count in given.epochs},
            "steps": {f"{count} steps": axis.point(steps=count) for count in given.steps},
            "models": {name: axis.point(model=name) for name in given.models},
        }
        for name in given.parts:
            beside = {model: _operations(model) for model in given.models} if name == "models" else {}
            _table(report, name, alternated_quantities(points[name], given.repeats), beside)
    report.finish(given.json)


def _operations(model: str) -> str:
    return f"{work_of(network(model, SHAPE), SHAPE).forward / 1e6:.3g} MFLOP forward"


if __name__ == "__main__":
    main()
