"""The tables of results.md and of the repository's README.md, made of the records and curves beside this file.

python -m studies.full_size.tables
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import yaml

from studies import pages
from studies.full_size.curves import HEAD, ROSE, folder_of, rise
from studies.records import (
    AT_EQUAL,
    COLLAPSED,
    FELL,
    LEAD,
    Compared,
    claim,
    difference,
    family,
    fresh,
    rates,
    runs,
    spread,
)

HERE = Path(__file__).parent
PAGE, README = HERE / "results.md", pages.ROOT / "README.md"
NAMES = {"digits": "digits", "fmnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
FLOOR, PAPER, RELEASE, REFERENCE, STANDARD = (
    "CalFAT, floor of one example",
    "CalFAT, the paper's constants",  # with the former floor, 1e-6
    "CalFAT, the release's constants",
    "FedPGD",
    "standard FL",
)
SKEWED, EVEN = "0.1", "IID"
HYPOTHESES = {
    "CalFAT's worst class has more natural accuracy": "natural:worst-class",
    "its worst class has more PGD-20 accuracy": "pgd20:worst-class",
    "it is level under AutoAttack": "autoattack",
    "it has more natural accuracy at equal AutoAttack": AT_EQUAL,
    "it collapses less often": FELL,
    "its lead in natural accuracy is larger under skew": LEAD,
}
SEEN = range(4001, 4009)  # pairs of the pilot with another form of this floor, before the row was planned
ANCHORED = (4001, 4002, 4003, 4004, 4005)  # pairs of other than the main rows; of one-step attacks, too
#: What the paper says of CalFAT and each baseline, on CIFAR-10.
STATEMENTS = {"more natural accuracy": "natural", "more under PGD-20": "pgd20", "more under AutoAttack": "autoattack"}


@dataclass(frozen=True)
class Study:
    """The suite, the record and the curves of one data set."""

    suite: dict[str, Any]
    runs: pd.DataFrame
    rates: Mapping[str, str]
    curves: pd.DataFrame

    @property
    def is_skewed_alone(self) -> bool:
        """Whether cells have no degree of skew in their name."""
        return "beta" not in self.suite["axes"]

    @property
    def cells(self) -> list[str]:
        """The rows that have runs, in the order of the suite."""
        betas = [""] if self.is_skewed_alone else [f"{beta}/" for beta in self.suite["axes"]["beta"]]
        named = (f"{beta}{method}" for beta in betas for method in self.suite["axes"]["method"])
        return [cell for cell in named if cell in self.runs.index]

    def cell(self, method: str, beta: str = SKEWED) -> str:
        """The name of a row."""
        return method if self.is_skewed_alone else f"{beta}/{method}"

    @property
    def main(self) -> str:
        """The row of CalFAT that the hypotheses are about."""
        return FLOOR if FLOOR in self.suite["axes"]["method"] else PAPER

    def values(self, cell: str, metric: str) -> pd.Series:
        """Of a row, by seed; empty where it was not run."""
        return self.runs.loc[cell, metric] if cell in self.runs.index else pd.Series(dtype=float)

    def gain(self, method: str, metric: str, row: str | None = None) -> pd.Series:
        """A row of CalFAT, or its main one, minus another row under skew, by seed, of the pairs that both have."""
        return (self.values(self.cell(row or self.main), metric) - self.values(self.cell(method), metric)).dropna()

    def at_equal(self, row: str | None = None) -> pd.Series:
        """Natural accuracy at equal AutoAttack, by seed; infinite or NaN in a pair that has no rate of exchange."""
        cells = [self.cell(method) for method in (REFERENCE, STANDARD)]
        natural, robust = ([self.values(cell, metric) for cell in cells] for metric in ("natural", "autoattack"))
        given_up = robust[0] - robust[1]
        rate = ((natural[1] - natural[0]) / given_up).where(given_up > 0)
        gains = pd.DataFrame({metric: self.gain(REFERENCE, metric, row) for metric in ("natural", "autoattack")})
        finished = gains.loc[gains.index.intersection(given_up.dropna().index)]
        return finished["natural"] + rate.reindex(finished.index) * finished["autoattack"]

    def comparisons(self, row: str | None = None) -> list[Compared]:
        """The planned tests of a row of CalFAT, or of its main one, that have values, corrected for all of them.

        The row with the floor of one example is compared with FedPGD, and in three endpoints with the former floor.
        """
        row = row or self.main
        leads = [
            (self.values(self.cell(row, beta), "natural") - self.values(self.cell(REFERENCE, beta), "natural"))
            for beta in (SKEWED, EVEN)
        ]
        fell = [(self.values(self.cell(name), "natural") <= COLLAPSED).astype(float) for name in (row, REFERENCE)]
        endpoints = list(HYPOTHESES.values())[:3]
        gains = {endpoint: self.gain(REFERENCE, endpoint, row) for endpoint in endpoints}
        gains |= {AT_EQUAL: self.at_equal(row), FELL: (fell[0] - fell[1]).dropna()}
        if EVEN in self.suite["axes"].get("beta", ()):
            gains[LEAD] = (leads[0] - leads[1]).dropna()
        planned = [(self.cell(REFERENCE), endpoint, gain) for endpoint, gain in gains.items()]
        if row == FLOOR and PAPER in self.suite["axes"]["method"]:
            planned += [(self.cell(PAPER), endpoint, self.gain(PAPER, endpoint, row)) for endpoint in endpoints]
        return family(planned, len(self.suite["seeds"]))

    def claim(self, endpoint: str) -> str:
        """CalFAT's difference to FedPGD under skew, with the word that it may have, and which way."""
        if endpoint == LEAD and EVEN not in self.suite["axes"].get("beta", ()):
            return "not planned"
        found = self.comparisons()
        if self.stops_early:
            reference = self.cell(REFERENCE)
            with_it = (each for each in found if (each.cell, each.endpoint) == (reference, endpoint))
            pairs = next((each.difference.pairs for each in with_it), 0)
            return f"{pairs} pairs, not trained to the end" if pairs else "not run yet"
        without = int(self.at_equal().isna().sum()) if endpoint == AT_EQUAL else 0
        word = f"not tested: {without} pairs without a rate of exchange" if without else ""
        for each in found:
            if (each.cell, each.endpoint, each.word) == (self.cell(REFERENCE), endpoint, "clear"):
                if endpoint == "autoattack":
                    word = "clear: level all the same" if each.is_level else "clear: not level"
                elif (each.difference.mean < 0) != (endpoint == FELL):
                    word = "clear: the opposite"
        return claim(found, self.cell(REFERENCE), endpoint, word)

    def training(self, cell: str) -> tuple[float, float, int] | None:
        """(optimiser steps of a client, rise of the last fifth, of how many pairs the curves are); None without any."""
        # Fresh pairs may have curves, too.
        of = self.curves[(self.curves["cell"] == folder_of(cell)) & self.curves["seed"].isin(self.suite["seeds"])]
        if of.empty:
            return None
        by_round = {number: list(rows["pgd20"]) for number, rows in of.groupby("round")}
        _, last, rose = rise(by_round)
        return mean(of[of["round"] == last]["steps"]), rose, len(by_round[last])

    @property
    def stops_early(self) -> bool:
        """Whether a main row is not trained to the end, so that its runs are no result."""
        trained = (self.training(self.cell(row)) for row in (self.main, REFERENCE))
        return any(each is not None and each[1] >= ROSE for each in trained)


@cache
def study(name: str) -> Study | None:
    """The study of a data set; None where no run of it is recorded."""
    record, curves = HERE / f"{name}_runs.csv", HERE / f"{name}_curves.csv"
    if not record.exists():
        return None
    suite = yaml.safe_load((HERE / f"full_{name}.yaml").read_text(encoding="utf-8"))
    monitored = pd.read_csv(curves) if curves.exists() else pd.DataFrame(columns=HEAD)
    return Study(suite, runs(record), rates(record), monitored)


def accuracies(name: str) -> pages.Table:
    """Every row that has runs; the leader is in bold only among rows that have all pairs of the plan."""
    of = study(name)
    assert of is not None
    attacks = (each for each in of.suite["set"]["calfat.evaluators"] if isinstance(each, dict))
    fewer = {each["name"]: f" ({each['max_examples']:,} images)" for each in attacks}
    metrics = {key: heading + fewer.get(key, "") for key, heading in of.suite["metrics"].items() if key != "passes"}
    table = [["row", "rate", "calfat trust", "n", "steps", "last fifth", "curves of", *metrics.values()]]
    for cell in of.cells:
        verdict = next(filter(None, of.runs.loc[cell, "verdict"]), "-")
        numbers = [spread(of.values(cell, metric)) for metric in metrics]
        trained = ["-", "-", "0"]
        if (found := of.training(cell)) is not None:
            steps, rose, curves = found
            trained = [f"{steps:,.0f}", f"{100 * rose:+.2f}{'' if rose < ROSE else ' (not to the end)'}", str(curves)]
        pairs = str(len(of.values(cell, "natural")))
        table.append([cell, of.rates.get(cell, "-"), verdict, pairs, *trained, *numbers])
    return 3, table


def skewed(name: str) -> pages.Table:
    """The same under label skew, as the repository's README.md shows it."""
    _, (head, *rows) = accuracies(name)
    kept = [(row[0].removeprefix(f"{SKEWED}/"), row[3], *row[7:]) for row in rows if not row[0].startswith(EVEN)]
    return 1, [("method", head[3], *head[7:]), *kept]


def comparisons(name: str) -> pages.Table:
    """The planned tests that have values."""
    of = study(name)
    assert of is not None
    return _compared(of.comparisons())


def former(name: str) -> pages.Table:
    """The same of CalFAT with the former floor, as they were published first."""
    of = study(name)
    assert of is not None
    return _compared(of.comparisons(PAPER))


def _compared(compared: list[Compared]) -> pages.Table:
    table = [["against", "endpoint", "n", "difference", "p", "p, corrected", "result"]]
    return 2, table + [[each.cell.removeprefix(f"{SKEWED}/"), *each.row] for each in compared]


def unseen(name: str) -> pages.Table:
    """The differences of the pairs that no pilot had seen: described, not tested."""
    of = study(name)
    assert of is not None
    table = [["against", "endpoint", "n", "difference"]]
    for method in (REFERENCE, PAPER):
        for endpoint in list(HYPOTHESES.values())[:3]:
            gain = of.gain(method, endpoint)
            gain = gain[~gain.index.isin(SEEN)]
            if len(gain):
                found = difference(gain)
                table.append([method, endpoint, str(found.pairs), found.text(2)])
    return 2, table


def hypotheses(_: str) -> pages.Table:
    """What the planned tests say, of the data sets that have enough pairs for tests."""
    tested = {name: study(name) for name in ("digits", "fmnist")}
    table = [["", "hypothesis", *(NAMES[name] for name in tested)]]
    for number, (words, endpoint) in enumerate(HYPOTHESES.items(), start=1):
        claims = ("not run yet" if of is None else of.claim(endpoint) for of in tested.values())
        table.append([f"H{number}", words, *claims])
    return 4, table


def agreements(name: str) -> pages.Table:
    """The paper's statements of CalFAT and each other row, over the pairs that there are."""
    of = study(name)
    assert of is not None
    table = [["CalFAT against", "statement", "n", "difference", "result"]]
    for method in of.suite["axes"]["method"]:
        for words, metric in STATEMENTS.items() if method not in (FLOOR, PAPER, RELEASE, STANDARD) else ():
            gain = of.gain(method, metric)
            if len(gain):
                found, word = difference(gain), "not all pairs yet"
                if found.pairs == len(of.suite["seeds"]):
                    low, high = found.interval or (0.0, 0.0)
                    word = "agrees" if low > 0 else "disagrees" if high < 0 else "not clear"
                table.append([method, words, str(found.pairs), found.text(2), word])
    return 2, table


def anchor(name: str) -> pages.Table:
    """PGD-10 beside free, under skew: paired differences, described and not tested."""
    of = study(name)
    assert of is not None
    metrics = {key: heading for key, heading in of.suite["metrics"].items() if key != "passes"}
    dear = {row: f"{short}, PGD-10" for short, row in (("CalFAT", PAPER), ("FedPGD", REFERENCE))}
    pairs = {
        "CalFAT minus FedPGD, PGD-10": (dear[PAPER], dear[REFERENCE]),
        "CalFAT minus FedPGD, free": (PAPER, REFERENCE),
        "CalFAT, PGD-10 minus free": (dear[PAPER], PAPER),
        "FedPGD, PGD-10 minus free": (dear[REFERENCE], REFERENCE),
    }
    table = [["difference", "n", *metrics.values()]]
    for title, (one, other) in pairs.items():
        values = [of.values(of.cell(one), metric) - of.values(of.cell(other), metric) for metric in metrics]
        found = [difference(each[each.index.isin(ANCHORED)].dropna()) for each in values]
        table.append([title, str(found[0].pairs), *(each.text() for each in found)])
    return 1, table


def after_publication(name: str) -> pages.Table:
    """Pairs that were run after publication, beside the prediction interval of the published ones."""
    of = study(name)
    assert of is not None
    return 3, fresh(runs(HERE / f"{name}_fresh.csv"), [of.cell(PAPER), of.cell(REFERENCE)], of.values)


TABLES: pages.Tables = {
    "hypotheses": hypotheses,
    "accuracies": accuracies,
    "skewed": skewed,
    "comparisons": comparisons,
    "former": former,
    "unseen": unseen,
    "agreements": agreements,
    "anchor": anchor,
    "fresh": after_publication,
}


if __name__ == "__main__":
    for page in (PAGE, README):
        pages.write_tables(page, "full", TABLES)
