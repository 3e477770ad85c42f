"""The table of README.md: how many pairs detect a difference, from the records of what is published."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import stdev

import numpy as np
from scipy import stats

STUDIES = Path(__file__).parents[1]
SHORT = ("CalFAT, the paper's constants", "FedPGD")
METHODS = ("CalFAT", "FedPGD")
POWER, SIZE = 0.8, 0.05
ENDPOINTS = {"autoattack": 3.0, "natural:worst-class": 8.0}  # points to be found
ROWS = {
    "Fashion-MNIST, short study": ("short/study_fmnist_runs.csv", "0.1/{}", SHORT),
    "Fashion-MNIST, free, 30 rounds": ("passes/passes_fmnist.csv", "{}/free, 4 replays/30 rounds", METHODS),
    "digits, short study": ("short/study_digits_runs.csv", "0.1/{}", SHORT),
    "digits, free, 40 rounds": ("passes/passes_digits.csv", "{}/free, 4 replays/40 rounds", METHODS),
}


def differences(record: str, cell: str, methods: tuple[str, str], metric: str) -> list[float]:
    """CalFAT minus FedPGD in points, for each pair that both have."""
    with (STUDIES / record).open(newline="", encoding="utf-8") as file:
        runs = [row for row in csv.DictReader(file) if not row["tried"]]
    one, two = (
        {row["seed"]: 100 * float(row[metric]) for row in runs if row["cell"] == cell.format(name)} for name in methods
    )
    return [value - two[seed] for seed, value in one.items() if seed in two]


def pairs_needed(difference: float, deviation: float) -> int:
    """The smallest number of pairs with which the two-sided paired t test has the power."""
    for pairs in range(2, 10_000):
        edge = stats.t.ppf(1 - SIZE / 2, pairs - 1)
        shift = difference / deviation * np.sqrt(pairs)
        if stats.nct.sf(edge, pairs - 1, shift) + stats.nct.cdf(-edge, pairs - 1, shift) >= POWER:
            return pairs
    raise ValueError(f"more than 10,000 pairs for {difference} points at a standard deviation of {deviation}")


def table() -> str:
    """The rows as README.md has them."""
    lines = [
        "| published rows | AutoAttack: s | n | worst class, natural: s | n |",
        "| --- | --: | --: | --: | --: |",
    ]
    for name, (record, cell, methods) in ROWS.items():
        cells, pairs = [], 0
        for metric, difference in ENDPOINTS.items():
            found = differences(record, cell, methods, metric)
            pairs, deviation = len(found), stdev(found)
            cells += [f"{deviation:.2f}", str(pairs_needed(difference, deviation))]
        lines.append(f"| {name}, {pairs} pairs | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
