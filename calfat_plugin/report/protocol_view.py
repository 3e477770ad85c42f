"""What ``calfat per-class`` found, as a table and a chart (methods.md 12.1: Table 4, figures 3 and 5 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calfat_plugin.report.bars import per_class, spread_sentence
from calfat_plugin.report.canvas import render
from calfat_plugin.report.markup import Markup, element, joined, section, table
from calfat_plugin.report.reading import NATURAL
from calfat_plugin.report.words import bare_percent, listing

_MANY_CLASSES = 24


def per_class_section(content: Mapping[str, Any], figures: Path) -> Markup:
    """The part of the page; empty where the protocol has not been run."""
    if not content:
        return Markup()
    methods: Mapping[str, Sequence[Mapping[str, Any]]] = content["methods"]
    classes = [str(name) for name in content["class_names"]]
    labels = [str(label) for label in content["evaluators"]]
    charts = []
    for label in labels:
        means = {method: _mean([client[label] for client in clients]) for method, clients in methods.items()}
        chart = per_class(
            f"clients_{label}",
            f"{'Natural accuracy' if label == NATURAL else f'Accuracy under {label}'} per class, mean over clients",
            spread_sentence(means, classes),
            means,
            classes,
        )
        charts.append(render(chart, figures))
    return section(
        "per-class",
        "Clients, class by class",
        element(
            "p",
            f"From the global model of checkpoint {content['checkpoint']} (round {content['round']}), every client "
            f"trained one local epoch with {listing(list(methods))}, without aggregation; each local model is measured "
            "on the whole test split. Accuracies in percent; the last column is the unweighted mean over classes.",
        ),
        element("div", *charts, class_="figures"),
        *(_table(label, methods, classes) for label in labels),
    )


def _table(label: str, methods: Mapping[str, Sequence[Mapping[str, Any]]], classes: Sequence[str]) -> Markup:
    """A row a client and method; columns for the classes while they fit on a page."""
    shown = list(classes) if len(classes) <= _MANY_CLASSES else []
    rows, row_classes = [], []
    clients = max(len(found) for found in methods.values())
    for client in range(clients):
        for index, (method, found) in enumerate(methods.items()):
            fractions = found[client][label]
            cells = [_shaded(value) for value in fractions[: len(shown)]]
            rows.append([_whose(f"client {found[client]['client']}", method), *cells, _mean_cell(fractions)])
            row_classes.append("apart" if index == 0 and client else "")
    for index, (method, found) in enumerate(methods.items()):
        fractions = _mean([client[label] for client in found])
        cells = [_shaded(value) for value in fractions[: len(shown)]]
        rows.append([_whose("mean", method), *cells, _mean_cell(fractions)])
        row_classes.append("mean apart" if index == 0 else "mean")
    title = "Natural accuracy" if label == NATURAL else f"Accuracy under {label}"
    return joined(
        [
            element("h3", f"{title} of each client's model"),
            table(["client, method", *shown, "mean"], rows, caption=title, row_classes=row_classes),
        ]
    )


def _whose(client: str, method: str) -> Markup:
    """A row's heading, on one line: it stays in sight while the row scrolls."""
    return element("span", f"{client} ", element("span", method, class_="who"), class_="one-line")


def _mean_cell(fractions: Sequence[float | None]) -> str:
    return bare_percent(mean_of(fractions), 2)


def _shaded(value: float | None) -> Markup:
    """A number on a tint that grows with it."""
    share = 0.0 if value is None else 38 * value
    tint = f"background: color-mix(in srgb, var(--series-0) {share:.0f}%, transparent)"
    return element("span", bare_percent(value), class_="shade", style=tint)


def mean_of(fractions: Sequence[float | None]) -> float | None:
    """Unweighted mean over classes that have examples."""
    known = [value for value in fractions if value is not None]
    return sum(known) / len(known) if known else None


def _mean(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Mean over clients of each class."""
    return [mean_of(column) for column in zip(*rows, strict=True)]
