"""Colours of the page and of its figures, in one place.

Figures are drawn in light colours. On a dark page the CSS filter :data:`DARK_FILTER` inverts their lightness and keeps
their hue. Series also differ in dash and marker, so that no reader depends on colour.

The first two colours of a series are the blue and the vermilion of Okabe and Ito (2008). The others were searched for:
as drawn and behind the filter, every pair is at least 20 apart (CIE 1976; 2 is just noticeable) for common vision,
protanopia, deuteranopia and tritanopia, and each has a contrast of 3 on its background.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Colour(NamedTuple):
    """A CSS variable of the page and its two values."""

    name: str
    light: str
    dark: str


TEXT = Colour("text", "#1d232a", "#e6e9ed")
MUTED = Colour("muted", "#586069", "#a3abb5")
LINE = Colour("line", "#d5dae0", "#39414a")
PAPER = Colour("paper", "#ffffff", "#14181d")
PANEL = Colour("panel", "#f5f7f9", "#1d232a")
ACCENT = Colour("accent", "#0069a6", "#6cb8ea")
ALARM = Colour("alarm", "#8a4b00", "#ffbf66")
ALARM_PANEL = Colour("alarm-panel", "#fff4e0", "#33260f")
SHADOW = Colour("shadow", "#9aa3ad", "#5d6874")  # of an edge beyond which a table goes on
PAGE = (TEXT, MUTED, LINE, SHADOW, PAPER, PANEL, ACCENT, ALARM, ALARM_PANEL)

DARK_FILTER = "invert(1) hue-rotate(180deg)"
SERIES = ("#0072b2", "#d55e00", "#936ffd", "#234e3b", "#c77962", "#2f033f", "#966a8d", "#833c0f")
#: matplotlib's line styles: solid, then on-off lengths in points.
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 2)), (0, (3, 1.5, 1.5, 1.5, 1.5, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def series(index: int) -> str:
    """The colour of a series."""
    return SERIES[index % len(SERIES)]


def line_style(index: int, *, marked: bool) -> dict[str, Any]:
    """matplotlib's arguments for a series' line; beyond the palette colours repeat, with another dash and marker."""
    other = index + index // len(SERIES)
    marker = MARKERS[other % len(MARKERS)] if marked else ""
    return {"color": series(index), "linestyle": DASHES[other % len(DASHES)], "marker": marker}
