"""matplotlib, kept at a distance: imported when a figure is drawn, writing nothing to the home directory.

A figure is drawn once and comes out three times: as SVG for the page, whose colours are CSS variables and whose text
is text; and as SVG and PNG files beside the page, with a legend inside and on white.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from calfat_plugin.report import theme
from calfat_plugin.report.markup import Markup, element

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 5.0  # inches: 360 points, so a point is about a pixel on a phone
_TALL = 3.7  # inches; taller ones stand beside two others
_TITLE_HEIGHT, _LEGEND_ROW = 0.3, 0.19  # inches that the files beside the page have more
_DPI = 160  # of the PNG files
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"
_SETTINGS = {
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and scaled
    "svg.hashsalt": "calfat",  # the same figure gives the same file
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": theme.MUTED.light,
    "axes.labelcolor": theme.TEXT.light,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "text.color": theme.TEXT.light,
    "xtick.color": theme.MUTED.light,
    "ytick.color": theme.MUTED.light,
    "xtick.labelcolor": theme.TEXT.light,
    "ytick.labelcolor": theme.TEXT.light,
    "grid.color": theme.LINE.light,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "patch.linewidth": 0,
    "legend.frameon": False,
    "savefig.facecolor": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


@dataclass(frozen=True)
class Series:
    """A name in the legend; ``index`` picks colour, dash and marker, ``shape`` which of them are shown."""

    name: str
    index: int
    shape: Literal["line", "bar", "dot"] = "line"


@dataclass(frozen=True)
class Chart:
    """A figure to draw.

    Attributes:
        name: file name without ending, unique on a page.
        title: what it shows, in a few words.
        caption: what is seen in it, in a sentence or two; stands below it and is its text for screen readers.
        height: in inches; the width is always :data:`WIDTH`.
        draw: puts everything but the legend into a fresh figure.
        legend: names of the series; empty where the figure says them itself.
    """

    name: str
    title: str
    caption: str
    height: float
    draw: Callable[[Figure], None]
    legend: Sequence[Series] = ()


def render(chart: Chart, folder: Path) -> Markup:
    """Draw a chart, write ``folder/<name>.svg`` and ``.png``, and return it for the page.

    Raises:
        OSError: the files cannot be written.
    """
    with _matplotlib() as matplotlib:
        from matplotlib.figure import Figure

        with matplotlib.rc_context(_SETTINGS):
            figure = Figure(figsize=(WIDTH, chart.height), layout="constrained")
            chart.draw(figure)
            drawing = _svg(figure)
            rows = -(-len(chart.legend) // _legend_columns(chart))
            figure.set_size_inches(WIDTH, chart.height + _TITLE_HEIGHT + _LEGEND_ROW * rows)
            if chart.legend:
                _add_legend(figure, chart)
            figure.suptitle(chart.title, x=0.02, ha="left", fontsize=11, fontweight="bold")
            figure.savefig(folder / f"{chart.name}.svg", facecolor="white", metadata={"Date": None})
            figure.set_layout_engine("none")  # the places found for the SVG stay; looking for them again costs time
            figure.savefig(folder / f"{chart.name}.png", facecolor="white", dpi=_DPI)
    return element(
        "figure",
        element("h3", chart.title),
        _for_page(drawing, chart),
        _html_legend(chart.legend),
        element("figcaption", chart.caption),
        class_="tall" if chart.height > _TALL else None,
    )


def line_style(index: int) -> dict[str, Any]:
    """matplotlib's arguments for a series' line."""
    lengths = theme.dashes(index)
    return {"color": theme.series(index).light, "linestyle": (0, lengths) if lengths else "-"}


@contextmanager
def _matplotlib() -> Iterator[Any]:
    """matplotlib itself, with its font cache in a temporary folder unless it has a place already."""
    import sys

    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matplotlib"
    if "matplotlib" in sys.modules or os.environ.get("MPLCONFIGDIR") or any(usual.glob("fontlist-*.json")):
        import matplotlib

        yield matplotlib
        return
    with tempfile.TemporaryDirectory(prefix="calfat-") as folder:
        os.environ["MPLCONFIGDIR"] = folder
        try:
            import matplotlib
            import matplotlib.font_manager  # looks for fonts, and writes down what it found

            matplotlib.get_cachedir()
            matplotlib.get_configdir()
            yield matplotlib
        finally:
            del os.environ["MPLCONFIGDIR"]


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return text.getvalue()


def _for_page(drawing: str, chart: Chart) -> Markup:
    """Inline SVG: sized by the page, colours by CSS, ids of its own, no leftovers of a file."""
    body = drawing[drawing.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    for colour in (*theme.PAGE, *theme.SERIES):
        body = body.replace(colour.light, f"var(--{colour.name})")
    body = re.sub(r'\bid="', f'id="{chart.name}-', body)
    body = re.sub(r'(url\(|href=")#', rf"\1#{chart.name}-", body)
    body = re.sub(r"font: ([^;\"]*?px) [^;\"]*", rf"font: \1 {_FONTS}", body).replace("'sans-serif', ", "")
    body = re.sub(r"[ \t]*\n[ \t]*", "\n", body).replace(" \n", "\n")
    label = element("title", f"{chart.title}. {chart.caption}")
    opening = re.match(r"<svg[^>]*>", body)
    assert opening is not None  # matplotlib writes one
    view = re.search(r'viewBox="[^"]*"', opening[0])
    assert view is not None
    return Markup(
        f'<svg {view[0]} role="img" xmlns:xlink="http://www.w3.org/1999/xlink">{label}{body[opening.end() :].strip()}'
    )


def _html_legend(legend: Sequence[Series]) -> Markup:
    items = []
    for entry in legend:
        colour = f"var(--{theme.series(entry.index).name})"
        if entry.shape == "line":
            dash = " ".join(f"{length * 1.8:g}" for length in theme.dashes(entry.index)) or None
            shape = element("path", d="M1 6H31", stroke=colour, stroke_width="3", stroke_dasharray=dash, fill="none")
        else:
            outline = "M4 1H28V11H4Z" if entry.shape == "bar" else theme.outline(entry.index)
            shape = element("path", d=outline, fill=colour)
        key = element("svg", shape, viewBox="0 0 32 12", class_="key", aria_hidden="true")
        items.append(element("li", key, entry.name))
    return element("ul", *items, class_="legend") if items else Markup()


def _add_legend(figure: Figure, chart: Chart) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def handle(entry: Series) -> Line2D | Patch:
        colour = theme.series(entry.index).light
        if entry.shape == "bar":
            return Patch(color=colour, label=entry.name)
        if entry.shape == "dot":
            return Line2D([], [], label=entry.name, linestyle="", marker=theme.marker(entry.index), color=colour)
        return Line2D([], [], label=entry.name, linewidth=2, **line_style(entry.index))

    handles = [handle(entry) for entry in chart.legend]
    figure.legend(handles=handles, loc="outside lower left", ncols=_legend_columns(chart), fontsize=9)


def _legend_columns(chart: Chart) -> int:
    """How many names of the legend fit beside each other."""
    widest = max((len(entry.name) for entry in chart.legend), default=0)
    return max(1, min(len(chart.legend), int(52 / (widest + 6))))
