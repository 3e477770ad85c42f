"""The tables and figures of README.md, made of the records beside this file by the rules of its plan.

python -m studies.passes.tables
python -m studies.passes.tables RECORD   # shows what the alarm says of the runs of overfitting_digits.yaml in it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from studies import pages
from studies.records import COLLAPSED, Difference, difference, holm, rates, runs, student

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
DATA = {"digits": 40, "fmnist": 30}  # to all rounds
TITLES = {"digits": "Digits", "fmnist": "Fashion-MNIST"}
METHODS, ONE_STEP, MANY = ("FedPGD", "CalFAT"), "N-FGSM", "PGD-10"
ATTACKS = (MANY, "PGD-3", ONE_STEP, "RS-FGSM", "ATAS", "free, 4 replays")
COSTS = ("passes", "seconds")
ALLOWED = 0.01  # of AutoAttack accuracy: the loss that is to be excluded
PLANNED = 8  # pairs of a row
PAIRS = 5  # of a row that may be recommended, on each data set
OVERFITTED = 0.5  # PGD-20 over FGSM, below which a run has overfitted its attack
CHOSEN_ON, THRESHOLD = 9101, 0.11  # seed whose runs chose the threshold of the cosine


@dataclass(frozen=True)
class Row:
    """A row with its finished runs.

    Attributes:
        rounds: of one local epoch.
        rate: the learning rate that it chose.
        runs: a line for each pair, by seed.
        seconds: of training all rounds on one thread.
    """

    method: str
    attack: str
    rounds: int
    rate: str
    runs: pd.DataFrame
    seconds: float

    @property
    def name(self) -> str:
        """As the suite names it."""
        return f"{self.method}/{self.attack}/{self.rounds} rounds"

    def mean(self, metric: str) -> float:
        """Over the pairs."""
        return fmean(self.runs[metric])

    def cost(self, of: str) -> float:
        """Passes or seconds."""
        return self.seconds if of == "seconds" else self.mean("passes")

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of AutoAttack accuracy."""
        return student(self.runs["autoattack"])


@cache
def seconds_a_round() -> dict[str, dict[str, dict[str, float]]]:
    """Data set to method and attack to what ``seconds.py`` measured."""
    numbers: dict[str, dict[str, dict[str, float]]] = json.loads((HERE / "seconds.json").read_text())["numbers"]
    return numbers


@cache
def rows(data: str) -> dict[str, Row]:
    """Name to row, in the order of the suite."""
    record = HERE / f"passes_{data}.csv"
    table, chosen = runs(record), rates(record)
    found = {}
    for method in METHODS:
        for attack in ATTACKS:
            for rounds in (DATA[data], 10):
                if (cell := f"{method}/{attack}/{rounds} rounds") in table.index:
                    seconds = rounds * seconds_a_round()[data][f"{method}/{attack}"]["median"]
                    found[cell] = Row(method, attack, rounds, chosen[cell], table.loc[cell], seconds)
    return found


def front(data: str, cost: str) -> list[Row]:
    """The rows that nothing beats which costs at most as much, from cheap to dear."""
    every = rows(data).values()
    best = [
        row
        for row in every
        if not any(
            other.cost(cost) <= row.cost(cost) and other.mean("autoattack") > row.mean("autoattack") for other in every
        )
    ]
    return sorted(best, key=lambda row: row.cost(cost))


def megabytes_a_round(data: str) -> float:
    """That all clients send; the same for every row, but for some bytes."""
    sent = [
        row.mean("bytes_up") / row.rounds / 1e6 for row in rows(data).values() if row.runs["bytes_up"].notna().all()
    ]
    assert max(sent) - min(sent) < 1e-3
    return max(sent)


# --- tables -----------------------------------------------------------------------------------------------------------


def results(data: str) -> pages.Table:
    """Every row; on the front are those that nothing cheaper beats."""
    head = ["method", "attack", "rounds", "rate", "pairs", "passes", "seconds"]
    table = [[*head, "natural", "worst class", "PGD-20", "AutoAttack", "front"]]
    best = front(data, "passes")
    for row in rows(data).values():
        means = [f"{100 * row.mean(metric):.1f}" for metric in ("natural", "natural:worst-class", "pgd20")]
        ends = "" if row.interval is None else " [{:.1f}, {:.1f}]".format(*(100 * end for end in row.interval))
        costs = [f"{row.cost(cost):,.0f}" for cost in COSTS]
        numbers = [str(row.rounds), row.rate, str(len(row.runs)), *costs, *means]
        reached = f"{100 * row.mean('autoattack'):.1f}{ends}"
        table.append([row.method, row.attack, *numbers, reached, "•" if row in best else ""])
    return 2, table


@dataclass(frozen=True)
class Tested:
    """N-FGSM minus PGD-10 with all rounds, in AutoAttack accuracy; None where a pair is left to run."""

    data: str
    method: str
    fewer: float
    difference: Difference | None

    @property
    def excludes_a_point(self) -> bool:
        """Whether the interval excludes a loss of one point."""
        interval = self.difference and self.difference.interval
        return interval is not None and interval[0] > -ALLOWED


def tests() -> list[Tested]:
    """The four that are planned."""
    found = []
    for data, rounds in DATA.items():
        for method in METHODS:
            one, many = (rows(data).get(f"{method}/{attack}/{rounds} rounds") for attack in (ONE_STEP, MANY))
            if one is None or many is None or not len(one.runs) == len(many.runs) == PLANNED:  # nobody peeks
                found.append(Tested(data, method, float("nan"), None))
            else:
                of = difference((one.runs["autoattack"] - many.runs["autoattack"]).dropna())
                found.append(Tested(data, method, many.cost("passes") / one.cost("passes"), of))
    return found


def tested(_: str) -> pages.Table:
    """The planned tests."""
    table = [["data", "method", "times fewer passes", "AutoAttack, points", "p", "p, corrected", "a loss of one point"]]
    adjusted = holm([each.difference and each.difference.p_value for each in tests()])
    for each, corrected in zip(tests(), adjusted, strict=True):
        if each.difference is None:
            table.append([each.data, each.method, *["-"] * 5])
            continue
        p_values = ("-" if p is None else f"{p:.2g}" for p in (each.difference.p_value, corrected))
        excluded = "excluded" if each.excludes_a_point else "not excluded"
        table.append([each.data, each.method, f"{each.fewer:.1f}", each.difference.text(), *p_values, excluded])
    return 2, table


@dataclass(frozen=True)
class Candidate:
    """A row of at most a quarter of the passes of PGD-10 in all rounds, on each data set.

    Attributes:
        rounds: ``all`` or ``10``.
        reached: mean AutoAttack accuracy on each data set.
        collapsed: its runs of at most 15 % natural accuracy.
    """

    method: str
    attack: str
    rounds: str
    reached: Sequence[float]
    collapsed: int

    @property
    def both(self) -> float:
        """Mean over the data sets."""
        return sum(self.reached) / len(self.reached)


def candidates() -> list[Candidate]:
    """From the best down; those with at least five pairs on each data set."""
    found = []
    for method in METHODS:
        for attack in ATTACKS:
            for label in ("all", "10"):
                there = []
                for data, every in DATA.items():
                    rounds = every if label == "all" else 10
                    row = rows(data).get(f"{method}/{attack}/{rounds} rounds")
                    dearest = rows(data)[f"{method}/{MANY}/{every} rounds"].cost("passes")
                    if row is not None and len(row.runs) >= PAIRS and row.cost("passes") <= dearest / 4:
                        there.append(row)
                if len(there) == len(DATA):
                    collapsed = sum(int((row.runs["natural"] <= COLLAPSED).sum()) for row in there)
                    reached = [row.mean("autoattack") for row in there]
                    found.append(Candidate(method, attack, label, reached, collapsed))
    return sorted(found, key=lambda each: -each.both)


def recommended(_: str) -> pages.Table:
    """The plan's rule: the first row without a collapsed run is the one."""
    table = [["method", "attack", "rounds", "digits", "Fashion-MNIST", "both", "collapsed runs"]]
    for each in candidates():
        accuracies = (f"{100 * value:.1f}" for value in (*each.reached, each.both))
        table.append([each.method, each.attack, each.rounds, *accuracies, str(each.collapsed)])
    return 3, table


def alarm(_: str) -> pages.Table:
    """What the rule before today's said of its 46 runs."""
    return said(HERE / "overfitting_digits.csv")


def said(record: Path) -> pages.Table:
    """What of the runs of a kind overfitted, and what the alarm said; as the page defines both."""
    every = runs(record).reset_index()
    planted = every["cell"].str.contains("2 eps")
    table = [["attack of training", "runs", "overfitted", "misses", "false alarms"]]
    for words, of in (
        ("one step of 2 eps at eps 0.4", every[planted]),
        ("N-FGSM or RS-FGSM at eps 0.1", every[~planted]),
    ):
        overfitted, found = of["pgd20"] < OVERFITTED * of["fgsm"], of["overfitted"] > 0
        counts = (len(of), overfitted.sum(), (overfitted & ~found).sum(), (found & ~overfitted).sum())
        table.append([words, *map(str, counts)])
    return 1, table


def cosine(_: str) -> pages.Table:
    """What today's rule says of the 46 runs, and of forty fresh ones."""
    head, *old = said(HERE / "overfitting_cosine.csv")[1]
    _, *fresh = said(HERE / "overfitting_fresh.csv")[1]
    rows = [[pairs, *row] for pairs, of in (("3001 to 3011", old), ("3101 to 3105", fresh)) for row in of]
    return 2, [["pairs", *head], *rows]


def spared(_: str) -> pages.Table:
    """What it says of forty further runs, with the sentence that spares models which have learned nothing."""
    return said(HERE / "overfitting_spared.csv")


def alignment(_: str) -> pages.Table:
    """Both statistics on the runs that did not choose the threshold."""
    every = pd.read_csv(HERE / "alignment_digits.csv")
    judged = every[every["seed"] != CHOSEN_ON]
    overfitted = judged["pgd20"] < OVERFITTED * judged["fgsm"]
    table = [["rule", "runs", "overfitted", "misses", "false alarms"]]
    for words, found in (
        ("gap of accuracies over 0.4", judged["gap_findings"] > 0),
        (f"cosine below {THRESHOLD}", judged["lowest"] < THRESHOLD),
    ):
        counts = (len(judged), overfitted.sum(), (overfitted & ~found).sum(), (found & ~overfitted).sum())
        table.append([words, *map(str, counts)])
    return 1, table


TABLES: pages.Tables = {
    "results": results,
    "tested": tested,
    "recommended": recommended,
    "alarm": alarm,
    "alignment": alignment,
    "cosine": cosine,
    "spared": spared,
}


# --- figures ----------------------------------------------------------------------------------------------------------


def draw(data: str, cost: str, file: Path) -> None:
    """Every row with its interval against its cost; those that nothing cheaper beats are joined, the others pale."""
    best = front(data, cost)

    def onto(figure: Figure) -> None:
        axes = figure.subplots()
        steps = [row.cost(cost) for row in best], [100 * row.mean("autoattack") for row in best]
        axes.plot(*steps, color="#586069", drawstyle="steps-post", linewidth=1, zorder=1)
        for index, method in enumerate(METHODS):
            style: dict[str, Any] = {"color": pages.COLOURS[index], "marker": pages.MARKERS[index]}
            axes.plot([], [], linestyle="", label=method, **style)
            for row in (row for row in rows(data).values() if row.method == method):
                mean, (low, high) = row.mean("autoattack"), row.interval or (row.mean("autoattack"),) * 2
                bars = [[100 * (mean - max(0, low))], [100 * (min(1, high) - mean)]]
                alpha = 1 if row in best else 0.35
                axes.errorbar(row.cost(cost), 100 * mean, bars, **style, alpha=alpha, elinewidth=1, capsize=2)
        for row in best:
            name = f"{row.attack}, {row.rounds} rounds"
            place = (row.cost(cost), 100 * row.mean("autoattack"))
            axes.annotate(name, place, (4, -9), textcoords="offset points", fontsize=7)
        axes.set(xscale="log", xlabel=cost, ylabel="AutoAttack (%)", title=TITLES[data])
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:,.10g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(color="#d5dae0")
        axes.legend()

    pages.svg(onto, file, 7.2, 3.6)


def figures() -> dict[str, tuple[str, str]]:
    """Name of the file to data set and cost."""
    return {f"{cost}_{data}.svg": (data, cost) for data in DATA for cost in COSTS}


def main(records: Sequence[str]) -> None:
    """Write tables and figures, or show the alarm's counts of a record."""
    for record in records:
        for row in said(Path(record))[1]:
            print(*row, sep=" | ")
    if records:
        return
    pages.write_tables(PAGE, "passes", TABLES)
    for name, (data, cost) in figures().items():
        draw(data, cost, HERE / name)


if __name__ == "__main__":
    main(sys.argv[1:])
