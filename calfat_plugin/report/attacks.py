"""What ``calfat attack`` found about a run's checkpoints, as tables and as accuracy over eps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.report import theme, words
from calfat_plugin.report.canvas import Chart, Series, line_style, render
from calfat_plugin.report.markup import Markup, element, joined, section, table
from calfat_plugin.report.words import bare_percent
from calfat_plugin.threat import parse_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEIGHT = 3.4  # inches
_MOST_LEVEL_TICKS = 7
_HEAD = ("attack", "accuracy %", "strict %", "examples", "seconds")


def attacks_section(attacks: Mapping[str, Mapping[str, Any]], figures: Path) -> Markup:
    """The part of the page; empty where nothing was attacked.

    Args:
        attacks: file name to content of ``attacks/*.json``.
        figures: an existing folder, for those with several eps.
    """
    return section("attacks", "Attacked afterwards", *(_one(name, attacks[name], figures) for name in attacks))


def eps_chart(name: str, evaluations: Sequence[Mapping[str, Any]]) -> Chart | None:
    """The strict accuracy of every attack over eps, from the natural accuracy at eps 0 on; None for a single eps.

    Args:
        name: file name without ending.
        evaluations: as in a results file; those without an eps give the value at 0.
    """
    attacked = [evaluation for evaluation in evaluations if "eps" in evaluation["settings"]]
    texts = list(dict.fromkeys(str(evaluation["settings"]["eps"]) for evaluation in attacked))
    if len(texts) < 2:
        return None
    natural = next((float(e["accuracy_strict"]) for e in evaluations if "eps" not in e["settings"]), None)
    begins = natural is not None and "0" not in texts
    lines: dict[str, list[tuple[float, float]]] = {}
    for evaluation in attacked:
        start = [(0.0, natural)] if begins and natural is not None else []
        line = lines.setdefault(str(evaluation["label"]), start)
        line.append((float(parse_number(evaluation["settings"]["eps"])), float(evaluation["accuracy_strict"])))
    ticks = ["0", *texts] if begins else texts

    def put(figure: Figure) -> None:
        axes = figure.subplots()
        for index, points in enumerate(lines.values()):
            x, y = zip(*sorted(points), strict=True)
            axes.plot(x, [100 * value for value in y], marker=theme.marker(index), **line_style(index))
        axes.set_xticks([float(parse_number(text)) for text in ticks], ticks)
        if len(ticks) > _MOST_LEVEL_TICKS:
            axes.tick_params(axis="x", rotation=60)
        axes.set_xlabel(f"eps ({attacked[0]['settings']['norm']}, fraction of the pixel range)")
        axes.set_ylabel("accuracy, strict (%)")
        axes.set_ylim(0, 100)
        axes.grid(axis="y")

    return Chart(
        name=name,
        title="Accuracy under attack over eps",
        caption=f"Clean and attacked image both classified correctly, {evaluations[0]['num_examples']} test examples.",
        height=_HEIGHT,
        draw=put,
        legend=[Series(label, index) for index, label in enumerate(lines)],
    )


def _one(name: str, content: Mapping[str, Any], figures: Path) -> Markup:
    evaluations: Sequence[Mapping[str, Any]] = content.get("evaluations") or ()
    chart = eps_chart(f"attacks_{Path(name).stem}", evaluations)
    drawn = Markup()
    if chart is not None:
        drawn = element("div", render(_titled(chart, name), figures), class_="figures")
    return joined(
        [
            element("h3", name),
            element("p", _what(content), class_="note"),
            table(_HEAD, map(_row, evaluations), caption=f"Attacks of {name}"),
            drawn,
        ]
    )


def _titled(chart: Chart, name: str) -> Chart:
    """A page may show several; their titles tell them apart."""
    return Chart(chart.name, f"{chart.title}, {name}", chart.caption, chart.height, chart.draw, chart.legend)


def _what(content: Mapping[str, Any]) -> str:
    """Which model, in a sentence."""
    text = f"Checkpoint {Path(str(content.get('checkpoint'))).stem}, after round {content.get('round')}"
    if content.get("selected_on"):
        text += f"; it was selected on the {content['selected_on']}, so these are no fair results"
    return f"{text}."


def _row(evaluation: Mapping[str, Any]) -> list[str]:
    ball = words.budget(evaluation["settings"])
    return [
        joined([str(evaluation["label"]), element("span", ball, class_="beside") if ball else Markup()]),
        bare_percent(float(evaluation["accuracy"]), 2),
        bare_percent(float(evaluation["accuracy_strict"]), 2),
        f"{evaluation['num_examples']:,}",
        f"{float(evaluation['seconds']):.1f}",
    ]
