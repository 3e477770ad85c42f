"""Numbers as people read them, on pages, on the console and in tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from calfat_plugin.maths.intervals import Difference

_LISTED = 3  # ids that are named
_MINUS = re.compile(r"(?<!\w)-(?=\d)")
NOTHING = "\N{EN DASH}"  # on a page, where there is no number


def percent(fraction: float) -> str:
    """``0.8342`` becomes ``83.4 %``."""
    return f"{100 * fraction:.1f} %"


NO_NUMBER = "not run"  #: in the place of the accuracy under an attack that did not run


def accuracy_text(fraction: float | None) -> str:
    """``83.4 %``; ``not run`` where there is no number."""
    return NO_NUMBER if fraction is None else percent(fraction)


def unbroken_percent(fraction: float) -> str:
    """The same for pages, never broken at the end of a line."""
    return percent(fraction).replace(" ", "\N{NO-BREAK SPACE}")


def bare_percent(fraction: float | None) -> str:
    """``0.8342`` becomes ``83.42``; nothing becomes a dash."""
    return NOTHING if fraction is None else f"{100 * fraction:.2f}"


def interval(low: float, high: float) -> str:
    """An interval of fractions in percent: ``[79.3, 86.7]``."""
    return f"[{100 * low:.1f}, {100 * high:.1f}]"


def figure(number: float) -> str:
    """A measured number that is no accuracy: ``5,400,000``, ``0.0123``, four digits or the whole number."""
    return f"{number:,.0f}" if 999.5 <= abs(number) < 1e15 else f"{number:.4g}"


def points(difference: float) -> str:
    """A difference of two fractions in percentage points, with its sign: ``+0.31``."""
    return f"{100 * difference:+.2f}"


def paired_points(difference: Difference | None) -> str:
    """``-3.21 [-4.10, -2.32]``, a difference that is paired over seeds, or without brackets where it has no interval;
    empty for fewer than two seeds."""
    if difference is None or difference.seeds < 2:
        return ""
    if difference.interval is None:
        return points(difference.mean)
    low, high = map(points, difference.interval)
    return f"{points(difference.mean)} [{low}, {high}]"


def signed(text: str) -> str:
    """Numbers of pages have true minus signs; HTML stays HTML."""
    return type(text)(_MINUS.sub("\N{MINUS SIGN}", text))


def listed_ids(ids: Sequence[int], names: Sequence[str] = ()) -> str:
    """``3, 7``, or the names that they are indexes of; of more than three ``3, 7, 9 and 7 more``."""
    shown = ", ".join(names[each] if each < len(names) else str(each) for each in ids[:_LISTED])
    return shown + (f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else "")


def duration(seconds: float) -> str:
    """``75`` becomes ``1 min 15 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def clock(seconds: float) -> str:
    """``75`` becomes ``1:15``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counted(number: int, one: str) -> str:
    """``5 clients``, ``1 client``."""
    return f"{number:,} {one}{'' if number == 1 else 's'}"
