"""FedAvg: the weighted mean of the clients' models (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from calfat_plugin.aggregators.weights import WeightOptions, client_weights
from calfat_plugin.entries import AggregatorEntry
from calfat_plugin.interfaces import Aggregate, AggregationTask, Aggregator
from calfat_plugin.maths.averaging import weighted_average
from calfat_plugin.trainers.fedavg import ENTRY as _STANDARD_FL


@dataclass(frozen=True)
class FedAvgOptions(WeightOptions):
    """Options of FedAvg."""


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
