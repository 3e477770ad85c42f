"""The tables and the figure of results.md, made of the records beside this file by the rules of README.md.

python -m studies.one_step.tables
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from studies import pages
from studies.full_size.curves import ROSE, folder_of, rise
from studies.full_size.tables import ANCHORED, PAPER, REFERENCE, SKEWED
from studies.full_size.tables import HERE as FULL_SIZE
from studies.records import COLLAPSED, Compared, difference, family, rates, runs, spread, student

HERE = Path(__file__).parent
PAGE, FIGURE = HERE / "results.md", HERE / "one_step_fmnist.svg"
ONE_STEP, LONG_TAIL = HERE / "one_step_fmnist_runs.csv", HERE / "longtail_fmnist_runs.csv"
METHODS = {"FedPGD": REFERENCE, "CalFAT": PAPER}  # here and in the study at full size
ATTACKS, BUDGETS = ("sora", "N-FGSM", "ATAS"), ("plain", "by class", "warm-up alone")
SHARED = {"free, 4 replays": METHODS, "PGD-10": {method: f"{method}, PGD-10" for method in METHODS}}  # by names there
ON_TAIL = {
    **{"natural": "natural", "natural:tail": "natural, tail", "pgd20": "PGD-20", "autoattack": "AutoAttack"},
    **{f"autoattack:{part}": f"AutoAttack, {part}" for part in ("head", "middle", "tail")},
}
TESTED = {"autoattack": "AutoAttack", "autoattack:tail": "AutoAttack, tail"}
OVERFITTED = 0.5  # PGD-20 over FGSM, below which a run has overfitted its attack


@dataclass(frozen=True)
class Row:
    """A method with an attack of training, or with a budget, and its finished runs by seed."""

    method: str
    variant: str
    rate: str
    runs: pd.DataFrame
    curve: dict[int, list[float]]  # round to PGD-20 on the validation split, a value for each pair

    def values(self, metric: str) -> pd.Series:
        return self.runs[metric]

    @property
    def collapsed(self) -> int:
        return int((self.runs["natural"] <= COLLAPSED).sum())

    @property
    def overfitted(self) -> int | None:
        """None where FGSM was not measured."""
        if "fgsm" not in self.runs:
            return None
        return int(((self.runs["overfitted"] > 0) | (self.runs["pgd20"] < OVERFITTED * self.runs["fgsm"])).sum())

    @property
    def rose(self) -> str:
        if not self.curve:
            return "-"
        rose = rise(self.curve)[2]
        return f"{100 * rose:+.2f}{'' if rose < ROSE else ' (not to the end)'}"


@cache
def rows(record: Path) -> list[Row]:
    """The rows of a record that have finished runs, in the order of the plan."""
    if not record.exists():
        return []
    table, chosen, curves = runs(record), rates(record), _curves(record)
    variants = ATTACKS if record == ONE_STEP else BUDGETS
    return [
        Row(method, variant, chosen[cell], table.loc[cell], curves.get(folder_of(cell), {}))
        for method in METHODS
        for variant in variants
        if (cell := f"{method}/{variant}") in table.index
    ]


@cache
def shared() -> list[Row]:
    """The rows of the study at full size that are read beside one-step attacks: its first five pairs."""
    record = FULL_SIZE / "fmnist_runs.csv"
    if not record.exists():
        return []
    table, chosen, curves = runs(record), rates(record), _curves(record, ANCHORED)
    found = []
    for method in METHODS:
        for variant, names in SHARED.items():
            cell = f"{SKEWED}/{names[method]}"
            if cell in table.index and len(of := table.loc[cell].loc[table.loc[cell].index.isin(ANCHORED)]):
                found.append(Row(method, variant, chosen[cell], of, curves.get(folder_of(cell), {})))
    return found


def _curves(record: Path, pairs: Sequence[int] | None = None) -> dict[str, dict[int, list[float]]]:
    """Folder of a cell to its curve, of all pairs or of these."""
    path = record.with_name(record.name.replace("_runs", "_curves"))
    if not path.exists():
        return {}
    every = pd.read_csv(path)
    cells = (every if pairs is None else every[every["seed"].isin(pairs)]).groupby("cell")
    return {str(cell): {int(n): [*part["pgd20"]] for n, part in of.groupby("round")} for cell, of in cells}


def front(every: list[Row]) -> list[Row]:
    """The rows that none with at most as many passes beats in the mean, from cheap to dear."""
    means = [(row, row.values("passes").mean(), row.values("autoattack").mean()) for row in every]
    best = [
        (passes, row)
        for row, passes, reached in means
        if not any(other <= passes and more > reached for _, other, more in means)
    ]
    return [row for _, row in sorted(best, key=lambda each: each[0])]


def recommended(every: list[Row]) -> Row | None:
    """The row that the plan has *passes* recommend; None: what it recommends stays."""
    limit = max(row.values("passes").mean() for row in every if row.variant.startswith("free"))
    sound = [row for row in every if not row.collapsed and not row.overfitted]
    cheap = [row for row in sound if row.values("passes").mean() <= limit]
    best = max(cheap, key=lambda row: float(row.values("autoattack").mean()))
    return best if best.variant in ATTACKS else None


def comparisons(record: Path) -> list[Compared]:
    """The planned tests: sora minus N-FGSM, or by_class minus plain, in each method."""
    here = {(row.method, row.variant): row for row in rows(record)}
    one, other = ("sora", "N-FGSM") if record == ONE_STEP else ("by class", "plain")
    planned = []
    for method in METHODS:
        for metric in TESTED if record == LONG_TAIL else ["autoattack"]:
            values = [
                here[method, variant].values(metric).loc[lambda of: of.index.isin(ANCHORED)]
                if (method, variant) in here
                else pd.Series(dtype=float)
                for variant in (one, other)
            ]
            planned.append((f"{method}: {one} minus {other}", metric, (values[0] - values[1]).dropna()))
    return family(planned, len(ANCHORED))


def counted(number: int | None, of: int) -> str:
    """``1 of 10 [0.3, 44.5]``: the interval is Clopper's and Pearson's, 95 %, of the share, in percent."""
    if number is None:
        return "-"
    low, high = stats.binomtest(number, of).proportion_ci(0.95, "exact")
    return f"{number} of {of} [{100 * low:.1f}, {100 * high:.1f}]"


# --- tables -----------------------------------------------------------------------------------------------------------


def attacks(_: str) -> pages.Table:
    """One-step attacks, and beside them free and PGD-10."""
    head = ["method", "attack", "rate", "n", "last fifth", "passes", "natural", "worst class", "PGD-20", "AutoAttack"]
    table = [[*head, "collapsed", "overfitted", "front"]]
    every = sorted([*rows(ONE_STEP), *shared()], key=lambda row: [*METHODS].index(row.method))
    best = [row for method in METHODS for row in front([row for row in every if row.method == method])]
    for row in every:
        means = [f"{100 * row.values(metric).mean():.1f}" for metric in ("natural", "natural:worst-class", "pgd20")]
        passes, pairs = f"{row.values('passes').mean():,.0f}", len(row.runs)
        failed = [counted(row.collapsed, pairs), counted(row.overfitted, pairs), "•" if row in best else ""]
        reached = spread(row.values("autoattack"))
        table.append([row.method, row.variant, row.rate, str(pairs), row.rose, passes, *means, reached, *failed])
    return 3, table


def budgets(_: str) -> pages.Table:
    """A budget by class, on the long tail."""
    table = [["method", "budget", "rate", "n", "last fifth", "passes", *ON_TAIL.values()]]
    for row in rows(LONG_TAIL):
        numbers = [spread(row.values(metric)) for metric in ON_TAIL]
        passes = f"{row.values('passes').mean():,.0f}"
        table.append([row.method, row.variant, row.rate, str(len(row.runs)), row.rose, passes, *numbers])
    return 3, table


def described(_: str) -> pages.Table:
    """Differences on the long tail, paired: of budgets, and of the two methods with the plain one."""
    here = {(row.method, row.variant): row for row in rows(LONG_TAIL)}
    table = [["difference", "n", *ON_TAIL.values()]]
    of_budgets = [(f"{method}: {{}} minus plain", method, other) for method in METHODS for other in BUDGETS[1:]]
    for title, method, variant in (*of_budgets, ("plain: CalFAT minus FedPGD", "CalFAT", "plain")):
        one, other = (method, variant), (method if variant != "plain" else "FedPGD", "plain")
        if one in here and other in here:
            found = [difference((here[one].values(m) - here[other].values(m)).dropna()) for m in ON_TAIL]
            table.append([title.format(variant), str(found[0].pairs), *(each.text() for each in found)])
    return 1, table


def tested(name: str) -> pages.Table:
    """The planned tests that have values."""
    table = [["comparison", "endpoint", "n", "difference", "p", "p, corrected", "result"]]
    for each in comparisons(ONE_STEP if name == "attacks" else LONG_TAIL):
        table.append([each.cell, TESTED[each.endpoint], *each.row[1:]])
    return 2, table


def draw(path: Path) -> None:
    """Passes against AutoAttack accuracy, a panel a method."""

    def panels(figure: Figure) -> None:
        every = [*rows(ONE_STEP), *shared()]
        for axis, method in zip(figure.subplots(1, 2, sharey=True), METHODS, strict=True):
            of = [row for row in every if row.method == method]
            for row, colour, marker in zip(of, pages.COLOURS, pages.MARKERS, strict=False):
                reached = 100 * row.values("autoattack")
                low, high = student(reached) or (reached.mean(), reached.mean())
                errors = [[reached.mean() - low], [high - reached.mean()]]
                passes = row.values("passes").mean() / 1e6
                axis.errorbar(
                    passes, reached.mean(), errors, color=colour, marker=marker, linestyle="", label=row.variant
                )
            axis.set(title=method, xlabel="passes of training images, millions")
            axis.legend(frameon=False)
        figure.axes[0].set_ylabel("AutoAttack, %")

    pages.svg(panels, path, 9, 4)


TABLES: pages.Tables = {"attacks": attacks, "budgets": budgets, "described": described, "tested": tested}


if __name__ == "__main__":
    pages.write_tables(PAGE, "one-step", TABLES)
    if rows(ONE_STEP):
        draw(FIGURE)
