"""The figure of what settings reach for what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calfat_plugin.report import theme
from calfat_plugin.report.charts import Chart, legend_name
from calfat_plugin.report.numbers import unbroken_percent as percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def front_chart(front: Mapping[str, Any]) -> Chart | None:
    """Accuracy against cost; settings that nothing cheaper beats are joined, the others are pale.

    Args:
        front: the section ``front`` of ``suite.json``; empty: there is none.
    """
    points: Sequence[Mapping[str, Any]] = front.get("points", ())
    if len(points) < 2:
        return None
    curves = sorted({str(point["curve"]) for point in points})  # a colour each, whatever the cost
    best = [point for point in points if point["on_front"]]

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes = figure.subplots()
        axes.plot(
            [point["cost"] for point in best],
            [100 * point["mean"] for point in best],
            color=theme.MUTED.light,
            drawstyle="steps-post",
            linewidth=1,
            zorder=1,
        )
        for index, curve in enumerate(curves):
            _draw_points(axes, [point for point in points if point["curve"] == curve], index, curve)
        for point in best:
            place = (point["cost"], 100 * point["mean"])
            axes.annotate(point["name"], place, (4, -9), textcoords="offset points", fontsize=7)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:,.10g}")  # the usual one writes powers as mathematics, which is off
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(str(front["cost"]))
        axes.set_ylabel(f"{front['reached']} (%)")
        axes.grid()

    names = (", ".join(filter(None, (point["curve"], point["name"]))) for point in best)  # of one axis: a curve alone
    each = "; ".join(f"{name}: {percent(point['mean'])}" for name, point in zip(names, best, strict=True))
    caption = (
        "Means over seeds with 95 % intervals. No setting that costs at most as much reaches more than those on the "
        f"line, from cheap to dear: {each}."
    )
    return Chart("front", f"{front['reached']} against {front['cost']}", caption, 3.6, draw)


def _draw_points(axes: Axes, points: Sequence[Mapping[str, Any]], index: int, curve: str) -> None:
    style: dict[str, Any] = {"color": theme.series(index), "marker": theme.marker(index)}
    axes.plot([], [], linestyle="", label=legend_name(curve), **style)
    for point in points:
        mean = 100 * point["mean"]
        low, high = (100 * end for end in point["interval"] or (point["mean"], point["mean"]))
        axes.errorbar(
            point["cost"],
            mean,
            [[mean - low], [high - mean]],
            **style,
            alpha=1 if point["on_front"] else 0.35,
            elinewidth=1,
            capsize=2,
        )
