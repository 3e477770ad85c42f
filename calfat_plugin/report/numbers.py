"""Numbers as people read them, on pages, on the console and in tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from calfat_plugin.maths.intervals import Difference

_LISTED = 3  # ids that are named
_MINUS = re.compile(r"(?<!\w)-(?=\d)")
NOTHING = "\N{EN DASH}"  # on a page, where there is no number
NO_NUMBER = "not run"  #: in the place of the accuracy under an attack that did not run


def percent(fraction: float) -> str:
    """``0.8342`` becomes ``83.4 %``."""
    return f"{100 * fraction:.1f} %"


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
    """A measured number that is no accuracy, with four digits: ``0.0123``; from 1,000 on, without its fraction."""
    if 999.5 <= abs(number) < 1e15:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def points(difference: float) -> str:
    """A difference of two fractions in percentage points, with its sign: ``+0.31``."""
    return f"{100 * difference:+.2f}"


def paired_points(difference: Difference | None) -> str:
    """A difference that is paired over seeds, with its interval if it has one: ``-3.21 [-4.10, -2.32]``.

    Empty for fewer than two seeds.
    """
    if difference is None or difference.seeds < 2:
        return ""
    if difference.interval is None:
        return points(difference.mean)
    low, high = map(points, difference.interval)
    return f"{points(difference.mean)} [{low}, {high}]"


def signed(text: str) -> str:
    """The text with true minus signs before its numbers; markup stays markup."""
    return type(text)(_MINUS.sub("\N{MINUS SIGN}", text))


def listed_ids(ids: Sequence[int], names: Sequence[str] = ()) -> str:
    """``3, 7``, or the names that they are indexes of; of more than three ``3, 7, 9 and 7 more``."""
    texts = []
    for number in ids[:_LISTED]:
        texts.append(names[number] if number < len(names) else str(number))
    text = ", ".join(texts)
    if len(ids) > _LISTED:
        text += f" and {len(ids) - _LISTED} more"
    return text


def listing(names: Sequence[str]) -> str:
    """``a, b and c``."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def duration(seconds: float) -> str:
    """``75`` becomes ``1 min 15 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s"


def clock(seconds: float) -> str:
    """``75`` becomes ``1:15``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


def counted(number: int, one: str) -> str:
    """``5 clients``, ``1 client``."""
    ending = "" if number == 1 else "s"
    return f"{number:,} {one}{ending}"
