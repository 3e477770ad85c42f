"""The accuracy of a model on its worst class, on rare classes, and on the clients that it serves worst."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORST_SHARE = 10  # percent of the clients


@dataclass(frozen=True)
class Worst:
    """The accuracy of those that a model serves worst: a class, or clients."""

    accuracy: float  # a fraction in [0, 1]; of several clients their mean
    ids: tuple[int, ...]  # worst first


def worst_class(per_class: Sequence[float | None]) -> Worst | None:
    """The class with the lowest accuracy, of equals the first; classes without examples have None."""
    known = [(accuracy, label) for label, accuracy in enumerate(per_class) if accuracy is not None]
    return Worst(min(known)[0], (min(known)[1],)) if known else None


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
    ends = [size * end + min(end, larger) for end in range(4)]
    found: list[Worst | None] = []
    for start, end in itertools.pairwise(ends):
        ids = tuple(label for label in order[start:end] if per_class[label] is not None)
        known = [accuracy for label in ids if (accuracy := per_class[label]) is not None]
        found.append(Worst(math.fsum(known) / len(known), ids) if known else None)
    return tuple(found)


def honest_counts(class_counts: Sequence[Sequence[int]], attackers: Sequence[int]) -> list[list[int]]:
    """Training examples, a row a client, without those of attackers, whom nobody means to serve: they have zeros."""
    return [[0] * len(row) if client in attackers else list(row) for client, row in enumerate(class_counts)]


def worst_clients(per_class: Sequence[float | None], class_counts: Sequence[Sequence[int]]) -> Worst | None:
    """The worst 10 % of the clients (a row of training examples each); None: too little is known of them."""
    if any(len(counts) != len(per_class) for counts in class_counts):
        return None
    found = {client: client_accuracy(per_class, counts) for client, counts in enumerate(class_counts)}
    return worst_of({client: accuracy for client, accuracy in found.items() if accuracy is not None})


def client_accuracy(per_class: Sequence[float | None], counts: Sequence[int]) -> float | None:
    """A client's accuracy: the test split's, its classes weighted as among its training examples; None: unknown."""
    known = [(count, accuracy) for count, accuracy in zip(counts, per_class, strict=True) if accuracy is not None]
    total = sum(count for count, _ in known)
    return math.fsum(count * accuracy for count, accuracy in known) / total if total else None


def worst_of(accuracies: Mapping[int, float]) -> Worst | None:
    """The worst 10 % of these clients, at least one: the mean of their accuracies; None where there are none."""
    worst = sorted((accuracy, client) for client, accuracy in accuracies.items())
    worst = worst[: math.ceil(len(worst) * WORST_SHARE / 100)]
    if not worst:
        return None
    return Worst(math.fsum(accuracy for accuracy, _ in worst) / len(worst), tuple(client for _, client in worst))
