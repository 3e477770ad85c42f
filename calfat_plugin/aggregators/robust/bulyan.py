"""Bulyan: iterated Krum, then a mean around the median of each coordinate (El Mhamdi et al., ICML 2018, section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calfat_plugin.aggregators.robust.base import TOLERATED, Bound, Displacements, TolerantOptions
from calfat_plugin.aggregators.robust.krum import krum_scores
from calfat_plugin.entries import AggregatorEntry, paper
from calfat_plugin.interfaces import Aggregate, AggregationTask, Aggregator
from calfat_plugin.maths.averaging import median_of

if TYPE_CHECKING:
    from torch import Tensor

_BOUND = Bound("Bulyan", 4, 3)


def chosen_by_krum(squared: Tensor, f: int) -> list[int]:
    """The n - 2f that Krum chooses one after the other, each from those that are left, by (n, n) distances."""
    left = list(range(len(squared)))
    chosen: list[int] = []
    while len(chosen) < len(squared) - 2 * f:
        scores = krum_scores(squared[left][:, left], f)
        chosen.append(left.pop(scores.index(min(scores))))
    return sorted(chosen)


def mean_around_median(rows: Tensor, count: int) -> Tensor:
    """The mean of the ``count`` values of each coordinate nearest to its median: (n, values) to (values,)."""
    middle = median_of(rows)
    nearest = (rows - middle).abs().sort(dim=0, stable=True).indices[:count]
    return rows.gather(0, nearest).mean(0)


class Bulyan(Aggregator):
    """theta[k] <- the mean of the n - 4f values nearest to the median of theta_i[k], i over Krum's n - 2f choices."""

    options: TolerantOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        moves = Displacements(task)
        n = len(moves.clients)
        f = _BOUND.borne(self.options.f, n)
        chosen = chosen_by_krum(moves.squared_distances(), f)
        by = moves.each(lambda rows: mean_around_median(rows[chosen], n - 4 * f))
        return moves.moved(by, metrics={"tolerated": float(f)})


ENTRY = AggregatorEntry(
    "bulyan",
    build=Bulyan,
    config=TolerantOptions,
    check=_BOUND.check,
    summary="mean around the median of n - 2f clients that Krum chooses; examples do not count",
    formula="theta[k] = mean of the n - 4f values nearest to med theta_i[k], i chosen by iterated Krum",
    citation=paper("elmhamdi2018hidden"),
    metrics=TOLERATED,
)
