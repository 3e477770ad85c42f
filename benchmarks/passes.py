"""Seconds of a round with each attack of training, for the figures of docs/passes.md.

    python -m benchmarks.passes --json docs/results/passes_seconds.json

Of each suite, every method with every attack trains all clients of a round in this process, in turn, as a run of the
suite does; what is evaluated is not timed. Prints Markdown. Run it from the root of a checkout, on an idle machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import torch

from benchmarks.measuring import ROOT, Report, alternated, command, machine, words
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.server import Server
from calfat_plugin.federation.worker import Worker, shards_of
from calfat_plugin.observer import RunObserver
from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan

_FIRST = 6  # round: attacks that warm up have done so


def rounds(experiment: Experiment) -> Callable[[], float]:
    """Trains the clients of the next round from the first model; returns the seconds. One round is trained before."""
    device, dataset = torch.device("cpu"), experiment.load_dataset()
    server = Server(experiment, dataset, device, RunObserver())
    server.begin(None)
    worker = Worker(experiment, dataset, shards_of(experiment, dataset, device), device, RunObserver())
    numbers = count(_FIRST)

    def train() -> float:
        number, downlink, began = next(numbers), server.downlink(), time.perf_counter()
        for client in range(experiment.num_clients):
            worker.fit(client, number, downlink)
        return time.perf_counter() - began

    train()
    return train


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    parser = command(__doc__)
    parser.add_argument("--suites", type=words, default=["passes_digits", "passes_fmnist"], help="default: both")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change every recipe")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads or 1)
    report = Report("Seconds of a round", machine(torch.device("cpu")))
    for name in given.suites:
        suite = load_suite(str(ROOT / "suites" / f"{name}.yaml"))
        cells = make_plan(suite, Registry.load(entry_points=False), overrides=given.set).cells
        last = cells[0].labels[-1]  # all rounds
        of = {"/".join(cell.labels[:-1]): cell.experiment for cell in cells if cell.labels[-1] == last}
        found = alternated({row: rounds(each) for row, each in of.items() if each is not None}, given.repeats)
        report.keep(name.removeprefix("passes_"), found)
        report.table(suite.title, ["method and attack", "seconds a round"], found.items())
    report.finish(given.json)


if __name__ == "__main__":
    main()
