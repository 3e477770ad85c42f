"""Numbers as people read them, on pages, on the console and in tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from calfat_plugin.maths.intervals import Difference, Score

_LISTED = 3  # ids that are named
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


def interval(low: float, high: float) -> str:
    """An interval of fractions in percent: ``[79.3, 86.7]``."""
    return f"[{100 * low:.1f}, {100 * high:.1f}]"


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


class ScoreTexts(NamedTuple):
    """What a table says of a score, whatever the table is written in; empty where there is nothing to say."""

    mean: str  # ``61.35``: of an accuracy in percent, of a figure as it is
    std: str  # ``0.42``; empty for a single seed
    interval: str  # ``[60.8, 61.9]``, of the mean
    reported: str  # ``64.69``
    difference: str  # ``-3.34``, to what is reported
    rival: str  # ``-3.21 [-4.10, -2.32]``, to its rival, paired over seeds
    best: bool  # whether it is clearly the best
    beyond: bool  # whether the difference is beyond the tolerance


def score_texts(score: Score) -> ScoreTexts:
    """A score in words."""

    def text(number: float | None) -> str:
        return "" if number is None else bare_percent(number) if score.is_accuracy else f"{number:.4g}"

    interval_text = "" if score.interval is None else "[{:.4g}, {:.4g}]".format(*score.interval)
    return ScoreTexts(
        mean=text(score.mean),
        std=text(score.std),
        interval=interval(*score.interval) if score.interval and score.is_accuracy else interval_text,
        reported="" if score.reported is None else bare_percent(score.reported),
        difference="" if score.difference is None else points(score.difference),
        rival="" if score.rival is None else paired_points(score.rival.difference),
        best=score.is_clear_best,
        beyond=bool(score.beyond),
    )


def on_page(text: str) -> str:
    """Differences as pages have them: with true minus signs, an interval never broken at the end of a line."""
    return text.replace("-", "\N{MINUS SIGN}").replace(", ", ",\N{NO-BREAK SPACE}")


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
