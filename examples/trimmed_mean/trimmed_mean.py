"""Coordinate-wise trimmed mean and median of the clients' models (Yin et al., ICML 2018)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from calfat_plugin import Aggregate, AggregationTask, Aggregator, AggregatorEntry, Citation, NoOptions, hookimpl, option

YIN = Citation(
    "Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018",
    """@inproceedings{yin2018byzantine,
  title     = {Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates},
  author    = {Yin, Dong and Chen, Yudong and Ramchandran, Kannan and Bartlett, Peter},
  booktitle = {International Conference on Machine Learning},
  year      = {2018}
}""",
)


@dataclass(frozen=True)
class TrimmedMeanOptions:
    """The constant of the trimmed mean."""

    beta: float = option(0.2, low=0, high=0.499, help="share of the clients whose values are left out at each end")


class TrimmedMean(Aggregator):
    """theta_k <- mean of the clients' theta_k without the floor(beta m) largest and smallest of the m values."""

    def __init__(self, options: TrimmedMeanOptions) -> None:
        self.options = options

    def left_out(self, count: int) -> int:
        """How many of ``count`` values are left out at each end."""
        return math.floor(self.options.beta * count)

    def combine(self, task: AggregationTask) -> Aggregate:
        import torch  # here: listing plugins imports no torch

        states = [update.state for update in task.updates.values()]
        cut = self.left_out(len(states))
        kept = slice(cut, len(states) - cut)
        combined = {}
        for name, old in task.global_state.items():
            values = torch.stack([state[name] for state in states]).sort(dim=0).values
            combined[name] = values[kept].double().mean(dim=0).to(old.dtype)
        return Aggregate(combined)


class Median(TrimmedMean):
    """theta_k <- median of the clients' theta_k: all but the middle value, or the middle two, are left out."""

    def left_out(self, count: int) -> int:
        return (count - 1) // 2


@hookimpl
def calfat_aggregators() -> Iterable[AggregatorEntry]:
    yield AggregatorEntry(
        "trimmed-mean",
        build=TrimmedMean,
        config=TrimmedMeanOptions,
        summary="mean of each coordinate without its largest and smallest values",
        formula="theta_k <- mean of the values between the beta and the 1 - beta quantile",
        citation=YIN,
    )
    yield AggregatorEntry(
        "median",
        build=Median,
        config=NoOptions,
        summary="median of each coordinate",
        formula="theta_k <- med_i theta_ik",
        citation=YIN,
    )
