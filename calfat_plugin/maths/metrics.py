"""Mean and standard deviation over seeds. Accuracies are fractions in [0, 1], never percent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class MeanStd(NamedTuple):
    """Mean over seeds and sample standard deviation; ``std`` is None for a single value."""

    mean: float
    std: float | None


def mean_std(values: Sequence[float]) -> MeanStd:
    """Mean and sample standard deviation (ddof 1, methods.md 12) of at least one value.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values to average")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return MeanStd(mean, None)
    return MeanStd(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)))
