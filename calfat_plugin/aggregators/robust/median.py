"""Coordinate-wise median of the clients' models (Yin et al., ICML 2018, definition 1)."""

from __future__ import annotations

from calfat_plugin.aggregators.robust.base import Displacements
from calfat_plugin.entries import AggregatorEntry, Citation
from calfat_plugin.interfaces import Aggregate, AggregationTask, Aggregator
from calfat_plugin.maths.averaging import median_of

CITATION = Citation(
    "Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018",
    """@inproceedings{yin2018byzantine,
  title     = {{Byzantine}-Robust Distributed Learning: Towards Optimal Statistical Rates},
  author    = {Yin, Dong and Chen, Yudong and Ramchandran, Kannan and Bartlett, Peter},
  booktitle = {International Conference on Machine Learning},
  year      = {2018}
}""",
)


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
