"""Accuracy over eps, one line an attack, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calfat_plugin.report import theme
from calfat_plugin.report.canvas import Chart, Series, line_style, render
from calfat_plugin.results import EvaluationResult
from calfat_plugin.threat import parse_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEIGHT = 3.4  # inches
_MOST_LEVEL_TICKS = 7


def draw(results: Sequence[EvaluationResult], beside: Path) -> tuple[Path, ...]:
    """Draw the strict accuracy of every attack over eps, from the natural accuracy at eps 0 on.

    Args:
        results: a sweep; those without an eps give the value at 0.
        beside: the results file; the figures get its name.

    Returns:
        The files written.
    """
    natural = next((result.accuracy_strict for result in results if "eps" not in result.settings), None)
    norm = next((str(result.settings["norm"]) for result in results if "eps" in result.settings), "")
    texts = list(dict.fromkeys(str(result.settings["eps"]) for result in results if "eps" in result.settings))
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        if "eps" in result.settings:
            start = [(0.0, natural)] if natural is not None and "0" not in texts else []
            line = lines.setdefault(result.label, start)
            line.append((float(parse_number(result.settings["eps"])), result.accuracy_strict))

    def put(figure: Figure) -> None:
        axes = figure.subplots()
        for index, points in enumerate(lines.values()):
            x, y = zip(*sorted(points), strict=True)
            axes.plot(x, [100 * value for value in y], marker=theme.marker(index), **line_style(index))
        ticks = texts if "0" in texts or natural is None else ["0", *texts]
        axes.set_xticks([float(parse_number(text)) for text in ticks], ticks)
        if len(ticks) > _MOST_LEVEL_TICKS:
            axes.tick_params(axis="x", rotation=60)
        axes.set_xlabel(f"eps ({norm}, fraction of the pixel range)")
        axes.set_ylabel("accuracy, strict (%)")
        axes.set_ylim(0, 100)
        axes.grid(axis="y")

    chart = Chart(
        name=beside.stem,
        title="Accuracy under attack over eps",
        caption=f"Clean and attacked image both classified correctly, {results[0].num_examples} test examples.",
        height=_HEIGHT,
        draw=put,
        legend=[Series(label, index) for index, label in enumerate(lines)],
    )
    render(chart, beside.parent)
    return tuple(beside.with_suffix(ending) for ending in (".svg", ".png"))
