"""RFA: the geometric median of the clients' models (Pillutla et al., IEEE Transactions on Signal Processing 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.aggregators.fedavg import FedAvg
from calfat_plugin.aggregators.robust.base import Displacements, WeightedOptions
from calfat_plugin.entries import AggregatorEntry, paper
from calfat_plugin.interfaces import Aggregate, AggregationTask
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GeometricMedianOptions(WeightedOptions):
    """Options of the geometric median."""

    nu: float = option(1e-6, low=0, open_low=True, help="smallest distance that a client is taken to have")
    iterations: int = option(3, low=1, help="steps of Weiszfeld's algorithm, the first from the global model")


class GeometricMedian(FedAvg):
    """theta <- argmin_z sum_i w_i |theta_i - z|, by the smoothed Weiszfeld algorithm (algorithm 2)."""

    options: GeometricMedianOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        moves = Displacements(task)
        weights = self.client_weights(task)
        center: dict[str, Tensor] = {}
        for _ in range(self.options.iterations):
            far = moves.distances(center).clamp(min=self.options.nu).tolist()
            pulls = [weight / distance for weight, distance in zip(weights.values(), far, strict=True)]
            shares = [pull / math.fsum(pulls) for pull in pulls]
            center = moves.mean(shares)
        return moves.moved(center, weights=dict(zip(moves.clients, shares, strict=True)))


ENTRY = AggregatorEntry(
    "geometric_median",
    build=GeometricMedian,
    config=GeometricMedianOptions,
    summary="geometric median of the clients' models, by the smoothed Weiszfeld algorithm (RFA)",
    formula="theta = argmin_z sum_i w_i |theta_i - z|; z = sum_i b_i theta_i / sum_i b_i, b_i = w_i / max(nu, "
    "|theta_i - z|)",
    citation=paper("pillutla2022robust"),
)
