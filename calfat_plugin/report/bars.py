"""Per-class accuracy, and how labels are spread over clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from calfat_plugin.report import theme
from calfat_plugin.report.canvas import Chart, legend_name
from calfat_plugin.report.measures import final, on_examples, without_curve
from calfat_plugin.report.numbers import counted
from calfat_plugin.report.numbers import unbroken_percent as percent
from calfat_plugin.report.reading import RunFiles
from calfat_plugin.report.words import listing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PerClass = Sequence[float | None]

_NAMED_CLASSES = 24  # more classes are drawn as a profile, without names
_BARS = 3  # more series are drawn as dots
_HISTOGRAMS = 8  # more clients are drawn as a matrix


def per_class(
    name: str,
    title: str,
    caption: str,
    values: Mapping[str, PerClass],
    classes: Sequence[str],
    indexes: Mapping[str, int] | None = None,
) -> Chart:
    """Accuracy of each class, for one or more series.

    Args:
        name, title, caption: of the chart.
        values: series to fractions, one a class; None for a class without examples.
        classes: their names.
        indexes: series to the index of its style, where other charts of the page show it, too; None: in order.
    """
    style = indexes or {series: index for index, series in enumerate(values)}
    named, few = len(classes) <= _NAMED_CLASSES, len(values) <= _BARS

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        if not named:
            _draw_profile(axes, values, style)
            return
        (_draw_bars if few else _draw_dots)(axes, values, style)
        axes.set_yticks(range(len(classes)), list(map(_short, classes)))
        axes.set_ylim(len(classes) - 0.45, -0.55)
        axes.set_xlim(0 if few else -2, 112 if few else 103)
        axes.set_xticks(range(0, 101, 20))
        axes.set_xlabel("accuracy (%)")
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)

    each = 0.12 * len(values) + 0.1 if few else 0.3
    return Chart(name, title, caption, 0.75 + each * len(classes) if named else 3.1, draw)


def _draw_bars(axes: Axes, values: Mapping[str, PerClass], style: Mapping[str, int]) -> None:
    thick = 0.8 / len(values)
    for index, (series, fractions) in enumerate(values.items()):
        places = [place + (index + 0.5) * thick - 0.4 for place in range(len(fractions))]
        lengths = [100 * (value or 0.0) for value in fractions]
        bars = axes.barh(places, lengths, thick * 0.88, color=theme.series(style[series]), label=legend_name(series))
        shown = ["no example" if value is None else f"{100 * value:.0f}" for value in fractions]
        axes.bar_label(bars, shown, padding=3, fontsize=8, color=theme.MUTED.light)


def _draw_dots(axes: Axes, values: Mapping[str, PerClass], style: Mapping[str, int]) -> None:
    axes.grid(axis="y", linewidth=0.6)
    for series, fractions in values.items():
        lengths = [float("nan") if value is None else 100 * value for value in fractions]
        dots = {**theme.line_style(style[series]), "marker": theme.marker(style[series]), "linestyle": ""}
        axes.plot(lengths, range(len(lengths)), label=legend_name(series), markersize=6, **dots)


def _draw_profile(axes: Axes, values: Mapping[str, PerClass], style: Mapping[str, int]) -> None:
    """Many classes: their accuracies in descending order, one line a series."""
    for series, fractions in values.items():
        known = sorted((100 * value for value in fractions if value is not None), reverse=True)
        axes.plot(range(1, len(known) + 1), known, label=legend_name(series), **theme.line_style(style[series]))
    axes.set_xlabel("classes, each line sorted from best to worst")
    axes.set_ylabel("accuracy (%)")
    axes.set_ylim(0, 101)
    axes.grid(axis="y")


def final_per_class(run: RunFiles) -> Chart | None:
    """Per-class accuracy of the final model: clean, and under the attack that hurt most."""
    chosen = [evaluation for evaluation in run.evaluations if evaluation.get("per_class")]
    if not chosen:
        return None
    # Of equals the last one: recipes list attacks from weak to strong.
    worst = min(reversed(chosen), key=lambda evaluation: float(evaluation["accuracy"]))
    shown = {str(evaluation["label"]): evaluation for evaluation in (chosen[0], worst)}
    caption = f"Final global model: {on_examples((label, [(run, found)]) for label, found in shown.items())}. "
    for low, high in _extremes(worst["per_class"], run.class_names):
        caption += f"Under {worst['label']} from {low} to {high}."
    caption += without_curve(final(run, worst), [run], {})
    values = {label: evaluation["per_class"] for label, evaluation in shown.items()}
    indexes = {label: index for index, label in enumerate(dict.fromkeys((*run.monitored, *shown)))}  # as in the curves
    return per_class("per_class", "Accuracy per class", caption, values, run.class_names, indexes)


def spread_sentence(values: Mapping[str, PerClass], classes: Sequence[str]) -> str:
    """The weakest class of every series."""
    weakest = [f"{series} {low}" for series in values for low, _ in _extremes(values[series], classes)]
    return f"Weakest class: {listing(weakest)}." if weakest else ""


def _extremes(fractions: PerClass, classes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The worst and the best class in words; nothing where no class has examples."""
    known = [(value, name) for value, name in zip(fractions, classes, strict=True) if value is not None]
    if known:
        low, high = (f"{percent(value)} ({name})" for value, name in (min(known), max(known)))
        yield low, high


def label_distribution(run: RunFiles, name: str = "label_distribution", of: str = "") -> Chart | None:
    """Training examples per client and class; ``of`` says whose they are, when there are several on a page."""
    counts, classes = run.class_counts, run.class_names
    if not counts:
        return None
    absent = [sum(count == 0 for count in row) for row in counts]
    totals = [sum(row) for row in counts]
    sizes = f"from {min(totals):,} to {max(totals):,}" if min(totals) < max(totals) else f"{totals[0]:,}"
    caption = (
        f"{counted(sum(totals), 'training example')} over {counted(len(counts), 'client')}, {sizes} examples each; "
        f"a client lacks {sum(absent) / len(absent):.1f} of the {len(classes)} classes on average."
    )
    few = len(counts) <= _HISTOGRAMS and len(classes) <= _NAMED_CLASSES
    height = 0.72 * len(counts) + 0.7 if few else min(0.5 + 0.2 * len(counts), 4.5)
    draw = _histograms if few else _matrix
    title = "Labels on each client" + (f": {of}" if of else "")
    return Chart(name, title, caption, height, lambda figure: draw(figure, run))


def _histograms(figure: Figure, run: RunFiles) -> None:
    """A row of bars a client, all on one scale."""
    counts, classes = run.class_counts, list(map(_short, run.class_names))
    top = max(max(row) for row in counts) or 1
    rows = figure.subplots(len(counts), 1, sharex=True, squeeze=False)[:, 0]
    for client, (axes, row) in enumerate(zip(rows, counts, strict=True)):
        bars = axes.bar(range(len(row)), row, width=0.72, color=theme.series(0))
        shown = [f"{count:,}" if count else "" for count in row]
        axes.bar_label(bars, shown, padding=1.5, fontsize=8, color=theme.MUTED.light)
        axes.set_ylim(0, top * 1.35)
        axes.set_yticks([])
        axes.set_ylabel(f"client {client}", rotation=0, ha="right", va="center", fontsize=9)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="x", length=0)
    if max(map(len, classes)) > 3:
        rows[-1].set_xticks(range(len(classes)), classes, rotation=40, ha="right", rotation_mode="anchor")
    else:
        rows[-1].set_xticks(range(len(classes)), classes)
        rows[-1].set_xlabel("class")


def _matrix(figure: Figure, run: RunFiles) -> None:
    """A row a client, a column a class; the darker, the more examples. An image, so that 100 x 100 stays small."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.ticker import MaxNLocator

    shades = LinearSegmentedColormap.from_list("shades", [f"{theme.series(0)}00", theme.series(0)])
    root = PowerNorm(0.5, vmin=0)  # the square root keeps small shares in sight
    axes = figure.subplots()
    axes.imshow(run.class_counts, cmap=shades, norm=root, aspect="auto", interpolation="none")
    axes.set_xlabel("class")
    axes.set_ylabel("client")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))


def _short(name: str, longest: int = 14) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"
