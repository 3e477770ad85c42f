"""Rows of the records that ``calfat suite --record`` writes, and statistics over pairs of seed and partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

ACCURACIES = ("natural", "fgsm", "pgd20", "autoattack")
COLLAPSED = 0.15  # natural accuracy of a run that has collapsed, at most
LEVEL = 0.03  # of AutoAttack accuracy: the largest difference that counts as none
AT_EQUAL, FELL, LEAD = "natural at equal autoattack", "collapsed", "lead in natural, 0.1 minus IID"


def read(record: Path) -> pd.DataFrame:
    """Every row of a record; accuracies are fractions, and 0 where the training diverged."""
    table = pd.read_csv(record, keep_default_na=False, na_values={"seconds": [""]})
    for column in table.columns[table.columns.get_loc("verdict") + 1 :]:
        is_accuracy = column.partition(":")[0] in ACCURACIES or column == "choice"
        values = pd.to_numeric(table[column])
        table[column] = values.mask(table["state"] == "lost", 0.0) if is_accuracy else values
    return table


def runs(record: Path) -> pd.DataFrame:
    """The runs of a table, by cell and seed."""
    table = read(record)
    return table[table["tried"] == ""].set_index(["cell", "seed"]).sort_index()


def rates(record: Path) -> dict[str, str]:
    """Cell to the learning rate that its choice runs chose: the best mean over their seeds."""
    tried = read(record)
    scores = tried[tried["tried"] != ""].groupby(["cell", "tried"])["choice"].mean()
    return {cell: of.idxmax()[1].removeprefix("learning_rate ") for cell, of in scores.groupby(level="cell")}


def student(values: Sequence[float] | pd.Series, confidence: float = 0.95) -> tuple[float, float] | None:
    """Student's interval of a mean; None for one value, and for two or three that are equal: that may be chance."""
    number = len(values)
    if number < 2 or (number < 4 and np.ptp(values) < 1e-9):
        return None
    half = stats.t.ppf((1 + confidence) / 2, number - 1) * np.std(values, ddof=1) / np.sqrt(number)
    return float(np.mean(values) - half), float(np.mean(values) + half)


class Difference(NamedTuple):
    """One row minus another, paired over seeds; fractions."""

    mean: float
    interval: tuple[float, float] | None
    p_value: float | None
    pairs: int

    def text(self, digits: int = 1) -> str:
        """``+20.4 [10.8, 29.9]``, in points."""
        ends = (
            ""
            if self.interval is None
            else " [{:.{n}f}, {:.{n}f}]".format(*(100 * end for end in self.interval), n=digits)
        )
        return f"{100 * self.mean:+.{digits}f}{ends}"


def difference(values: Sequence[float] | pd.Series) -> Difference:
    """Of values that are differences already, at least one; the p-value is the two-sided t test's."""
    interval = student(values)
    p_value = None
    if interval is not None:
        equal = np.ptp(values) < 1e-9
        p_value = float(abs(np.mean(values)) < 1e-9) if equal else float(stats.ttest_1samp(values, 0).pvalue)
    return Difference(float(np.mean(values)), interval, p_value, len(values))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction for all tests that were planned; one that was not made, None, counts."""
    adjusted: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p_value, place) in enumerate(sorted((p, place) for place, p in enumerate(p_values) if p is not None)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_value))
        adjusted[place] = highest
    return adjusted


def mcnemar(gain: pd.Series) -> float:
    """The exact two-sided test that 1 and -1 are equally likely."""
    wins, losses = int((gain > 0).sum()), int((gain < 0).sum())
    return float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


@dataclass(frozen=True)
class Compared:
    """One row minus another, in one endpoint of a plan.

    Attributes:
        cell: the other row.
        adjusted: the p-value after Holm; None where a pair is left to run.
    """

    cell: str
    endpoint: str
    difference: Difference
    p_value: float | None
    adjusted: float | None
    is_level: bool

    @property
    def word(self) -> str:
        """As the plans define it."""
        if self.adjusted is None:
            return "not all pairs yet"
        return "clear" if self.adjusted < 0.05 else "level" if self.is_level else "not clear"

    @property
    def row(self) -> list[str]:
        """Endpoint, pairs, difference, both p-values and the word, as tables have them."""
        p_values = ("-" if p is None else f"{p:.2g}" for p in (self.p_value, self.adjusted))
        return [self.endpoint, str(self.difference.pairs), self.difference.text(2), *p_values, self.word]


def family(planned: Sequence[tuple[str, str, pd.Series]], pairs: int) -> list[Compared]:
    """The comparisons that have values, corrected for all that are planned.

    Args:
        planned: the other row, the endpoint, and by seed the one minus the other.
        pairs: how many must be there before anything is tested.
    """
    p_values = [_p_value(endpoint, gain, pairs) for _, endpoint, gain in planned]
    found = []
    for (cell, endpoint, gain), p_value, adjusted in zip(planned, p_values, holm(p_values), strict=True):
        known = gain.dropna()
        if len(known):
            narrow = student(known, 0.9)
            level = endpoint == "autoattack" and narrow is not None and -LEVEL < narrow[0] <= narrow[1] < LEVEL
            of = difference(known)
            # Student's interval is not one of -1, 0 and 1.
            of = of._replace(interval=None) if endpoint == FELL else of
            found.append(Compared(cell, endpoint, of, p_value, adjusted, level))
    return found


def _p_value(endpoint: str, gain: pd.Series, pairs: int) -> float | None:
    """None where a pair is left to run, or has no rate of exchange."""
    if len(gain.dropna()) < pairs:
        return None
    return mcnemar(gain) if endpoint == FELL else difference(gain).p_value


def claim(found: Iterable[Compared], cell: str, endpoint: str, word: str = "") -> str:
    """The difference to a row, with the word that it may have, or with another."""
    of = [each for each in found if (each.cell, each.endpoint) == (cell, endpoint)]
    return f"{of[0].difference.text()}, {word or of[0].word}" if of else "not run yet"


def fresh(after: pd.DataFrame, cells: Iterable[str], published: Callable[[str, str], pd.Series]) -> list[list[str]]:
    """Head and rows: pairs that were run after publication, beside the prediction interval of the published ones.

    Args:
        published: values of a row and an accuracy.
    """
    seeds = sorted(after.index.unique("seed"))
    table = [["row", "accuracy", "95 % prediction interval", *map(str, seeds), "inside"]]
    for cell in cells:
        for metric, heading in (("natural", "natural"), ("autoattack", "AA")):
            low, high = prediction(published(cell, metric))
            values = after.loc[cell, metric][seeds]
            numbers = [f"{100 * value:.1f}" for value in values]
            inside = f"{int(values.between(low, high).sum())} of {len(values)}"
            table.append([cell, heading, f"[{100 * low:.1f}, {100 * high:.1f}]", *numbers, inside])
    return table


def spread(values: pd.Series, is_best: bool = False) -> str:
    """Mean ± standard deviation [95 % interval] of accuracies, in percent; the best in bold."""
    mean, interval = f"{100 * values.mean():.2f}", student(values)
    ends = "" if interval is None else f" [{100 * max(0, interval[0]):.1f}, {100 * min(1, interval[1]):.1f}]"
    deviation = f" ± {100 * values.std():.2f}" if len(values) > 1 else ""
    return f"{f'**{mean}**' if is_best else mean}{deviation}{ends}"


def prediction(values: pd.Series) -> tuple[float, float]:
    """Student's 95 % interval of a further value."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std() * np.sqrt(1 + 1 / len(values))
    return values.mean() - half, values.mean() + half
