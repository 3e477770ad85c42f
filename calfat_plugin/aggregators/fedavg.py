"""FedAvg: the weighted mean of the clients' models (McMahan et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from calfat_plugin.entries import AggregatorEntry, paper
from calfat_plugin.interfaces import Aggregate, AggregationTask, Aggregator
from calfat_plugin.maths.averaging import weighted_average
from calfat_plugin.options import option

Weights = Literal["examples", "uniform"]


@dataclass(frozen=True)
class FedAvgOptions:
    """Options of FedAvg, and of every aggregator that averages."""

    weights: Weights = option(
        "examples", help="weight of a client: its number of examples (paper), or the same for all (release)"
    )


def client_shares(task: AggregationTask, weights: Weights) -> dict[int, float]:
    """Client id to its share of an average; shares sum to 1."""
    if weights == "uniform":
        amounts = dict.fromkeys(task.updates, 1.0)
    else:
        amounts = {client: float(update.num_examples) for client, update in task.updates.items()}
    total = sum(amounts.values())
    return {client: amount / total for client, amount in amounts.items()}


class FedAvg(Aggregator):
    """theta <- sum_i w_i theta_i over parameters and buffers."""

    options: Any  # with ``weights``, as :class:`FedAvgOptions`

    def client_weights(self, task: AggregationTask) -> Mapping[int, float]:
        """Client id to its share of the average; shares sum to 1."""
        return client_shares(task, self.options.weights)

    def combine(self, task: AggregationTask) -> Aggregate:
        weights = self.client_weights(task)
        states = [update.state for update in task.updates.values()]
        return Aggregate(weighted_average(states, list(weights.values())), weights=weights)


ENTRY = AggregatorEntry(
    "fedavg",
    build=FedAvg,
    config=FedAvgOptions,
    summary="weighted mean of the clients' models",
    formula="theta = sum_i w_i theta_i",
    citation=paper("mcmahan2017communication"),
)
