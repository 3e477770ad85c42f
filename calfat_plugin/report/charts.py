"""matplotlib, kept at a distance: imported when a figure is drawn, writing nothing to the home directory.

A figure is drawn once and saved several times: for the page as a transparent SVG; beside it as SVG, PDF and PNG files,
on white and with a title.
"""

from __future__ import annotations

import base64
import io
import logging
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.exact import parse_number
from calfat_plugin.maths.metrics import mean_std, plausible_losses
from calfat_plugin.report.labels import on_examples
from calfat_plugin.report.numbers import NOTHING, counted
from calfat_plugin.report.page import LINE, MUTED, TEXT, line_style, series
from calfat_plugin.results import EvaluationResult
from calfat_plugin.stored_run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 5.0  # inches: 360 points, so a point is about a pixel on a phone
_TITLE_HEIGHT, _LEGEND_ROW = 0.3, 0.19  # inches added to the chart's own height
_LEGEND_CHARACTERS, _KEY_CHARACTERS = 52, 6  # what fits on a row of the legend, and the width of a key
#: Ending of each file beside a page, to how it is saved: without a date, so that the same figure gives the same file.
FORMATS: dict[str, dict[str, Any]] = {
    "svg": {"metadata": {"Date": None}},
    "pdf": {"metadata": {"CreationDate": None}},
    "png": {"dpi": 160},
}
_SETTINGS = {
    "svg.fonttype": "none",  # text stays text: it is drawn in a font of the reader's and stays small
    "svg.hashsalt": "calfat",  # the same figure gives the same file
    "pdf.fonttype": 42,  # TrueType: publishers refuse the Type 3 fonts that are matplotlib's default
    "text.parse_math": False,  # names from recipes may hold dollar signs
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.axisbelow": True,
    "grid.color": LINE.light,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "patch.linewidth": 0,
    **dict.fromkeys(("axes.linewidth", "grid.linewidth"), 0.8),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED.light),
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor"), TEXT.light),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
}


@dataclass(frozen=True)
class Chart:
    name: str  # file name without ending, unique on a page
    title: str  # a few words
    caption: str  # a sentence or two below the chart, which screen readers read out
    height: float  # in inches, without title and legend; the width is always :data:`WIDTH`
    draw: Callable[[Figure], None]  # draws into an empty figure all but the legend, which lists what has a label


@dataclass(frozen=True)
class Drawing:
    """A figure on a page; ``source`` is its SVG as a data URI."""

    title: str
    caption: str
    source: str


def render(chart: Chart, folder: Path) -> Drawing:
    """Draw a chart, write it to ``folder`` in each of :data:`FORMATS`, and return it for the page."""
    with matplotlib_at_hand() as matplotlib:
        from matplotlib.figure import Figure

        with matplotlib.rc_context(_SETTINGS):
            figure = Figure(figsize=(WIDTH, chart.height), layout="constrained")
            chart.draw(figure)
            height = chart.height + _LEGEND_ROW * _add_legend(figure)
            figure.set_size_inches(WIDTH, height)
            inline = io.BytesIO()
            unmarked = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(inline, format="svg", metadata=unmarked)
            figure.set_size_inches(WIDTH, height + _TITLE_HEIGHT)
            figure.suptitle(chart.title, x=0.02, ha="left", fontsize=11, fontweight="bold")
            for ending, how in FORMATS.items():
                figure.savefig(folder / f"{chart.name}.{ending}", facecolor="white", **how)
                figure.set_layout_engine(None)  # the first one's layout stays: finding it again costs a draw each
    source = f"data:image/svg+xml;base64,{base64.b64encode(inline.getvalue()).decode()}"
    return Drawing(chart.title, chart.caption, source)


def drawn(charts: Iterable[Chart | None], folder: Path) -> list[Drawing]:
    """Every chart that is not None, as :func:`render` returns it."""
    return [render(chart, folder) for chart in charts if chart is not None]


def legend_name(name: str) -> str:
    """A name for the legend; matplotlib leaves out those that begin with an underscore."""
    return f"\N{NO-BREAK SPACE}{name}" if name.startswith("_") else name


def _add_legend(figure: Figure) -> int:
    """Add a legend below the axes, and return the number of its rows."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    if not names:
        return 0
    columns = int(_LEGEND_CHARACTERS / (max(map(len, names)) + _KEY_CHARACTERS))
    columns = max(1, min(len(names), columns))
    lines = [textwrap.fill(name, _LEGEND_CHARACTERS) for name in names]
    figure.legend(handles, lines, loc="outside lower left", ncols=columns, fontsize=9)
    return -(-sum(line.count("\n") + 1 for line in lines) // columns)


@contextmanager
def matplotlib_at_hand() -> Iterator[Any]:
    """matplotlib itself, with its font cache in a temporary folder unless it has a place already."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matplotlib"
    has_place = "matplotlib" in sys.modules or os.environ.get("MPLCONFIGDIR") or any(usual.glob("fontlist-*.json"))
    levels = {
        "fontTools": logging.WARNING,  # at the level of a run's log, it has a line for each table of a font
        "matplotlib.font_manager": logging.ERROR,  # on a slow machine, it says in each run that it looks for fonts
    }
    with ExitStack() as stack:
        for name, level in levels.items():
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(level)
        if not has_place:
            os.environ["MPLCONFIGDIR"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="calfat-"))
            stack.callback(os.environ.pop, "MPLCONFIGDIR")
        import matplotlib

        if not has_place:
            import matplotlib.font_manager  # looks for fonts, and writes down what it found

            matplotlib.get_cachedir()
            matplotlib.get_configdir()
        yield matplotlib


# --- curves over rounds -----------------------------------------------------------------------------------------------


Points = Sequence[tuple[float, float]]
_SPARSE = 25  # up to so many points a line shows a marker on each


@dataclass(frozen=True)
class Line:
    """A curve, over rounds unless its chart says otherwise."""

    name: str  # in the legend
    index: int  # picks the style
    points: Points  # (x, value), ascending x
    band: Sequence[tuple[float, float, float]] = ()  # (x, low, high) around it; empty: none


def learning_curves(run: Run) -> Chart | None:
    """Accuracy under every monitored evaluator, round by round."""
    lines = [Line(label, index, run.curve(label)) for index, label in enumerate(run.monitored)]
    if not lines:
        return None
    caption = "The global model after each round."
    if run.experiment.ema is not None:
        caption = "The moving average of the global models after each round."
    subset = run.experiment.monitor.max_examples
    split = run.experiment.data.monitored_split
    if subset:
        caption += f" On a fixed subset of at most {subset} {split} examples."
    elif split == "validation":
        caption += " On the validation split."
    return line_chart("learning_curves", "Learning curves", caption, lines, "accuracy (%)", percentages=True)


def heterogeneity(run: Run) -> Chart | None:
    """s^2 of the CalFAT paper, section 3.2, round by round."""
    caption = (
        "How far the clients' models lie apart before they are averaged: the sum over clients of the squared distance "
        "to their mean, over trainable parameters, over clients less one."
    )
    line = Line("s²", 0, run.curve("heterogeneity"))
    return line_chart("heterogeneity", "Heterogeneity s²", caption, [line], "s²")


def losses(run: Run) -> Chart | None:
    """Training loss: the mean over clients, and a band from the lowest to the highest."""
    clients: set[int] = set()
    means, band = [], []
    for record in run.records:
        clients.update(record.losses)
        plausible = plausible_losses(record.losses).values()
        if plausible:
            means.append((record.round, sum(plausible) / len(plausible)))
            band.append((record.round, min(plausible), max(plausible)))
    if not means:
        return None
    caption = (
        f"Mean over clients; the band is from the lowest to the highest of {counted(len(clients), 'client')}. The "
        f"losses of different methods are different functions and do not compare. Last round: {means[-1][1]:.3g}."
    )
    return line_chart("losses", "Training loss", caption, [Line("", 0, means, band)], "mean training loss")


def compared(
    name: str,
    title: str,
    y_label: str,
    column: str,
    groups: Mapping[str, Sequence[Run]],
    *,
    percentages: bool = True,
) -> Chart | None:
    """One column of several groups of runs: the mean over seeds, and a band of one standard deviation.

    A mean covers the rounds that all its runs have. A run that is not finished would cut it short, and is left out
    unless no run of its group is finished.
    """
    lines = []
    for index, (group, runs) in enumerate(groups.items()):
        curves = []
        finished = [run for run in runs if run.finished]
        for run in finished or runs:
            curve = dict(run.curve(column))
            if curve:
                curves.append(curve)
        if not curves:
            continue
        means, band = [], []
        for number in sorted(set.intersection(*map(set, curves))):
            mean, std = mean_std([curve[number] for curve in curves])
            means.append((number, mean))
            if std is not None:
                band.append((number, mean - std, mean + std))
        lines.append(Line(group, index, means, band))
    caption = "Round by round."
    if any(line.band for line in lines):
        caption += " Mean over seeds; the band is one sample standard deviation."
    return line_chart(name, title, caption, lines, y_label, percentages=percentages)


def line_chart(
    name: str,
    title: str,
    caption: str,
    lines: Sequence[Line],
    y_label: str,
    *,
    percentages: bool = False,
    x_label: str = "round",
    ticks: Mapping[str, float] | None = None,
) -> Chart | None:
    """A chart of lines, each with an optional band; one line over rounds has no legend.

    None where no line has two points, because tables are better for single numbers.
    """
    if all(len(line.points) < 2 for line in lines):
        return None
    factor = 100.0 if percentages else 1.0

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        has_legend = len(lines) > 1 or bool(ticks)
        for line in lines:
            if line.band:
                x, low, high = [], [], []
                for place, lowest, highest in line.band:
                    x.append(place)
                    low.append(factor * lowest)
                    high.append(factor * highest)
                axes.fill_between(x, low, high, color=series(line.index), alpha=0.16, linewidth=0)
            x, y = [], []
            for place, value in line.points:
                x.append(place)
                y.append(factor * value)
            label = legend_name(line.name) if has_legend else None
            style = line_style(line.index, marked=len(line.points) <= _SPARSE)
            axes.plot(x, y, label=label, **style)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(axis="y")
        axes.margins(x=0.02)
        if ticks is None:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            rotation = 60 if len(ticks) > _MOST_LEVEL_TICKS else 0
            axes.set_xticks(list(ticks.values()), list(ticks), rotation=rotation)
        if percentages:
            top = axes.get_ylim()[1]
            axes.set_ylim(0, 100.5 if top > 100 else max(top, 1.0))
        elif all(value >= 0 for line in lines for _, value in line.points):
            axes.set_ylim(bottom=0)

    return Chart(name, title, caption, 3.1, draw)


# --- bars -------------------------------------------------------------------------------------------------------------


PerClass = Sequence[float | None]

_MOST_NAMED = 24  # bars with a name and a number; of more bars, an axis shows the height
_MOST_PANELS = 8  # clients with a panel each; more are one panel of totals


def bar_chart(
    name: str,
    title: str,
    caption: str,
    values: Mapping[str, PerClass],
    names: Sequence[str],
    axis: str,
    *,
    indexes: Mapping[str, int] | None = None,
    percentages: bool = False,
) -> Chart:
    """A panel of bars for each row of ``values``, with one bar for each of ``names``.

    Args:
        name: as of a :class:`Chart`, as ``title`` and ``caption`` are.
        title: likewise.
        caption: likewise.
        values: title of the panel to its numbers; None: there is no number.
        names: of the bars.
        axis: what the bars are, such as ``class``.
        indexes: title of a panel to the place of its colour; None: all panels have the first one.
        percentages: whether the numbers are fractions, to be shown in percent.
    """
    few = len(names) <= _MOST_NAMED
    factor = 100 if percentages else 1

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(values), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, (panel, row) in zip(panels, values.items(), strict=True):
            heights, texts = [], []
            for value in row:
                heights.append(factor * (value or 0))
                texts.append(NOTHING if value is None else f"{factor * value:,.0f}")
            index = 0 if indexes is None else indexes[panel]
            bars = axes.bar(range(len(row)), heights, 0.72, color=series(index))
            if few:
                axes.bar_label(bars, texts, padding=1.5, fontsize=8, color=MUTED.light)
                axes.set_yticks([])
                axes.spines["left"].set_visible(False)
            axes.margins(x=0.02)
            axes.set_title(textwrap.fill(panel, _LEGEND_CHARACTERS), loc="left", fontsize=9)
            axes.tick_params(axis="x", length=0)
        highest = max((value or 0 for row in values.values() for value in row), default=0) or 1
        panels[0].set_ylim(0, 1.3 * factor * highest)
        if few and max(map(len, names)) > 3:
            panels[-1].set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
        else:
            panels[-1].set_xlabel(axis)
            if few:
                panels[-1].set_xticks(range(len(names)), names)

    return Chart(name, title, caption, 0.95 * len(values) + 0.8, draw)


def final_per_class(run: Run) -> Chart | None:
    """Per-class accuracy of the final model: clean, and under the attack that hurt most."""
    # An attack that did not run knows nothing of classes.
    evaluations = [evaluation for evaluation in run.evaluations if evaluation.per_class]
    if not evaluations:
        return None
    worst = evaluations[0]
    for evaluation in evaluations:
        if (evaluation.accuracy or 0) <= (worst.accuracy or 0):  # recipes list attacks from weak to strong
            worst = evaluation
    values: dict[str, PerClass] = {}
    measured = []
    for evaluation in (evaluations[0], worst):
        if evaluation.label not in values:
            values[evaluation.label] = evaluation.per_class
            measured.append((evaluation.label, [(run, evaluation)]))
    labels = dict.fromkeys((*run.monitored, *values))
    indexes = {label: index for index, label in enumerate(labels)}  # the colours of the curves
    return bar_chart(
        "per_class",
        "Accuracy per class",
        f"Final model: {on_examples(measured)}.",
        values,
        list(map(short, run.class_names)),
        "class",
        indexes=indexes,
        percentages=True,
    )


def label_distribution(run: Run) -> Chart | None:
    """Training examples per client and class."""
    counts, classes = run.partition.class_counts, run.class_names
    if not counts:
        return None
    totals, absent = [], []
    for row in counts:
        totals.append(sum(row))
        absent.append(row.count(0))
    sizes = f"{totals[0]:,}"
    if min(totals) < max(totals):
        sizes = f"from {min(totals):,} to {max(totals):,}"
    caption = (
        f"{counted(sum(totals), 'training example')} over {counted(len(counts), 'client')}, {sizes} examples each; "
        f"a client lacks {sum(absent) / len(absent):.1f} of the {len(classes)} classes on average."
    )
    name, title = "label_distribution", "Labels on each client"
    if len(counts) <= _MOST_PANELS:
        values = {f"client {client}": row for client, row in enumerate(counts)}
        return bar_chart(name, title, caption, values, list(map(short, classes)), "class")
    caption += " A bar is the number of a client's examples."
    return bar_chart(name, title, caption, {"": totals}, list(map(str, range(len(counts)))), "client")


def short(name: str) -> str:
    """A name that fits below a bar."""
    return name if len(name) <= 14 else f"{name[:13]}…"


# --- calfat attack: accuracy over eps ---------------------------------------------------------------------------------

_MOST_LEVEL_TICKS = 7


def eps_chart(name: str, evaluations: Sequence[EvaluationResult], of: str = "") -> Chart | None:
    """The accuracy of every attack over eps, from the natural accuracy at eps 0 on; None for a single eps.

    The eps of different norms do not compare. Of attacks in several norms, it shows the norm with the most eps.
    """
    natural: list[float] = []
    measured: list[EvaluationResult] = []
    by_norm: dict[str, dict[str, list[EvaluationResult]]] = {}  # norm, and eps as text, to the attacks
    for evaluation in evaluations:
        if evaluation.accuracy is None:
            continue
        measured.append(evaluation)
        norm, eps = evaluation.settings.get("norm"), evaluation.settings.get("eps")
        if eps is None:
            natural.append(evaluation.accuracy)
        elif norm is not None:
            by_norm.setdefault(str(norm), {}).setdefault(str(eps), []).append(evaluation)
    norm, by_eps = max(by_norm.items(), key=lambda item: len(item[1]), default=("", {}))
    if len(by_eps) < 2:
        return None
    start: list[tuple[float, float]] = []
    ticks: dict[str, float] = {}
    if natural and "0" not in by_eps:
        start.append((0.0, natural[0]))
        ticks["0"] = 0.0
    points: dict[str, list[tuple[float, float]]] = {}  # by attack
    for eps, attacks in by_eps.items():
        ticks[eps] = float(parse_number(eps))
        for evaluation in attacks:
            line = points.setdefault(evaluation.label, [*start])
            line.append((ticks[eps], float(evaluation.accuracy or 0)))
    lines = [Line(attack, index, sorted(line)) for index, (attack, line) in enumerate(points.items())]
    numbers = dict.fromkeys(str(evaluation.num_examples) for evaluation in measured)
    title = "Accuracy under attack over eps"
    if of:
        title += f", {of}"
    return line_chart(
        name,
        title,
        f"Clean and attacked image both classified correctly, {' or '.join(numbers)} test examples.",
        lines,
        "accuracy (%)",
        percentages=True,
        x_label=f"eps ({norm}, fraction of the pixel range)",
        ticks=ticks,
    )
