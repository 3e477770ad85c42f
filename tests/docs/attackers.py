"""The tables of docs/attackers.md, of the records in docs/results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

import yaml

from calfat_plugin.maths.intervals import paired
from calfat_plugin.suites.record import CHOICE, read_record
from tests.docs.blocks import Table

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "attackers.md"
SUITE, RATES_SUITE = (
    yaml.safe_load((ROOT / "suites" / f"{name}.yaml").read_text(encoding="utf-8"))
    for name in ("attackers_digits", "attackers_digits_rates")
)
RUNS = read_record(DOCS / "results" / "attackers_digits.csv")
RATES = read_record(DOCS / "results" / "attackers_digits_rates.csv")
BETAS, METHODS, ATTACKS, RULES = (list(labels) for labels in SUITE["axes"].values())
SEEDS: Sequence[int] = SUITE["seeds"]
NONE, *ATTACKED = ATTACKS

Values = Mapping[tuple[str, int], float]  # (method, seed) to what its run measured


def values(metric: str, beta: str, attack: str, rule: str) -> Values:
    """What the runs of one beta, attack and rule measured; an accuracy of a run whose training diverged is 0."""
    found = {}
    for run in product(METHODS, SEEDS):
        row = RUNS.get((f"{beta}/{run[0]}/{attack}/{rule}", "", run[1]))
        if row is not None and row.state == "lost" and metric in ("natural", "pgd20"):
            found[run] = 0.0
        elif row is not None and metric in row.values:
            found[run] = row.values[metric]
    return found


def by_seed(found: Values, among: Values) -> dict[int, float]:
    """Seed to the mean over methods, of the runs that ``among`` has, too."""
    both = [run for run in found if run in among]
    return {seed: fmean(found[run] for run in both if run[1] == seed) for seed in {seed for _, seed in both}}


def means(whole: int, *measured: Sequence[float]) -> str:
    """The mean of each in percent; with the number of runs where some are left to do."""
    number = len(measured[0])
    left = "" if number == whole else f" ({number} of {whole})"
    return " / ".join(f"{100 * fmean(numbers):.1f}" for numbers in measured) + left if number else "-"


def change(one: Values, other: Values) -> str:
    """``one`` minus ``other`` in points, paired over seeds, with its 95 % interval."""
    found = paired(by_seed(one, other), by_seed(other, one))
    if found is None:
        return "-"
    interval = "" if found.interval is None else " [{:.1f}, {:.1f}]".format(*(100 * end for end in found.interval))
    return f"{100 * found.mean:+.1f}{interval}"


def accuracies(beta: str) -> list[list[str]]:
    """Natural / PGD-20 by rule and attack."""
    whole = len(METHODS) * len(SEEDS)
    head = ["rule", *ATTACKS, "lowest PGD-20"]
    rows = []
    for rule in RULES:
        robust = {attack: values("pgd20", beta, attack, rule) for attack in ATTACKS}
        natural = {attack: values("natural", beta, attack, rule) for attack in ATTACKS}
        cells = [means(whole, [*natural[a].values()], [*robust[a].values()]) for a in ATTACKS]
        lowest = min((fmean(found.values()), attack) for attack, found in robust.items() if found)
        rows.append([rule, *cells, f"{100 * lowest[0]:.1f} ({lowest[1]})"])
    return [head, *rows]


def losses(beta: str) -> list[list[str]]:
    """PGD-20 with attackers minus the same rule without; and without them minus FedAvg."""
    average = values("pgd20", beta, NONE, RULES[0])
    return [
        ["rule", f"{NONE}, minus {RULES[0]}", *ATTACKED],
        *(
            [
                rule,
                "" if rule == RULES[0] else change(values("pgd20", beta, NONE, rule), average),
                *(change(values("pgd20", beta, a, rule), values("pgd20", beta, NONE, rule)) for a in ATTACKED),
            ]
            for rule in RULES
        ),
    ]


def methods(beta: str) -> list[list[str]]:
    """PGD-20 by method, rule and attack: the mean over seeds."""
    rows = [["method", "rule", *ATTACKS]]
    for method in METHODS:
        for rule in RULES:
            found = (values("pgd20", beta, attack, rule) for attack in ATTACKS)
            of_method = [[value for run, value in one.items() if run[0] == method] for one in found]
            rows.append([method, rule, *(means(len(SEEDS), numbers) for numbers in of_method)])
    return rows


def named(_: str) -> list[list[str]]:
    """Shares of attackers and of honest clients that a run's findings named, by beta and attack."""
    rows = [["beta", "attack", "runs", "attackers named", "honest clients named"]]
    for beta in BETAS:
        for attack in ATTACKS:
            who = ("attackers_named", "others_named")
            shares = [[v for rule in RULES for v in values(one, beta, attack, rule).values()] for one in who]
            percent = ["-" if not numbers else f"{100 * fmean(numbers):.1f} %" for numbers in shares]
            rows.append([beta, attack, str(len(shares[1])), *percent])
    return rows


def rates(_: str) -> list[list[str]]:
    """Mean of natural and PGD-20 on validation images at each learning rate, over betas and seeds; the best in bold."""
    tried = sorted({key[1].rpartition(" ")[2] for key in RATES if key[1]}, key=float)
    rows = [["method", *tried]]
    for method in METHODS:
        found = {rate: rate_score(method, rate) for rate in tried}
        best = max(found, key=lambda rate: found[rate])
        rows.append(
            [method, *(f"**{100 * v:.1f}**" if rate == best else f"{100 * v:.1f}" for rate, v in found.items())]
        )
    return rows


def rate_score(method: str, rate: str) -> float:
    """Of the choice runs of a method at a rate."""
    cells = [f"{beta}/{method}" for beta in BETAS]
    return fmean(
        row.values.get(CHOICE, 0.0)
        for (cell, tried, _), row in RATES.items()
        if cell in cells and tried == f"learning_rate {rate}"
    )


TABLES: dict[str, Callable[[str], Table]] = {
    "accuracies": lambda beta: (1, accuracies(beta)),
    "losses": lambda beta: (1, losses(beta)),
    "methods": lambda beta: (2, methods(beta)),
    "named": lambda beta: (1, named(beta)),
    "rates": lambda beta: (1, rates(beta)),
}
