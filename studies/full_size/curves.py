"""Adds the monitored rounds of finished runs to the curves beside their records; says which are trained to the end.

Run directories stay on the machine that trained them, so this is called before a record is committed. Run it from the
repository's root: ``python -m studies.full_size.curves``.
"""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import calfat_plugin as calfat

STUDIES, RUNS = Path(__file__).parents[1], Path("runs") / "suites"
SUITES = {  # to its curves, below studies/
    "full_cifar10": "full_size/cifar10_curves.csv",
    "full_fmnist": "full_size/fmnist_curves.csv",
    "full_digits": "full_size/digits_curves.csv",
    "one_step_fmnist": "one_step/one_step_fmnist_curves.csv",
    "longtail_fmnist": "one_step/longtail_fmnist_curves.csv",
}
HEAD = ("cell", "seed", "round", "natural", "pgd20", "steps", "passes")
Key = tuple[str, int, int]  # cell, seed, round
ROSE = 0.01  # a rise of the last fifth that is still going on


def monitored(directory: Path) -> Iterator[Mapping[str, Any]]:
    """A row for each monitored round of a run: accuracies on the validation split, steps and passes so far.

    ``steps`` are optimiser steps, the mean over clients.
    """
    run = calfat.load_run(directory)
    inner, train = run.recipe["calfat"]["threat"].get("inner"), run.recipe["train_args"]  # null: pgd
    replays = inner.get("replays", 1) if isinstance(inner, Mapping) else 1
    passes = steps = 0.0
    with (directory / "rounds.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sizes = [int(float(value)) for name, value in row.items() if name.startswith("num_examples_") and value]
            steps += mean(math.ceil(size / train["batch_size"]) for size in sizes) * train["epochs"] * replays
            passes += float(row["passes"])
            if row["pgd20"]:
                yield {**{name: row[name] for name in ("round", "natural", "pgd20")}, "steps": steps, "passes": passes}


def collect(suite: str, path: Path) -> None:
    """Add what is finished here of a suite to its curves."""
    rows: dict[Key, Mapping[str, Any]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            rows = {(row["cell"], int(row["seed"]), int(row["round"])): row for row in csv.DictReader(file)}
    for results in RUNS.glob(f"{suite}/*/seed-*/results.json"):
        cell, seed = results.parent.parent.name, int(results.parent.name.removeprefix("seed-"))
        for row in monitored(results.parent):
            rows[cell, seed, int(row["round"])] = {"cell": cell, "seed": seed, **row}
    if rows:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, HEAD, lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for _, row in sorted(rows.items()))
        for line in ended(rows):
            print(f"{suite}: {line}")


def ended(rows: Mapping[Key, Mapping[str, Any]]) -> Iterator[str]:
    """Whether each cell is trained to the end, in words; as README.md defines it."""
    curves: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (cell, _, number), row in rows.items():
        curves[cell][number].append(float(row["pgd20"]))
    for cell, of in curves.items():
        before, last, rose = rise(of)
        steps = mean(float(row["steps"]) for (name, _, number), row in rows.items() if (name, number) == (cell, last))
        verdict = "trained to the end" if rose < ROSE else "NOT trained to the end"
        moved = f"PGD-20 {100 * rose:+.2f} points from round {before} to {last}"
        yield f"{cell}: {len(of[last])} runs, {steps:,.0f} steps, {moved}: {verdict}"


def folder_of(cell: str) -> str:
    """The folder of a cell's runs, by which curves name it."""
    return "_".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-") for part in cell.split("/"))


def rise(curve: Mapping[int, Sequence[float]]) -> tuple[int, int, float]:
    """(the round nearest to four fifths, the last, what PGD-20 gained between them); round to a value for each pair."""
    last = max(curve)
    before = min(curve, key=lambda number: (abs(number - 0.8 * last), number))
    return before, last, mean(curve[last]) - mean(curve[before])


if __name__ == "__main__":
    for suite, curves in SUITES.items():
        collect(suite, STUDIES / curves)
