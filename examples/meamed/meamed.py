"""Mean around the median of the clients' models (Xie et al., Generalized Byzantine-tolerant SGD, 2018)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from calfat_plugin import Aggregate, AggregationTask, Aggregator, AggregatorEntry, Citation, hookimpl, option

XIE = Citation(
    "Xie et al., Generalized Byzantine-tolerant SGD, arXiv:1802.10116, 2018",
    """@article{xie2018generalized,
  title   = {Generalized Byzantine-tolerant {SGD}},
  author  = {Xie, Cong and Koyejo, Oluwasanmi and Gupta, Indranil},
  journal = {arXiv preprint arXiv:1802.10116},
  year    = {2018}
}""",
)


@dataclass(frozen=True)
class MeanAroundMedianOptions:
    """The constant of the mean around the median."""

    beta: float = option(0.2, low=0, high=0.499, help="share of the clients whose values are left out")


class MeanAroundMedian(Aggregator):
    """theta_k <- mean of the m - floor(beta m) of the clients' m values theta_k that are nearest to their median."""

    def __init__(self, options: MeanAroundMedianOptions) -> None:
        self.options = options

    def combine(self, task: AggregationTask) -> Aggregate:
        import torch  # here: listing plugins imports no torch

        states = [update.state for update in task.updates.values()]
        kept = len(states) - math.floor(self.options.beta * len(states))
        combined = {}
        for name, old in task.global_state.items():
            values = torch.stack([state[name].double() for state in states])
            distances = (values - values.quantile(0.5, dim=0)).abs()
            nearest = distances.sort(dim=0, stable=True).indices[:kept]
            combined[name] = values.gather(0, nearest).mean(dim=0).to(old.dtype)
        return Aggregate(combined)


@hookimpl
def calfat_aggregators() -> Iterable[AggregatorEntry]:
    yield AggregatorEntry(
        "meamed",
        build=MeanAroundMedian,
        config=MeanAroundMedianOptions,
        summary="mean of each coordinate's values nearest to their median",
        formula="theta_k <- mean of the m - floor(beta m) values nearest to med_i theta_ik",
        citation=XIE,
    )
