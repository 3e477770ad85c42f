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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.report import theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 5.0  # inches: 360 points, so a point is about a pixel on a phone
_TALL = 3.7  # inches; taller ones are placed beside two others
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
    "grid.color": theme.LINE.light,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "patch.linewidth": 0,
    **dict.fromkeys(("axes.linewidth", "grid.linewidth"), 0.8),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), theme.MUTED.light),
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor"), theme.TEXT.light),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
}


@dataclass(frozen=True)
class Chart:
    """A figure to draw.

    Attributes:
        name: file name without ending, unique on a page.
        title: what it shows, in a few words.
        caption: what is seen in it, in a sentence or two; printed below it, and read out by screen readers.
        height: in inches, without title and legend; the width is always :data:`WIDTH`.
        draw: puts everything but the legend, which lists what has a label, into a fresh figure.
    """

    name: str
    title: str
    caption: str
    height: float
    draw: Callable[[Figure], None]


@dataclass(frozen=True)
class Drawing:
    """A figure on a page; ``source`` is its SVG as a data URI, ``tall`` asks for the room of two."""

    title: str
    caption: str
    tall: bool
    source: str


def render(chart: Chart, folder: Path) -> Drawing:
    """Draw a chart, write it to ``folder`` in each of :data:`FORMATS`, and return it for the page.

    Raises:
        OSError: the files cannot be written.
    """
    with _matplotlib() as matplotlib:
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
                figure.set_layout_engine("none")  # the layout found for the first is kept; finding it again costs time
    source = f"data:image/svg+xml;base64,{base64.b64encode(inline.getvalue()).decode()}"
    return Drawing(chart.title, chart.caption, chart.height > _TALL, source)


def legend_name(name: str) -> str:
    """A name for the legend; matplotlib leaves out those that begin with an underscore."""
    return f"\N{NO-BREAK SPACE}{name}" if name.startswith("_") else name


def _add_legend(figure: Figure) -> int:
    """List what has a label below the axes; returns the number of rows."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    if not names:
        return 0
    columns = int(_LEGEND_CHARACTERS / (max(map(len, names)) + _KEY_CHARACTERS))
    columns = max(1, min(len(names), columns))
    lines = [textwrap.fill(name, _LEGEND_CHARACTERS) for name in names]
    figure.legend(handles, lines, loc="outside lower left", ncols=columns, fontsize=9)
    return -(-sum(line.count("\n") + 1 for line in lines) // columns)


@contextmanager
def _matplotlib() -> Iterator[Any]:
    """matplotlib itself, with its font cache in a temporary folder unless it has a place already."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matplotlib"
    has_place = "matplotlib" in sys.modules or os.environ.get("MPLCONFIGDIR") or any(usual.glob("fontlist-*.json"))
    with ExitStack() as stack:
        if not has_place:
            os.environ["MPLCONFIGDIR"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="calfat-"))
            stack.callback(os.environ.pop, "MPLCONFIGDIR")
        import matplotlib

        if not has_place:
            import matplotlib.font_manager  # looks for fonts, and writes down what it found

            matplotlib.get_cachedir()
            matplotlib.get_configdir()
        fonts = logging.getLogger("fontTools")  # at the level of a run's log, it has a line for each table of a font
        stack.callback(fonts.setLevel, fonts.level)
        fonts.setLevel(logging.WARNING)
        yield matplotlib
