"""t-SNE of penultimate features as a chart (figure 6 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from calfat_plugin.report import theme
from calfat_plugin.report.canvas import Chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
