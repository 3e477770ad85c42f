"""Norm clipping: no update counts for more than a bound (Sun et al., 2019, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

from calfat_plugin.aggregators.fedavg import FedAvg
from calfat_plugin.aggregators.robust.base import CLIPPED, Displacements, WeightedOptions, clip_factors
from calfat_plugin.entries import AggregatorEntry, paper
from calfat_plugin.interfaces import Aggregate, AggregationTask
from calfat_plugin.options import option


@dataclass(frozen=True)
class NormClippingOptions(WeightedOptions):
    """Options of norm clipping."""

    bound: float | None = option(
        None, low=0, open_low=True, help="largest norm of an update; null: the median norm of the round's updates"
    )


class NormClipping(FedAvg):
    """theta <- theta + sum_i w_i d_i min(1, bound / |d_i|), d_i = theta_i - theta."""

    options: NormClippingOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        moves, weights = Displacements(task), self.client_weights(task)
        factors = clip_factors(moves.distances({}), self.options.bound).tolist()
        shares = [weight * factor for weight, factor in zip(weights.values(), factors, strict=True)]
        clipped = float(sum(factor < 1 for factor in factors))
        return moves.moved(moves.mean(shares), weights=weights, metrics={"clipped": clipped})


ENTRY = AggregatorEntry(
    "norm_clipping",
    build=NormClipping,
    config=NormClippingOptions,
    summary="mean of the updates, none longer than a bound",
    formula="theta = theta + sum_i w_i d_i min(1, bound / |d_i|), d_i = theta_i - theta",
    citation=paper("sun2019can"),
    metrics=CLIPPED,
)
