"""FedAvg: the weighted mean of the clients' models (McMahan et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from calfat_plugin.averaging import weighted_average
from calfat_plugin.entries import AggregatorEntry
from calfat_plugin.interfaces import Aggregate, AggregationTask, Aggregator
from calfat_plugin.options import option
from calfat_plugin.results import LocalUpdate
from calfat_plugin.trainers.fedavg import ENTRY as _STANDARD_FL

Weights = Literal["examples", "uniform"]


@dataclass(frozen=True)
class FedAvgOptions:
    """Options of FedAvg."""

    weights: Weights = option(
        "examples", help="weight of a client: its number of examples (paper), or the same for all (release)"
    )


def client_weights(updates: Mapping[int, LocalUpdate], weights: Weights) -> dict[int, float]:
    """Client id to its share of the average; shares sum to 1."""
    raw = {client: float(update.num_examples) if weights == "examples" else 1.0 for client, update in updates.items()}
    total = sum(raw.values())
    return {client: weight / total for client, weight in raw.items()}


class FedAvg(Aggregator):
    """theta <- sum_i w_i theta_i over parameters and buffers."""

    def __init__(self, options: FedAvgOptions) -> None:
        self.options = options

    def combine(self, task: AggregationTask) -> Aggregate:
        weights = client_weights(task.updates, self.options.weights)
        states = [update.state for update in task.updates.values()]
        return Aggregate(weighted_average(states, list(weights.values())), weights=weights)


ENTRY = AggregatorEntry(
    "fedavg",
    build=FedAvg,
    config=FedAvgOptions,
    summary="weighted mean of the clients' models",
    formula="theta = sum_i w_i theta_i",
    citation=_STANDARD_FL.citation,
)
