"""Colours: enough contrast on their background, and told apart with any common colour vision."""

from __future__ import annotations

import itertools

import pytest

from calfat_plugin.report import theme

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
VISION = {
    "common": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
MODES = ("light", "dark")
# hue-rotate(180deg) on sRGB values, Filter Effects Module Level 1.
HUE_ROTATION = ((-0.574, 1.430, 0.144), (0.426, 0.430, 0.144), (0.426, 1.430, -0.856))


def linear(colour: str) -> tuple[float, ...]:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    """WCAG 2: 1 to 21."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: tuple[float, ...]) -> tuple[float, float, float]:
    red, green, blue = rgb
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089

    def f(t: float) -> float:
        return t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116

    return 116 * f(y) - 16, 500 * (f(x) - f(y)), 200 * (f(y) - f(z))


def difference(first: str, second: str, vision: str) -> float:
    """CIE76 distance of two colours as somebody sees them; 2 is just noticeable."""
    seen = []
    for colour in (first, second):
        rgb = linear(colour)
        mixed = (sum(a * b for a, b in zip(row, rgb, strict=True)) for row in VISION[vision])
        seen.append(lab(tuple(min(1.0, max(0.0, value)) for value in mixed)))
    return sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("colour", [theme.TEXT, theme.MUTED, theme.ACCENT, theme.ALARM], ids=lambda c: c.name)
def test_words_are_legible_on_page_and_panels(colour: theme.Colour, mode: str) -> None:
    grounds = [theme.PAPER, theme.PANEL, *([theme.ALARM_PANEL] if colour in (theme.ALARM, theme.TEXT) else [])]
    assert min(contrast(getattr(colour, mode), getattr(ground, mode)) for ground in grounds) >= 4.5


def on_page(colour: str, mode: str) -> str:
    """A figure's colour as a page shows it: in the dark behind the filter, computed as CSS defines it."""
    if mode == "light":
        return colour
    assert theme.DARK_FILTER == "invert(1) hue-rotate(180deg)"
    inverted = [1 - int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    rotated = (sum(a * b for a, b in zip(row, inverted, strict=True)) for row in HUE_ROTATION)
    return "#" + "".join(f"{round(255 * min(1.0, max(0.0, value))):02x}" for value in rotated)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("colour", [theme.TEXT, theme.MUTED], ids=lambda c: c.name)
def test_words_in_figures_are_legible(colour: theme.Colour, mode: str) -> None:
    assert contrast(on_page(colour.light, mode), getattr(theme.PAPER, mode)) >= 4.5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("colour", theme.SERIES)
def test_lines_stand_out_from_the_page(colour: str, mode: str) -> None:
    assert contrast(on_page(colour, mode), getattr(theme.PAPER, mode)) >= 3  # what WCAG 2.1 asks of graphics


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("mode", MODES)
def test_series_are_distinct_by_everybody(mode: str, vision: str) -> None:
    colours = [on_page(colour, mode) for colour in theme.SERIES]
    pairs = {pair: difference(*pair, vision) for pair in itertools.combinations(colours, 2)}
    nearest = min(pairs, key=lambda pair: pairs[pair])
    assert pairs[nearest] >= 20, nearest


def test_series_also_differ_in_dash_and_marker() -> None:
    styles = [(theme.series(i), theme.dashes(i), theme.marker(i)) for i in range(16)]
    assert len(set(styles)) == 16
    for first, second in itertools.combinations(range(16), 2):
        if theme.series(first) == theme.series(second):
            assert theme.dashes(first) != theme.dashes(second)
            assert theme.marker(first) != theme.marker(second)


def test_no_two_colours_of_the_page_share_a_name() -> None:
    assert len({colour.name for colour in theme.PAGE}) == len(theme.PAGE)
