"""What ``calfat per-class`` found, as tables and charts (methods.md 12.1: Table 4, figures 3 and 5 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calfat_plugin.report.bars import PerClass, per_class, spread_sentence
from calfat_plugin.report.canvas import render
from calfat_plugin.report.numbers import bare_percent
from calfat_plugin.report.reading import NATURAL
from calfat_plugin.report.words import listing

_MANY_CLASSES = 24


def per_class_view(content: Mapping[str, Any], figures: Path) -> dict[str, Any] | None:
    """What the page shows of ``per_class.json``; None where the protocol has not been run."""
    if not content:
        return None
    methods: Mapping[str, Sequence[Mapping[str, Any]]] = content["methods"]
    classes = [str(name) for name in content["class_names"]]
    shown = len(classes) if len(classes) <= _MANY_CLASSES else 0  # columns of classes, while they fit on a page
    drawn, tables = [], []
    for label in map(str, content["evaluators"]):
        title = "Natural accuracy" if label == NATURAL else f"Accuracy under {label}"
        found = {method: [client[label] for client in clients] for method, clients in methods.items()}
        means = {method: [mean_of(column) for column in zip(*rows, strict=True)] for method, rows in found.items()}
        caption = spread_sentence(means, classes)
        chart = per_class(f"clients_{label}", f"{title} per class, mean over clients", caption, means, classes)
        drawn.append(render(chart, figures))
        blocks = []
        for index, client in enumerate(next(iter(methods.values()))):
            rows = [_row(method, of[index], shown) for method, of in found.items()]
            blocks.append({"whose": f"client {client['client']}", "rows": rows})
        blocks.append({"whose": "mean", "rows": [_row(method, mean, shown) for method, mean in means.items()]})
        tables.append({"title": title, "blocks": blocks})
    return {
        "checkpoint": content["checkpoint"],
        "round": content["round"],
        "methods": listing(list(methods)),
        "classes": classes[:shown],
        "figures": drawn,
        "tables": tables,
    }


def mean_of(fractions: PerClass) -> float | None:
    """Unweighted mean over classes that have examples."""
    known = [value for value in fractions if value is not None]
    return sum(known) / len(known) if known else None


def _row(method: str, fractions: PerClass, shown: int) -> dict[str, Any]:
    """A method's accuracies: (number, strength of its tint in percent) for each class, and their mean."""
    cells = [(bare_percent(value, 1), f"{38 * (value or 0.0):.0f}") for value in fractions[:shown]]
    return {"method": method, "cells": cells, "mean": bare_percent(mean_of(fractions))}
