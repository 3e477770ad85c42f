"""Numbers about runs: means over seeds, a round's losses, and the accuracy of those that a model serves worst.

Accuracies are fractions in [0, 1], never percent.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple, TypeVar

from calfat_plugin.typed_json import Count, Share

Client = TypeVar("Client", bound=Hashable)

_IMPLAUSIBLE = 100.0  # times the median of a round's losses
_IMPLAUSIBLE_ALONE = 1e6  # of a loss that no other can be compared with


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
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return MeanStd(mean, math.sqrt(variance))


def plausible_losses(losses: Mapping[Client, float]) -> dict[Client, float]:
    """Those of a round's training losses, which clients only claim, that enter the mean.

    A loss is left out if it is not finite, or larger than 100 times the median of the losses' magnitudes (the lower one
    of two; at least 1): honest losses differ less. Where one client alone claims a loss, the bound is 1e6.
    """
    sizes = [abs(loss) for loss in losses.values() if math.isfinite(loss)]
    bound = _IMPLAUSIBLE_ALONE
    if len(sizes) > 1:
        bound = _IMPLAUSIBLE * max(1.0, median_low(sizes))
    return {client: loss for client, loss in losses.items() if abs(loss) <= bound}


# --- the worst class, rare classes, and the worst clients ------------------------------------------------------------

WORST_SHARE = 10  # percent of the clients


@dataclass(frozen=True)
class Worst:
    """The accuracy of those that a model serves worst: a class, or clients."""

    accuracy: Share  # of several clients their mean
    ids: tuple[Count, ...]  # worst first


def worst_class(per_class: Sequence[float | None]) -> Worst | None:
    """The class with the lowest accuracy, of equals the first; classes without examples have None."""
    worst = None
    for label, accuracy in enumerate(per_class):
        if accuracy is not None and (worst is None or accuracy < worst.accuracy):
            worst = Worst(accuracy, (label,))
    return worst


def by_frequency(per_class: Sequence[float | None], class_counts: Sequence[Sequence[int]]) -> tuple[Worst | None, ...]:
    """Head, middle and tail: the classes by their training examples over all clients, most first, in three groups.

    The groups are as equal in size as can be, earlier ones larger (10 classes: 4, 3, 3), of equals the first class goes
    first. Each has the mean accuracy of its classes; None: nothing is known of them.
    """
    if not class_counts or any(len(counts) != len(per_class) for counts in class_counts):
        return None, None, None
    totals = [sum(column) for column in zip(*class_counts, strict=True)]
    order = sorted(range(len(totals)), key=lambda label: (-totals[label], label))
    size, larger = divmod(len(order), 3)
    groups: list[Worst | None] = []
    start = 0
    for group in range(3):
        end = start + size
        if group < larger:
            end += 1
        known = {}
        for label in order[start:end]:
            accuracy = per_class[label]
            if accuracy is not None:
                known[label] = accuracy
        start = end
        if known:
            groups.append(Worst(math.fsum(known.values()) / len(known), tuple(known)))
        else:
            groups.append(None)
    return tuple(groups)


def honest_counts(class_counts: Sequence[Sequence[int]], attackers: Sequence[int]) -> list[list[int]]:
    """Training examples, a row a client; an attacker's row is zeros, for no accuracy of attackers is measured."""
    counts = []
    for client, row in enumerate(class_counts):
        if client in attackers:
            counts.append([0] * len(row))
        else:
            counts.append(list(row))
    return counts


def worst_clients(per_class: Sequence[float | None], class_counts: Sequence[Sequence[int]]) -> Worst | None:
    """The worst 10 % of the clients (a row of training examples each); None: too little is known of them."""
    if any(len(counts) != len(per_class) for counts in class_counts):
        return None
    accuracies = {}
    for client, counts in enumerate(class_counts):
        accuracy = client_accuracy(per_class, counts)
        if accuracy is not None:
            accuracies[client] = accuracy
    return worst_of(accuracies)


def client_accuracy(per_class: Sequence[float | None], counts: Sequence[int]) -> float | None:
    """A client's accuracy: the test split's, its classes weighted as among its training examples; None: unknown."""
    total = 0
    correct = []
    for count, accuracy in zip(counts, per_class, strict=True):
        if accuracy is not None:
            total += count
            correct.append(count * accuracy)
    if total == 0:
        return None
    return math.fsum(correct) / total


def worst_of(accuracies: Mapping[int, float]) -> Worst | None:
    """The worst 10 % of these clients, at least one: the mean of their accuracies; None where there are none."""
    if not accuracies:
        return None
    worst_first = sorted(accuracies, key=lambda client: (accuracies[client], client))
    worst = worst_first[: math.ceil(len(worst_first) * WORST_SHARE / 100)]
    return Worst(math.fsum(accuracies[client] for client in worst) / len(worst), tuple(worst))
