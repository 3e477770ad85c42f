"""Multi-Krum: the mean of the m updates with the best Krum scores (Blanchard et al., NeurIPS 2017, section 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.aggregators.fedavg import FedAvg
from calfat_plugin.aggregators.robust.base import TOLERATED, Bound, Displacements, TolerantOptions, WeightedOptions
from calfat_plugin.aggregators.robust.krum import CITATION, krum_scores
from calfat_plugin.entries import AggregatorEntry
from calfat_plugin.errors import OptionError
from calfat_plugin.interfaces import Aggregate, AggregationTask
from calfat_plugin.options import option

if TYPE_CHECKING:
    from calfat_plugin.recipe.schema import Recipe

_BOUND = Bound("multi-Krum", 2, 3)


@dataclass(frozen=True)
class MultiKrumOptions(TolerantOptions, WeightedOptions):
    """Options of multi-Krum."""

    m: int | None = option(None, low=1, help="how many clients are averaged; null: n - f", unit="clients")


class MultiKrum(FedAvg):
    """theta <- the weighted mean of the m models with the smallest scores; of equal ones the first clients'."""

    options: MultiKrumOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        moves = Displacements(task)
        n, weights = len(moves.clients), self.client_weights(task)
        f = _BOUND.borne(self.options.f, n)
        scores = dict(zip(moves.clients, krum_scores(moves.squared_distances(), f), strict=True))
        best = sorted(scores, key=lambda client: scores[client])[: min(self.options.m or n, n - f)]
        total = math.fsum(weights[client] for client in best)
        shares = {client: weights[client] / total if client in best else 0.0 for client in moves.clients}
        return moves.moved(moves.mean([*shares.values()]), weights=shares, metrics={"tolerated": float(f)})


def _check(options: MultiKrumOptions, recipe: Recipe) -> None:
    _BOUND.check(options, recipe)
    most = recipe.clients_per_round - options.f
    if options.m is not None and options.m > most:
        raise OptionError(
            f"m: got {options.m}, expected at most n - f = {most}, or attackers have to be among them; "
            f"{recipe.clients_per_round} clients train in a round (train_args.client_num_per_round)."
        )


ENTRY = AggregatorEntry(
    "multi_krum",
    build=MultiKrum,
    config=MultiKrumOptions,
    check=_check,
    summary="mean of the m clients' models with the smallest Krum scores",
    formula="theta = sum_i w_i theta_i / sum_i w_i over the m smallest s(i), s(i) as Krum's",
    citation=CITATION,
    metrics=TOLERATED,
)
