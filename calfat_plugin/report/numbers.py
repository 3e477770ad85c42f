"""Numbers as people read them, on pages, on the console and in tables."""

from __future__ import annotations

NOTHING = "\N{EN DASH}"  # on a page, where there is no number


def percent(fraction: float) -> str:
    """``0.8342`` becomes ``83.4 %``."""
    return f"{100 * fraction:.1f} %"


def unbroken_percent(fraction: float) -> str:
    """The same for pages, never broken at the end of a line."""
    return percent(fraction).replace(" ", "\N{NO-BREAK SPACE}")


def bare_percent(fraction: float | None, digits: int = 2) -> str:
    """``0.8342`` becomes ``83.42``; nothing becomes a dash."""
    return NOTHING if fraction is None else f"{100 * fraction:.{digits}f}"


def points(difference: float) -> str:
    """A difference of two fractions in percentage points, with its sign: ``+0.31``."""
    return f"{100 * difference:+.2f}"


def page_points(difference: float) -> str:
    """The same for pages, with a true minus sign."""
    return points(difference).replace("-", "\N{MINUS SIGN}")


def duration(seconds: float) -> str:
    """``75`` becomes ``1 min 15 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def counted(number: int, one: str) -> str:
    """``5 clients``, ``1 client``."""
    return f"{number:,} {one}{'' if number == 1 else 's'}"
