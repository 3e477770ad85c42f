"""Colours of the page and its figures have enough contrast on their background, in both modes."""

from __future__ import annotations

import pytest

from calfat_plugin.report import theme

MODES = ("light", "dark")
# hue-rotate(180deg) on sRGB values, Filter Effects Module Level 1.
HUE_ROTATION = ((-0.574, 1.430, 0.144), (0.426, 0.430, 0.144), (0.426, 1.430, -0.856))


def contrast(first: str, second: str) -> float:
    """WCAG 2: 1 to 21."""
    luminances = []
    for colour in (first, second):
        channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        luminances.append(sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)


def in_figure(colour: str, mode: str) -> str:
    """A figure's colour as a page shows it: in the dark behind the filter, computed as CSS defines it."""
    if mode == "light":
        return colour
    assert theme.DARK_FILTER == "invert(1) hue-rotate(180deg)"
    inverted = [1 - int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    rotated = (sum(a * b for a, b in zip(row, inverted, strict=True)) for row in HUE_ROTATION)
    return "#" + "".join(f"{round(255 * min(1.0, max(0.0, value))):02x}" for value in rotated)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("colour", [theme.TEXT, theme.MUTED, theme.ACCENT, theme.ALARM], ids=lambda c: c.name)
def test_words_are_legible_on_page_panels_and_figures(colour: theme.Colour, mode: str) -> None:
    grounds = [theme.PAPER, theme.PANEL, *([theme.ALARM_PANEL] if colour in (theme.ALARM, theme.TEXT) else [])]
    assert min(contrast(getattr(colour, mode), getattr(ground, mode)) for ground in grounds) >= 4.5
    if colour in (theme.TEXT, theme.MUTED):
        assert contrast(in_figure(colour.light, mode), getattr(theme.PAPER, mode)) >= 4.5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("colour", theme.SERIES)
def test_lines_stand_out_from_the_page(colour: str, mode: str) -> None:
    assert contrast(in_figure(colour, mode), getattr(theme.PAPER, mode)) >= 3  # what WCAG 2.1 asks of graphics


def test_series_differ_in_dash_and_marker_where_colours_repeat() -> None:
    number = len(theme.SERIES)
    for index in range(number):
        assert theme.series(index) == theme.series(index + number)
        assert theme.dashes(index) != theme.dashes(index + number)
        assert theme.marker(index) != theme.marker(index + number)
