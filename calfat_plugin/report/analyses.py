"""What ``calfat attack``, ``calfat per-class`` and ``calfat report --tsne`` found, as tables and charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from calfat_plugin.exact import parse_number
from calfat_plugin.maths.intervals import of_accuracy
from calfat_plugin.report import labels, theme
from calfat_plugin.report.charts import Chart, PerClass, legend_name, per_class, render, spread_sentence
from calfat_plugin.report.numbers import NOTHING, bare_percent, interval
from calfat_plugin.report.reading import NATURAL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LEVEL_TICKS = 7
_MANY_CLASSES = 24


# --- calfat attack: accuracy over eps ---------------------------------------------------------------------------------


def attacks_view(attacks: Mapping[str, Mapping[str, Any]], figures: Path) -> list[dict[str, Any]]:
    """What the page shows of each results file.

    Args:
        attacks: file name to content of ``attacks/*.json``.
        figures: an existing folder, for those with several eps.
    """
    shown = []
    for name, content in attacks.items():
        evaluations: Sequence[Mapping[str, Any]] = content.get("evaluations") or ()
        chart = eps_chart(f"attacks_{Path(name).stem}", evaluations, name)
        shown.append(
            {
                "name": name,
                "checkpoint": Path(str(content.get("checkpoint"))).stem,
                "round": content.get("round"),
                "selected_on": content.get("selected_on"),
                "rows": list(map(evaluation_row, evaluations)),
                "figures": [render(chart, figures)] if chart else [],
            }
        )
    return shown


def evaluation_row(evaluation: Mapping[str, Any], reported: Iterable[str] = ()) -> tuple[str, str, list[str]]:
    """A row of a table of evaluations: (label, budget, numbers); ``reported``: cells beside the release's accuracy."""
    number = evaluation.get("num_examples") or 0
    found = of_accuracy((float(evaluation["accuracy"]),), number)
    numbers = [
        bare_percent(float(evaluation["accuracy"])),
        NOTHING if found is None else interval(*found),
        bare_percent(evaluation.get("accuracy_release")),
        *reported,
        f"{number:,}",
        f"{float(evaluation.get('seconds') or 0):.1f}",
    ]
    return str(evaluation["label"]), labels.budget(evaluation.get("settings") or {}), numbers


def eps_chart(name: str, evaluations: Sequence[Mapping[str, Any]], of: str = "") -> Chart | None:
    """The accuracy of every attack over eps, from the natural accuracy at eps 0 on; None for a single eps.

    Args:
        name: file name without ending.
        evaluations: as in a results file; those without an eps give the value at 0.
        of: whose they are, when there are several on a page.
    """
    attacked = [evaluation for evaluation in evaluations if "eps" in evaluation["settings"]]
    texts = list(dict.fromkeys(str(evaluation["settings"]["eps"]) for evaluation in attacked))
    if len(texts) < 2:
        return None
    natural = [float(e["accuracy"]) for e in evaluations if "eps" not in e["settings"]]
    start = [(0.0, natural[0])] if natural and "0" not in texts else []
    ticks = ["0", *texts] if start else texts
    lines: dict[str, list[tuple[float, float]]] = {}
    for evaluation in attacked:
        line = lines.setdefault(str(evaluation["label"]), [*start])
        line.append((float(parse_number(evaluation["settings"]["eps"])), float(evaluation["accuracy"])))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for index, (attack, points) in enumerate(lines.items()):
            x, y = zip(*sorted(points), strict=True)
            heights = [100 * value for value in y]
            axes.plot(x, heights, label=legend_name(attack), marker=theme.marker(index), **theme.line_style(index))
        axes.set_xticks([float(parse_number(text)) for text in ticks], ticks)
        if len(ticks) > _MOST_LEVEL_TICKS:
            axes.tick_params(axis="x", rotation=60)
        axes.set_xlabel(f"eps ({attacked[0]['settings']['norm']}, fraction of the pixel range)")
        axes.set_ylabel("accuracy (%)")
        axes.set_ylim(0, 100)
        axes.grid(axis="y")

    title = "Accuracy under attack over eps" + (f", {of}" if of else "")
    caption = f"Clean and attacked image both classified correctly, {evaluations[0]['num_examples']} test examples."
    return Chart(name, title, caption, 3.4, draw)


# --- calfat per-class (methods.md 12.1: Table 4, figures 3 and 5 of the paper) ----------------------------------------


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
        if label != NATURAL and "format" not in content:  # of a version that counted as the release does
            title += " (release)"
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
        "methods": labels.listing(list(methods)),
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


# --- calfat report --tsne (figure 6 of the paper) ---------------------------------------------------------------------


def tsne_chart(content: Mapping[str, Any], name: str = "tsne", of: str = "") -> Chart | None:
    """A point an example, its class's name at the median of its points.

    Args:
        content: ``tsne.json``.
        name: of the chart.
        of: whose features they are, when there are several on a page.
    """
    if not content:
        return None
    points: Sequence[Sequence[float]] = content["points"]
    labels: Sequence[int] = content["labels"]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        dots: dict[str, Any] = {"linestyle": "", "markersize": 3.2, "markeredgewidth": 0, "alpha": 0.75}
        name: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "fontweight": "bold"}
        name["bbox"] = {"boxstyle": "round,pad=0.2", "facecolor": theme.PAPER.light, "alpha": 0.8, "linewidth": 0}
        for label in sorted(set(labels)):
            x, y = zip(*(point for point, other in zip(points, labels, strict=True) if other == label), strict=True)
            axes.plot(x, y, marker=theme.marker(label), color=theme.series(label), **dots)
            axes.annotate(str(content["class_names"][label]), (median(x), median(y)), **name)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_axis_off()

    caption = (
        f"{len(points):,} clean test examples, as many of each class as can be; features of checkpoint "
        f"{content['checkpoint']} (round {content['round']}); perplexity {content['perplexity']:g}, seed "
        f"{content['seed']}. Distances between far groups mean nothing in t-SNE."
    )
    return Chart(name, "t-SNE of penultimate features" + (f": {of}" if of else ""), caption, 4.4, draw)
