"""The tables of docs/passes.md, of the records in docs/results, by the rules of its plan."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calfat_plugin.maths.intervals import Difference, holm, paired, paired_p_value
from calfat_plugin.registry import Registry
from calfat_plugin.report.charts import render
from calfat_plugin.report.front import front_chart
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.front import as_json, points
from calfat_plugin.suites.plan import make_plan
from calfat_plugin.suites.record import read_record
from calfat_plugin.suites.summary import CellSummary, SuiteSummary, summarise
from calfat_plugin.suites.tuning import chosen_text
from tests.docs.blocks import Table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "passes.md"
DATA = {"digits": "40 rounds", "fmnist": "30 rounds"}  # to the label of all rounds
COSTS = ("passes", "seconds")
METHODS, ONE_STEP, MANY = ("FedPGD", "CalFAT"), "N-FGSM", "PGD-10"
ALLOWED = 0.01  # of AutoAttack accuracy: the loss that is to be excluded
PAIRS = 5  # of a row that may be recommended, on each data set
COLLAPSED = 0.15  # natural accuracy up to which a run has collapsed
OVERFITTED = 0.5  # PGD-20 over FGSM, below which a run has overfitted its attack


@functools.cache
def summary(data: str) -> SuiteSummary:
    """What ``calfat suite --table`` makes of the record."""
    suite = load_suite(str(ROOT / "suites" / f"passes_{data}.yaml"))
    record = ROOT / "docs" / "results" / f"passes_{data}.csv"
    return summarise(make_plan(replace(suite, record=record), Registry.load(entry_points=False)))


def rows(data: str) -> dict[str, CellSummary]:
    """Name to row, of those with finished runs."""
    return {row.cell.name: row for row in summary(data).cells if row.ended}


@functools.cache
def seconds_a_round() -> Mapping[str, Mapping[str, Any]]:
    """Data set to method and attack to what ``benchmarks.passes`` measured."""
    content = json.loads((ROOT / "docs" / "results" / "passes_seconds.json").read_text(encoding="utf-8"))
    numbers: Mapping[str, Mapping[str, Any]] = content["numbers"]
    return numbers


def seconds(data: str, row: CellSummary) -> float:
    """Of training, without what is evaluated."""
    method, attack, rounds = row.cell.labels
    return float(seconds_a_round()[data][f"{method}/{attack}"]["median"]) * int(rounds.split()[0])


def megabytes_a_round(data: str) -> float:
    """That all clients send; the same for every row, but for some bytes."""
    sent = {
        mean / int(row.cell.labels[2].split()[0]) / 1e6
        for row in rows(data).values()
        if (mean := row.scores["bytes_up"].mean) is not None
    }
    assert max(sent) - min(sent) < 1e-3
    return max(sent)


def figure(data: str, cost: str, folder: Path) -> str:
    """Every row with its interval, drawn as on the suite's page; an SVG, whose files are left in ``folder``."""
    suite = summary(data).suite
    assert suite.front is not None
    found = points(summary(data), None if cost == "passes" else functools.partial(seconds, data))
    chart = front_chart(as_json(suite.front, {**suite.metrics, suite.front.cost: cost}, found))
    assert chart is not None
    title = f"{ {'digits': 'Digits', 'fmnist': 'Fashion-MNIST'}[data] }: AutoAttack accuracy against {cost}"
    render(replace(chart, title=title), folder)
    return (folder / f"{chart.name}.svg").read_text(encoding="utf-8")


def results(data: str) -> Table:
    """Every row; on the front are those that nothing cheaper beats."""
    front = {point.row.cell.name: point.on_front for point in points(summary(data))}
    head = ["method", "attack", "rounds", "rate", "pairs", "passes", "seconds"]
    table = [[*head, "natural", "worst class", "PGD-20", "AutoAttack", "front"]]
    for name, row in rows(data).items():
        scores = row.scores
        means = [f"{100 * (scores[metric].mean or 0):.1f}" for metric in ("natural", "natural:worst-class", "pgd20")]
        interval = scores["autoattack"].interval
        ends = "" if interval is None else " [{:.1f}, {:.1f}]".format(*(100 * end for end in interval))
        table.append(
            [
                *row.cell.labels[:2],
                row.cell.labels[2].split()[0],
                chosen_text(row.choice).removeprefix("learning_rate ") if row.choice else "",
                str(row.ended),
                f"{scores['passes'].mean:,.0f}",
                f"{seconds(data, row):,.0f}",
                *means,
                f"{100 * (scores['autoattack'].mean or 0):.1f}{ends}",
                "•" if front[name] else "",
            ]
        )
    return 3, table


@dataclass(frozen=True)
class Tested:
    """N-FGSM minus PGD-10 with all rounds, in AutoAttack accuracy."""

    data: str
    method: str
    fewer: float
    difference: Difference | None
    p_value: float | None

    @property
    def excludes_a_point(self) -> bool:
        """Whether the interval excludes a loss of one point."""
        found = self.difference and self.difference.interval
        return found is not None and found.low > -ALLOWED


def tests() -> list[Tested]:
    """The four that are planned; those of which a run is left to do have no difference."""
    found = []
    for data, all_rounds in DATA.items():
        for method in METHODS:
            one, many = (rows(data).get(f"{method}/{attack}/{all_rounds}") for attack in (ONE_STEP, MANY))
            whole = len(summary(data).suite.seeds)
            if one is None or many is None or not one.ended == many.ended == whole:  # nobody peeks
                found.append(Tested(data, method, float("nan"), None, None))
                continue
            fewer = (many.scores["passes"].mean or 0) / (one.scores["passes"].mean or 1)
            of = [row.scores["autoattack"].by_seed for row in (one, many)]
            found.append(Tested(data, method, fewer, paired(*of), paired_p_value(*of)))
    return found


def tested(_: str) -> Table:
    """The planned tests."""
    table = [["data", "method", "times fewer passes", "AutoAttack, points", "p", "p, corrected", "a loss of one point"]]
    adjusted = holm([each.p_value for each in tests()])
    for each, corrected in zip(tests(), adjusted, strict=True):
        if each.difference is None or each.difference.interval is None:
            table.append([each.data, each.method, *["-"] * 5])
            continue
        low, high = (100 * end for end in each.difference.interval)
        table.append(
            [
                each.data,
                each.method,
                f"{each.fewer:.1f}",
                f"{100 * each.difference.mean:+.1f} [{low:.1f}, {high:.1f}]",
                *("-" if p is None else f"{p:.2g}" for p in (each.p_value, corrected)),
                "excluded" if each.excludes_a_point else "not excluded",
            ]
        )
    return 2, table


@dataclass(frozen=True)
class Candidate:
    """A row of at most a quarter of the passes of PGD-10 in all rounds, on each data set.

    Attributes:
        reached: mean AutoAttack accuracy on each data set.
        collapsed: its runs of at most 15 % natural accuracy.
    """

    method: str
    attack: str
    rounds: str
    reached: tuple[float, ...]
    collapsed: int

    @property
    def both(self) -> float:
        """Mean over the data sets."""
        return sum(self.reached) / len(self.reached)


def candidates() -> list[Candidate]:
    """From the best down; those with at least five pairs on each data set."""
    found = []
    for row in rows("digits").values():
        method, attack, label = row.cell.labels
        rounds = "all" if label == DATA["digits"] else "10"
        cells, dearest = [], []
        for data, all_rounds in DATA.items():
            cells.append(rows(data).get(f"{method}/{attack}/{all_rounds if rounds == 'all' else label}"))
            dearest.append(rows(data)[f"{method}/{MANY}/{all_rounds}"].scores["passes"].mean or 0)
        there = [cell for cell in cells if cell is not None and cell.ended >= PAIRS]
        if len(there) < len(DATA):
            continue
        scores = [cell.scores for cell in there]
        if all((each["passes"].mean or 0) <= most / 4 for each, most in zip(scores, dearest, strict=True)):
            natural = [value for cell in there for value in cell.scores["natural"].by_seed.values()]
            reached = tuple(each["autoattack"].mean or 0 for each in scores)
            found.append(Candidate(method, attack, rounds, reached, sum(value <= COLLAPSED for value in natural)))
    return sorted(found, key=lambda each: -each.both)


def recommended(_: str) -> Table:
    """The plan's rule: the first row without a collapsed run is the one."""
    table = [["method", "attack", "rounds", "digits", "Fashion-MNIST", "both", "collapsed runs"]]
    for each in candidates():
        accuracies = (f"{100 * value:.1f}" for value in (*each.reached, each.both))
        table.append([each.method, each.attack, each.rounds, *accuracies, str(each.collapsed)])
    return 3, table


@dataclass(frozen=True)
class Alarmed:
    """A run of the suite that tries the alarm, as the page defines both."""

    cell: str
    overfitted: bool
    found: bool


def alarmed() -> list[Alarmed]:
    """All finished runs."""
    record = read_record(ROOT / "docs" / "results" / "overfitting_digits.csv")
    return [
        Alarmed(cell, run["pgd20"] < OVERFITTED * run["fgsm"], run["overfitted"] > 0)
        for (cell, *_), run in ((key, row.values) for key, row in record.items())
    ]


def alarm(_: str) -> Table:
    """What of the runs of a kind overfitted, and what the alarm said."""
    kinds = {"one step of 2 eps at eps 0.4": True, "N-FGSM or RS-FGSM at eps 0.1": False}
    table = [["attack of training", "runs", "overfitted", "misses", "false alarms"]]
    for words, planted in kinds.items():
        runs = [run for run in alarmed() if ("2 eps" in run.cell) is planted]
        misses = sum(run.overfitted and not run.found for run in runs)
        false = sum(run.found and not run.overfitted for run in runs)
        table.append([words, *map(str, (len(runs), sum(run.overfitted for run in runs), misses, false))])
    return 1, table


TABLES: Mapping[str, Callable[[str], Table]] = {
    "results": results,
    "tested": tested,
    "recommended": recommended,
    "alarm": alarm,
}
