"""Coordinate-wise trimmed mean of the clients' models (Yin et al., ICML 2018, definition 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calfat_plugin.aggregators.robust.base import TOLERATED, Bound, Displacements, TolerantOptions
from calfat_plugin.aggregators.robust.median import CITATION
from calfat_plugin.entries import AggregatorEntry
from calfat_plugin.interfaces import Aggregate, AggregationTask, Aggregator
from calfat_plugin.maths.averaging import sorted_values

if TYPE_CHECKING:
    from torch import Tensor

_BOUND = Bound("the trimmed mean", 2, 1)


class TrimmedMean(Aggregator):
    """theta[k] <- the mean of theta_i[k] without the f largest and the f smallest (the paper's beta is f / n)."""

    options: TolerantOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        moves = Displacements(task)
        f = _BOUND.borne(self.options.f, len(moves.clients))

        def trimmed(rows: Tensor) -> Tensor:
            return sorted_values(rows)[f : len(rows) - f].mean(0)

        return moves.moved(moves.each(trimmed), trimmed, metrics={"tolerated": float(f)})


ENTRY = AggregatorEntry(
    "trimmed_mean",
    build=TrimmedMean,
    config=TolerantOptions,
    check=_BOUND.check,
    summary="coordinate-wise mean without the f largest and f smallest values; every client counts the same",
    formula="theta[k] = 1 / (n - 2f) sum of the theta_i[k] but the f largest and the f smallest",
    citation=CITATION,
    metrics=TOLERATED,
)
