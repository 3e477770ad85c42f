"""Centered clipping: updates are clipped around last round's aggregate (Karimireddy et al., ICML 2021, algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

from calfat_plugin.aggregators.fedavg import FedAvg
from calfat_plugin.aggregators.robust.base import CLIPPED, Displacements, WeightedOptions, clip_factors
from calfat_plugin.entries import AggregatorEntry, paper
from calfat_plugin.interfaces import Aggregate, AggregationTask
from calfat_plugin.maths.averaging import weighted_sum
from calfat_plugin.options import option

_CENTER = "centered_clipping/center/"


@dataclass(frozen=True)
class CenteredClippingOptions(WeightedOptions):
    """Options of centered clipping."""

    radius: float | None = option(
        None,
        low=0,
        open_low=True,
        help="how far from the centre an update counts in full; null: the median distance of the round's clients",
    )
    iterations: int = option(1, low=1, help="clipped means a round, each around the one before")


class CenteredClipping(FedAvg):
    """v <- v + sum_i w_i (d_i - v) min(1, radius / |d_i - v|), d_i = theta_i - theta; theta <- theta + v.

    v starts each round as the last round's, and the first one at zero.
    """

    options: CenteredClippingOptions

    def combine(self, task: AggregationTask) -> Aggregate:
        moves, weights = Displacements(task), self.client_weights(task)
        kept = {name: task.server_state.get(_CENTER + name) for name in task.parameter_names}
        center = {name: tensor.double().flatten() for name, tensor in kept.items() if tensor is not None}
        for _ in range(self.options.iterations):
            factors = clip_factors(moves.distances(center), self.options.radius).tolist()
            shares = [weight * factor for weight, factor in zip(weights.values(), factors, strict=True)]
            stays = 1.0 - sum(shares)  # v + sum_i s_i (d_i - v) = (1 - sum_i s_i) v + sum_i s_i d_i
            mean = moves.mean(shares)
            center = {
                name: weighted_sum([center[name], step], [stays, 1.0]) if name in center else step
                for name, step in mean.items()
            }
        start = task.global_state
        return moves.moved(
            center,
            server_state={
                _CENTER + name: step.reshape(start[name].shape).to(start[name].dtype) for name, step in center.items()
            },
            weights=weights,
            metrics={"clipped": float(sum(factor < 1 for factor in factors))},
        )


ENTRY = AggregatorEntry(
    "centered_clipping",
    build=CenteredClipping,
    config=CenteredClippingOptions,
    summary="mean of the updates, each clipped around the last round's aggregate",
    formula="v = v + sum_i w_i (d_i - v) min(1, radius / |d_i - v|), theta = theta + v, d_i = theta_i - theta",
    citation=paper("karimireddy2021learning"),
    metrics=CLIPPED,
)
