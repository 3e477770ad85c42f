"""Colours of the page and of its figures, in one place.

Figures are drawn once, in the light colours. In the page each of those becomes a CSS variable (``var(--series-0)``), so
that one drawing serves light, dark and print; files beside the page keep the light colours on white. Series also
differ in dash and marker, so that no reader depends on colour.

The first two colours of a series are the blue and the vermilion of Okabe and Ito (2008). The others were searched for:
every pair lies at least 20 apart (CIE 1976; 2 is just noticeable) for common vision, protanopia, deuteranopia and
tritanopia, and each has a contrast of 3 on its background.
"""

from __future__ import annotations

from typing import NamedTuple


class Colour(NamedTuple):
    """A CSS variable and its two values."""

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

SERIES = (
    Colour("series-0", "#0072b2", "#4ba6e0"),
    Colour("series-1", "#d55e00", "#f5803e"),
    Colour("series-2", "#0faa62", "#49f899"),
    Colour("series-3", "#af86a8", "#db8ba3"),
    Colour("series-4", "#733e00", "#ffd935"),
    Colour("series-5", "#8054ee", "#b1deff"),
    Colour("series-6", "#5b3f60", "#ebf1e5"),
    Colour("series-7", "#780024", "#93578e"),
)
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2), (9, 2), (3, 1.5, 1.5, 1.5, 1.5, 1.5))
# matplotlib's markers, and what they look like in a box of 32 by 12.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
OUTLINES = (
    "M16 1a5 5 0 1 0 .01 0Z",
    "M11.5 1.5h9v9h-9Z",
    "M16 1l5.5 10h-11Z",
    "M16 0l6 6-6 6-6-6Z",
    "M16 11l5.5-10h-11Z",
    "M14 1h4v3h3v4h-3v3h-4v-3h-3v-4h3Z",
    "M13 1l3 3 3-3 2 2-3 3 3 3-2 2-3-3-3 3-2-2 3-3-3-3Z",
    "M16 0l1.6 4.3h4.4l-3.5 2.8 1.3 4.5-3.8-2.7-3.8 2.7 1.3-4.5-3.5-2.8h4.4Z",
)
PAGE = (TEXT, MUTED, LINE, PAPER, PANEL, ACCENT, ALARM, ALARM_PANEL)


def series(index: int) -> Colour:
    """The colour of a series; beyond the palette colours repeat, with another dash and marker."""
    return SERIES[index % len(SERIES)]


def dashes(index: int) -> tuple[float, ...]:
    """On-off lengths in points of a series' line; empty: solid."""
    return DASHES[(index + index // len(SERIES)) % len(DASHES)]


def marker(index: int) -> str:
    """matplotlib's marker of a series."""
    return MARKERS[(index + index // len(SERIES)) % len(MARKERS)]


def outline(index: int) -> str:
    """The same marker as an SVG path in a box of 32 by 12."""
    return OUTLINES[MARKERS.index(marker(index))]


def css_variables(mode: str) -> str:
    """Declarations of all variables for ``light`` or ``dark``."""
    return " ".join(f"--{colour.name}: {getattr(colour, mode)};" for colour in (*PAGE, *SERIES))
