"""Coordinate-wise median of the clients' models (Yin et al., ICML 2018, definition 1)."""

from __future__ import annotations

from calfat_plugin.aggregators.robust.base import Displacements
from calfat_plugin.entries import AggregatorEntry, paper
from calfat_plugin.interfaces import Aggregate, AggregationTask, Aggregator
from calfat_plugin.maths.averaging import median_of

CITATION = paper("yin2018byzantine")


class Median(Aggregator):
    """theta[k] <- med_i theta_i[k]; of an even number of clients the mean of the middle two."""

    def combine(self, task: AggregationTask) -> Aggregate:
        moves = Displacements(task)
        return moves.moved(moves.each(median_of))


ENTRY = AggregatorEntry(
    "median",
    build=Median,
    summary="coordinate-wise median of the clients' models; every client counts the same",
    formula="theta[k] = med_i theta_i[k]",
    citation=CITATION,
)
