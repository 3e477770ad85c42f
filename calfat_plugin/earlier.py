"""Files of versions that counted as the CalFAT release does, read as today's (docs/run_directory.md, Format 1).

There, ``accuracy`` was the share that is right on the adversarial image, whatever the clean one, and ``_strict`` marked
the share that is right on both. Today the latter has no suffix, and the former has ``_release``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RELEASE = "_release"
WORST = ("_worst_class", "_worst_clients")
_STRICT = "_strict"
_NUMBERS = ("accuracy", "per_class")


def evaluation_as_today(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """An entry of a results file. Its worst class and clients, which are of the other count, go."""
    if _NUMBERS[0] + _STRICT not in row:
        return row
    gone = {"worst_class", "worst_clients", *(name + _STRICT for name in _NUMBERS)}
    renamed = {name: row.get(name + _STRICT) for name in _NUMBERS}
    renamed |= {name + RELEASE: row.get(name) for name in _NUMBERS}
    return {key: value for key, value in {**row, **renamed}.items() if key not in gone and value is not None}


def round_as_today(row: Mapping[str, str]) -> dict[str, str]:
    """A row of ``rounds.csv``. Where both counts agree, they are of the same images, and so are the worst of them."""
    labels = [column.removesuffix(_STRICT) for column in row if column.endswith(_STRICT)]
    labels = [label for label in labels if label in row and label + RELEASE not in row]
    changed = dict(row)
    for label in labels:
        changed[label + _STRICT], changed[label] = row[label], row[label + _STRICT]
        if row[label] != row[label + _STRICT]:
            changed |= {label + suffix: "" for suffix in WORST if label + suffix in row}
    names = {label + _STRICT: label + RELEASE for label in labels}
    return {names.get(column, column): value for column, value in changed.items()}


def best_as_today(
    best: Mapping[str, Mapping[str, Any]], rounds: Sequence[Mapping[str, str]]
) -> dict[str, Mapping[str, Any]]:
    """Notes on the best rounds, each with the accuracy that its row has.

    Args:
        best: name of a checkpoint to ``round``, ``evaluator`` and ``accuracy``.
        rounds: all rows of ``rounds.csv``, as :func:`round_as_today` gives them.
    """
    accuracies = {int(row["round"]): row for row in rounds}

    def noted(facts: Mapping[str, Any]) -> Mapping[str, Any]:
        found = accuracies.get(facts.get("round", 0), {}).get(str(facts.get("evaluator")))
        return {**facts, "accuracy": float(found)} if found else facts

    return {name: noted(facts) for name, facts in best.items()}
