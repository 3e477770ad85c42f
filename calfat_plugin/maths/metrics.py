"""Mean and standard deviation over seeds; a round's losses. Accuracies are fractions in [0, 1], never percent."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple, TypeVar

Client = TypeVar("Client", bound=Hashable)

_IMPLAUSIBLE, _IMPLAUSIBLE_ALONE = 100.0, 1e6


class MeanStd(NamedTuple):
    """Mean over seeds and sample standard deviation; ``std`` is None for a single value."""

    mean: float
    std: float | None


def mean_std(values: Sequence[float]) -> MeanStd:
    """Mean and sample standard deviation (ddof 1, methods.md 12) of at least one value."""
    if not values:
        raise ValueError("no values to average")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return MeanStd(mean, None)
    return MeanStd(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)))


def plausible_losses(losses: Mapping[Client, float]) -> dict[Client, float]:
    """What of a round's training losses, which clients only claim, enters the mean.

    Left out is what is not finite, and what is larger than 100 times the median of the losses' magnitudes (the lower
    one of two; at least 1): honest ones differ less. Where one client alone claims a loss, the bound is 1e6.
    """
    sizes = [abs(loss) for loss in losses.values() if math.isfinite(loss)]
    bound = _IMPLAUSIBLE * max(1.0, median_low(sizes)) if len(sizes) > 1 else _IMPLAUSIBLE_ALONE
    return {client: loss for client, loss in losses.items() if abs(loss) <= bound}
