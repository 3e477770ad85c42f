"""What the rows of a suite reach for what they cost, and which rows nothing cheaper beats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calfat_plugin.maths.intervals import Score
from calfat_plugin.suites.schema import Front
from calfat_plugin.suites.summary import CellSummary, SuiteSummary


@dataclass(frozen=True)
class Point:
    """A row.

    Attributes:
        curve: its label of the axis that the figure tells apart.
        name: its other labels; empty where there is one axis.
        cost: the mean of the section's metric over finished seeds, or what ``cost_of`` gives.
        reached: the accuracy; of a run that was lost it is 0.
        on_front: whether no row that costs at most as much has a higher mean.
    """

    row: CellSummary
    curve: str
    name: str
    cost: float
    reached: Score
    on_front: bool


def points(summary: SuiteSummary, cost_of: Callable[[CellSummary], float] | None = None) -> list[Point]:
    """The rows that have both, from cheap to dear; none without the section ``front``.

    Args:
        summary: of the suite.
        cost_of: a row's cost in the place of that section's.
    """
    suite, front = summary.suite, summary.suite.front
    if front is None:
        return []
    place = list(suite.axes).index(front.curve)
    found = []
    for row in summary.cells:
        cost = row.scores[front.cost].mean if cost_of is None else cost_of(row)
        reached = Score(row.scores[front.reached].by_seed)
        if cost is not None and reached.mean is not None:
            found.append((cost, reached.mean, row, reached))

    def point(cost: float, mean: float, row: CellSummary, reached: Score) -> Point:
        beaten = any(other <= cost and higher > mean for other, higher, *_ in found)
        labels = row.cell.labels
        name = ", ".join((*labels[:place], *labels[place + 1 :]))
        return Point(row, labels[place], name, cost, reached, not beaten)

    return sorted((point(*each) for each in found), key=lambda each: each.cost)


def as_json(front: Front, headings: Mapping[str, str], of: Sequence[Point]) -> dict[str, Any]:
    """The figure in ``suite.json``, which the page draws."""
    return {
        "cost": headings[front.cost],
        "reached": headings[front.reached],
        "points": [
            {
                "curve": point.curve,
                "name": point.name,
                "cost": point.cost,
                "mean": point.reached.mean,
                "interval": point.reached.interval,
                "on_front": point.on_front,
            }
            for point in of
        ],
    }
