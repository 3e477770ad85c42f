"""Planned comparisons: the section ``compare`` of a suite, one row against all others, corrected for their number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from calfat_plugin.maths.intervals import (
    Difference,
    holm,
    is_level,
    paired,
    paired_p_value,
    sign_p_value,
)
from calfat_plugin.suites.schema import Compare
from calfat_plugin.suites.summary import CellSummary, SuiteSummary

SIGNIFICANT = 0.05
AT_EQUAL, COLLAPSED, LEAD = "natural at equal {}", "collapsed", "lead in {}, {} minus {}"
BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Compared:
    """One comparison of the named row with another one.

    Attributes:
        row: the other row.
        endpoint: what is compared: a metric's label, or a name such as ``natural at equal autoattack``.
        difference: the named row minus the other, paired over seeds; None where they share no seed.
        p_value: of the paired test; None where one of the rows has not finished all its seeds.
        adjusted: the same after Holm over the family.
        is_level: whether equivalence was tested and holds.
    """

    row: CellSummary
    endpoint: str
    difference: Difference | None
    p_value: float | None
    adjusted: float | None = None
    is_level: bool = False

    @property
    def word(self) -> str:
        """``clear``, ``level``, ``not clear``, or nothing for a comparison that has not been made."""
        if self.p_value is None:
            return ""
        if self.adjusted is not None and self.adjusted < SIGNIFICANT:
            return "clear"
        return "level" if self.is_level else "not clear"


def comparisons(summary: SuiteSummary) -> Iterator[list[Compared]]:
    """The comparisons of each family, in the order of the table: one family for each label of the other axes.

    A family is corrected for all comparisons that were planned, those included that cannot be made yet. The last list,
    if the suite plans it, has the difference of the leads in two families, which is a test of its own.
    """
    plan = summary.suite.compare
    if plan is None:
        return
    families = _families(summary, plan)
    for rows in families.values():
        yield _family(summary, plan, rows)
    if plan.lead_over is not None:
        yield [_lead(summary, plan, families)]


def _families(summary: SuiteSummary, plan: Compare) -> dict[tuple[str, ...], dict[str, CellSummary]]:
    """Labels of the other axes to label of the compared axis to row."""
    axis = next(index for index, variants in enumerate(summary.suite.axes.values()) if plan.row in variants)
    families: dict[tuple[str, ...], dict[str, CellSummary]] = {}
    for row in summary.cells:
        labels = row.cell.labels
        families.setdefault((*labels[:axis], *labels[axis + 1 :]), {})[labels[axis]] = row
    return families


def _family(summary: SuiteSummary, plan: Compare, rows: Mapping[str, CellSummary]) -> list[Compared]:
    seeds = summary.suite.seeds
    found = [
        compared
        for label, row in rows.items()
        if label not in (plan.row, plan.exchange)
        for compared in _pair(plan, seeds, rows[plan.row], row, rows.get(plan.exchange or ""))
    ]
    adjusted = holm([each.p_value for each in found])
    return [replace(each, adjusted=p_value) for each, p_value in zip(found, adjusted, strict=True)]


def _pair(
    plan: Compare, seeds: Sequence[int], one: CellSummary, other: CellSummary, exchange: CellSummary | None
) -> Iterator[Compared]:
    """All comparisons of two rows of a family."""
    for metric in plan.metrics:
        yield _compared(other, metric, _values(one, metric), _values(other, metric), seeds, plan)
    if exchange is not None:
        gain = dict(_at_equal_robustness(plan, one, other, exchange))
        yield _compared(other, AT_EQUAL.format(plan.robust), gain, dict.fromkeys(gain, 0.0), seeds, plan)
    if plan.collapsed is not None:
        fell = [
            {seed: float(value <= plan.collapsed / 100) for seed, value in _values(row, plan.natural).items()}
            for row in (one, other)
        ]
        pairs = [(fell[0][seed], fell[1][seed]) for seed in fell[0] if seed in fell[1]]
        wins, losses = pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0))
        p_value = sign_p_value(wins, losses) if _all_there(seeds, *fell) else None
        yield Compared(other, COLLAPSED, paired(*fell), p_value)


def _compared(
    other: CellSummary, endpoint: str, one: BySeed, two: BySeed, seeds: Sequence[int], plan: Compare
) -> Compared:
    p_value = paired_p_value(one, two) if _all_there(seeds, one, two) else None
    level = endpoint == plan.robust and plan.level is not None and is_level(one, two, plan.level / 100)
    return Compared(other, endpoint, paired(one, two), p_value, is_level=p_value is not None and level)


def _at_equal_robustness(
    plan: Compare, one: CellSummary, other: CellSummary, exchange: CellSummary
) -> Iterator[tuple[int, float]]:
    """(seed, the natural accuracy that ``one`` has more, at the robustness of ``one``).

    A model can be exchanged for one that answers a random share of the images as ``exchange`` does, whose robustness is
    taken as none: natural accuracy grows by ``rate`` for each point of robustness that is given up. A seed is left out
    where ``other`` has no robustness to exchange.
    """
    natural = [_values(row, plan.natural) for row in (one, other, exchange)]
    robust = [_values(row, plan.robust) for row in (one, other)]
    for seed in natural[0]:
        if all(seed in values for values in (*natural, *robust)) and robust[1][seed]:
            rate = (natural[2][seed] - natural[1][seed]) / robust[1][seed]
            yield seed, natural[0][seed] - natural[1][seed] + rate * (robust[0][seed] - robust[1][seed])


def _lead(
    summary: SuiteSummary, plan: Compare, families: Mapping[tuple[str, ...], Mapping[str, CellSummary]]
) -> Compared:
    """The named row's lead in natural accuracy in the first family minus that in the second, seed by seed."""
    named, rival = plan.row, plan.lead_over or ""

    def lead(rows: Mapping[str, CellSummary]) -> BySeed:
        one, other = (_values(rows[label], plan.natural) for label in (named, rival))
        return {seed: value - other[seed] for seed, value in one.items() if seed in other}

    (first, here), (second, there) = families.items()
    endpoint = LEAD.format(plan.natural, "/".join(first), "/".join(second))
    compared = _compared(here[rival], endpoint, lead(here), lead(there), summary.suite.seeds, plan)
    return replace(compared, adjusted=compared.p_value)


def _values(row: CellSummary, metric: str) -> BySeed:
    """Seed to value; a run that failed counts as 0."""
    failed = {run.run.seed: 0.0 for run in row.runs if run.status == "failed"}
    return failed | row.scores[metric].by_seed


def _all_there(seeds: Sequence[int], *values: BySeed) -> bool:
    return all(seed in of for of in values for seed in seeds)
