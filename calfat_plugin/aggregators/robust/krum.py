"""Krum: the one update that is nearest to most others (Blanchard et al., NeurIPS 2017, section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calfat_plugin.aggregators.robust.base import TOLERATED, Bound, Displacements, TolerantOptions
from calfat_plugin.entries import AggregatorEntry, paper
from calfat_plugin.interfaces import Aggregate, AggregationTask, Aggregator

if TYPE_CHECKING:
    from torch import Tensor

CITATION = paper("blanchard2017machine")
BOUND = Bound("Krum", 2, 3)


def krum_scores(squared: Tensor, f: int) -> list[float]:
    """s(i): the sum of client i's ``squared`` distances, (n, n), to the n - f - 2 nearest others, at least one."""
    others = squared.sort(1).values[:, 1:]  # the first is the distance to itself
    scores: list[float] = others[:, : max(1, len(squared) - f - 2)].sum(1).tolist()
    return scores


class Krum(Aggregator):
    """theta <- theta_i of the smallest score; of equal ones the first client's."""

    options: TolerantOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        moves = Displacements(task)
        f = BOUND.borne(self.options.f, len(moves.clients))
        scores = krum_scores(moves.squared_distances(), f)
        chosen = scores.index(min(scores))
        metrics = {"tolerated": float(f), "selected": float(moves.clients[chosen])}
        own = moves.each(lambda rows: rows[chosen].clone())  # a view would keep the rows of all clients
        return moves.moved(own, metrics=metrics)


ENTRY = AggregatorEntry(
    "krum",
    build=Krum,
    config=TolerantOptions,
    check=BOUND.check,
    summary="the one client's model that is nearest to its n - f - 2 nearest others; examples do not count",
    formula="theta = theta_i of the smallest s(i), s(i) = sum over the n - f - 2 nearest j of |theta_i - theta_j|^2",
    citation=CITATION,
    metrics={**TOLERATED, "selected": "id of the client whose model it is"},
)
