"""Line charts over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.maths.metrics import mean_std, plausible_losses
from calfat_plugin.report import theme
from calfat_plugin.report.canvas import Chart, legend_name
from calfat_plugin.report.numbers import unbroken_percent as percent
from calfat_plugin.report.reading import RunFiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[int, float]]
_SPARSE = 25  # up to so many points a line shows a marker on each


@dataclass(frozen=True)
class Line:
    """A curve over rounds.

    Attributes:
        name: in the legend.
        index: picks the style.
        points: (round, value), ascending rounds.
        band: (round, low, high) around it; empty: none.
        thin: lines in the background, such as single clients.
    """

    name: str
    index: int
    points: Points
    band: Sequence[tuple[int, float, float]] = ()
    thin: Sequence[Points] = ()


def learning_curves(run: RunFiles) -> Chart | None:
    """Accuracy of the global model under every monitored evaluator, round by round."""
    lines = [Line(label, index, run.curve(label)) for index, label in enumerate(run.monitored)]
    if all(len(line.points) < 2 for line in lines):  # one point is a number, and tables are better at those
        return None
    last = [f"{line.name} {percent(line.points[-1][1])}" for line in lines]
    caption = f"After round {lines[0].points[-1][0]}: {', '.join(last)}."
    robust = run.robust_label
    if robust is not None:
        # The first of equals, as the checkpoint best-robust is chosen.
        best = max(run.curve(robust), key=lambda point: (point[1], -point[0]))
        caption += f" Best {robust}: {percent(best[1])} after round {best[0]}."
    subset = run.value("calfat", "monitor", "max_examples")
    split = run.monitored_split
    caption += f" On a fixed subset of at most {subset} {split} examples." if subset else ""
    caption += " On the validation split." if split == "validation" and not subset else ""
    return line_chart("learning_curves", "Learning curves", caption, lines, "accuracy (%)", percentages=True)


def heterogeneity(run: RunFiles) -> Chart | None:
    """s^2 of the CalFAT paper, section 3.2, round by round."""
    points = run.curve("heterogeneity")
    if len(points) < 2:
        return None
    caption = (
        "How far the clients' models lie apart before they are averaged: the sum over clients of the squared distance "
        f"to their mean, over trainable parameters, over clients less one. Last round: {points[-1][1]:.3g}."
    )
    return line_chart("heterogeneity", "Heterogeneity s²", caption, [Line("s²", 0, points)], "s²")


def losses(run: RunFiles) -> Chart | None:
    """Training loss: the mean over clients, and every client behind it."""
    clients = [column for column in (run.rounds[0] if run.rounds else {}) if column.startswith("loss_")]
    by_round: dict[int, dict[str, float]] = {}
    for column in clients:
        for number, loss in run.curve(column):
            by_round.setdefault(number, {})[column] = loss
    kept = {number: losses for number in sorted(by_round) if (losses := plausible_losses(by_round[number]))}
    if len(run.rounds) < 2 or not kept:
        return None
    found = [[(number, losses[column]) for number, losses in kept.items() if column in losses] for column in clients]
    curves = [curve for curve in found if curve]
    mean = [(number, sum(losses.values()) / len(losses)) for number, losses in kept.items()]
    caption = (
        f"Mean over clients (thick) and each of the {len(curves)} clients (thin). The losses of different methods are "
        f"different functions and do not compare. Last round: {mean[-1][1]:.3g}."
    )
    lines = [Line("mean over clients", 0, mean, thin=curves)]
    return line_chart("losses", "Training loss", caption, lines, "mean training loss")


def learning_rate(run: RunFiles) -> Chart | None:
    """The clients' learning rate, round by round, where it changes."""
    points = run.curve("learning_rate")
    if len({rate for _, rate in points}) < 2:
        return None
    caption = f"Of the clients' optimisers, as the recipe has it. Last round: {points[-1][1]:.3g}."
    return line_chart("learning_rate", "Learning rate", caption, [Line("learning rate", 0, points)], "learning rate")


def own_metrics(run: RunFiles) -> list[Chart]:
    """What plugins measured beside loss and accuracy, round by round: a chart each."""
    charts = []
    for index, column in enumerate(run.metrics):
        points, (where, _, name) = run.curve(column), column.rpartition("/")
        by = {"train": "The clients' mean, each by its examples.", "server": "Measured by the aggregator."}
        caption = f"{by.get(where, f'Measured by the evaluator {where}.')} Last round: {points[-1][1]:.4g}."
        if len(points) > 1:
            title = column.replace("_", " ")
            charts.append(line_chart(f"metric-{index}", title, caption, [Line(name, 0, points)], name))
    return charts


def compared(
    name: str,
    title: str,
    what: str,
    column: Mapping[str, str | None],
    groups: Mapping[str, Sequence[RunFiles]],
    *,
    percentages: bool = True,
) -> Chart | None:
    """One quantity of several groups of runs: the mean over seeds, and a band of one standard deviation.

    Args:
        name: of the chart.
        title: of the chart.
        what: the y-axis.
        column: group to the column of ``rounds.csv``; None: it has none.
        groups: group to its runs, one a seed.
        percentages: whether the numbers are accuracies.
    """
    lines = []
    for index, (group, runs) in enumerate(groups.items()):
        curves = [dict(curve) for run in runs if (curve := run.curve(column[group] or ""))]
        if curves:
            rounds = sorted(set.intersection(*map(set, curves)))
            stats = [(number, *mean_std([curve[number] for curve in curves])) for number in rounds]
            mean = [(number, mean) for number, mean, _ in stats]
            band = [(number, mean - std, mean + std) for number, mean, std in stats if std is not None]
            lines.append(Line(group, index, mean, band))
    if all(len(line.points) < 2 for line in lines):
        return None
    shown = percent if percentages else "{:.3g}".format
    ends = {line.name: line.points[-1] for line in lines if line.points}
    last = {number for number, _ in ends.values()}
    when = (lambda number: "") if len(last) == 1 else " (round {})".format  # an unfinished run is behind the others
    each = ", ".join(f"{group} {shown(value)}{when(number)}" for group, (number, value) in ends.items())
    caption = f"{f'After round {last.pop()}' if len(last) == 1 else 'Last values'}: {each}."
    if any(line.band for line in lines):
        caption += " Mean over seeds; the band is one sample standard deviation."
    return line_chart(name, title, caption, lines, what, percentages=percentages)


def line_chart(
    name: str, title: str, caption: str, lines: Sequence[Line], y_label: str, *, percentages: bool = False
) -> Chart:
    """A chart of lines over rounds; one line alone has no legend."""

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        for line in lines:
            _draw_line(axes, line, 100.0 if percentages else 1.0, legend_name(line.name) if len(lines) > 1 else None)
        axes.set_xlabel("round")
        axes.set_ylabel(y_label)
        axes.grid(axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.02)
        if percentages:
            top = axes.get_ylim()[1]
            axes.set_ylim(0, min(100.0, max(top, 1.0)) if top <= 100 else 100.5)
        elif all(value >= 0 for line in lines for _, value in line.points):
            axes.set_ylim(bottom=0)

    return Chart(name, title, caption, 3.1, draw)


def _draw_line(axes: Axes, line: Line, factor: float, name: str | None) -> None:
    for thin in line.thin:
        axes.plot(*_columns(thin, factor), color=theme.MUTED.light, linewidth=0.7, alpha=0.55)
    if line.band:
        rounds, low, high = zip(*line.band, strict=True)
        edges = [factor * value for value in low], [factor * value for value in high]
        axes.fill_between(rounds, *edges, color=theme.series(line.index), alpha=0.16, linewidth=0)
    marker = theme.marker(line.index) if len(line.points) <= _SPARSE else ""
    axes.plot(*_columns(line.points, factor), label=name, marker=marker, **theme.line_style(line.index))


def _columns(points: Points, factor: float) -> tuple[list[int], list[float]]:
    return [number for number, _ in points], [factor * value for _, value in points]
