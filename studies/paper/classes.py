"""Figures 3 and 5 and table 4 of the paper: clients after one local epoch of two methods, class by class.

    python studies/paper/classes.py RUN_DIR [--out FOLDER]

From the global model of a run, every client trains one local epoch with the run's own method and with FedGAIRAT, and
its model is measured on all test images. The file is also the plugin that the runs of one round name: the model that
they start from, and the evaluator that measures what each client sent.
"""

from __future__ import annotations

import argparse
import copy
import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import calfat_plugin as calfat
from calfat_plugin import AttackEvaluator, EvaluatorEntry, ModelEntry, hookimpl, option

FEDGAIRAT = {"name": "fedgairat", "start_round": 1}  # its weights are in force: the model is a trained one
EVALUATORS = ("natural", "pgd20")

Accuracies = Mapping[int, Mapping[str, Sequence[float | None]]]
"""Client to evaluator to accuracies, a fraction for each class; None for a class without test images."""


# --- the plugin -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Options of the model."""

    run: str = option(help="run directory whose last global model it is")


def trained(*, run: str, **images: Any) -> Any:
    """The network of a run with its weights; ``images`` are those of that run."""
    return calfat.load_model(run)


@hookimpl
def calfat_models() -> Iterable[ModelEntry]:
    yield ModelEntry("trained", build=trained, config=Trained)


class EachClient(AttackEvaluator):
    """The averaged model on clean images; beside it, in ``details``, what the client's own models can do."""

    has_budget = False

    def settings(self, task: Any) -> dict[str, Any]:
        return {"attack": "none"}

    def craft(self, task: Any, x: Any, y: Any, noise: Any) -> Any:
        return x

    def evaluate(self, task: Any, label: str) -> Any:
        clients, threat = task.clients(), task.threat
        how = {"eps": threat.eps, "norm": threat.norm, "step_size": threat.step_size, "seed": task.seed}
        found = {}
        for client in clients.ids:
            results = calfat.evaluate(clients.model(client), task.data, evaluators=EVALUATORS, **how)
            found[client] = {name: result.per_class for name, result in results.items()}
        return replace(super().evaluate(task, label), details={"clients": found})


@hookimpl
def calfat_evaluators() -> Iterable[EvaluatorEntry]:
    yield EvaluatorEntry("each-client", build=EachClient, uses_clients=True)


# --- the protocol -----------------------------------------------------------------------------------------------------


def one_epoch(recipe: Mapping[str, Any], run: Path, trainer: Any) -> dict[str, Any]:
    """The recipe of a run, changed to one round from its model: one local epoch on every client, all of them honest.

    The learning rate is the recipe's without schedule, which may have ended at 0.
    """
    changed = copy.deepcopy(dict(recipe))
    changed["model_args"] = {"model": "trained"}
    changed["train_args"] |= {
        "comm_round": 1,
        "client_num_per_round": recipe["train_args"]["client_num_in_total"],
        "epochs": 1,
        "local_steps": None,
        "lr_schedule": "constant",
        "warmup_rounds": 0,
    }
    calfat_section = changed["calfat"]
    for key in ("clients", "loggers", "reported"):
        calfat_section.pop(key, None)
    calfat_section |= {
        "model": {"run": str(run.resolve())},
        "trainer": trainer,
        "aggregator": "fedavg",
        "evaluators": ["each-client"],
        "monitor": {"evaluators": ["natural"]},
    }
    return changed


def measured(run: Path) -> dict[str, Accuracies]:
    """Method to what the clients' models can do."""
    recipe = calfat.load_run(run).recipe
    own = recipe["calfat"]["trainer"]
    found: dict[str, Accuracies] = {}
    for trainer in (own, FEDGAIRAT):
        with TemporaryDirectory() as folder:
            ended = calfat.run(one_epoch(recipe, run, trainer), plugins=__file__, run_dir=Path(folder) / "run")
            clients = ended.results["each-client"].details["clients"]
        found[str(trainer["name"])] = {int(client): of for client, of in clients.items()}
    return found


def mean(values: Iterable[float | None]) -> float:
    """Over the classes, or clients, that have test images."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else float("nan")


def over_clients(accuracies: Accuracies, evaluator: str) -> list[float]:
    """Class by class, the mean over clients: a bar each."""
    return [mean(column) for column in zip(*(of[evaluator] for of in accuracies.values()), strict=True)]


# --- what is written --------------------------------------------------------------------------------------------------


def rows(found: Mapping[str, Accuracies]) -> Iterator[tuple[str, int, str, int, float | None]]:
    """Method, client, evaluator, class, accuracy."""
    for method, clients in found.items():
        for client, of in clients.items():
            for evaluator, accuracies in of.items():
                for label, accuracy in enumerate(accuracies):
                    yield method, client, evaluator, label, accuracy


def table(found: Mapping[str, Accuracies], evaluator: str) -> str:
    """Table 4: a row for each client and method, in percent; the last column is the mean over classes."""
    classes = len(next(iter(next(iter(found.values())).values()))[evaluator])
    lines = [f"| client | method | {' | '.join(map(str, range(classes)))} | mean |", "|" + " --: |" * (classes + 3)]
    for client in next(iter(found.values())):
        for method, clients in found.items():
            accuracies = clients[client][evaluator]
            shown = ("-" if value is None else f"{100 * value:.1f}" for value in accuracies)
            lines.append(f"| {client} | {method} | {' | '.join(shown)} | {100 * mean(accuracies):.2f} |")
    return "\n".join(lines)


def figure(found: Mapping[str, Accuracies], evaluator: str, file: Path) -> None:
    """Bars of each class, the mean over clients."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6.3, 3), layout="constrained")
    axes = drawing.subplots()
    thick = 0.8 / len(found)
    for index, (method, clients) in enumerate(found.items()):
        heights = [100 * value for value in over_clients(clients, evaluator)]
        axes.bar([place + index * thick for place in range(len(heights))], heights, thick, label=method)
    middle = thick * (len(found) - 1) / 2
    axes.set_xticks([place + middle for place in range(len(heights))], [str(label) for label in range(len(heights))])
    axes.set(xlabel="class", ylabel=f"{evaluator} accuracy (%), mean over clients")
    axes.legend()
    drawing.savefig(file)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="a run directory, such as those of table1.yaml")
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), help="default: %(default)s")
    given = parser.parse_args(arguments)
    found = measured(given.run)
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "classes.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("method", "client", "evaluator", "class", "accuracy"))
        writer.writerows(rows(found))
    for evaluator in EVALUATORS:
        print(f"\n{evaluator}\n\n{table(found, evaluator)}")
        figure(found, evaluator, given.out / f"classes_{evaluator}.pdf")
    print(f"\nwritten: {given.out}")


if __name__ == "__main__":
    main()
