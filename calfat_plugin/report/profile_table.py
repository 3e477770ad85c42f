"""Where the time of a run with ``--profile`` went, as tables for console, log and page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calfat_plugin.report.numbers import counted, percent
from calfat_plugin.report.table import Table, markdown
from calfat_plugin.run_files import Part, Spending

ELSE = "everything else: host, messages, waiting"


def spending(profile: Spending) -> list[Table]:
    """Of the rounds together, and of the final evaluation; without parts that the run did not reach.

    A row is a span within those that it is named after; seconds and calls are those of one part on average.
    """
    rounds = [part for part in profile.parts if part.name.startswith("round ")]
    others = [part for part in profile.parts if part not in rounds]
    title = f"a round of {profile.method}, mean of {counted(len(rounds), 'round')}"
    titled = [(title, rounds)] if rounds else []
    titled += [(part.name, [part]) for part in others]
    return [Table(title, [title, "seconds", "share", "calls"], list(_rows(parts))) for title, parts in titled]


def spending_text(profile: Spending) -> str:
    """The same for a terminal and a log."""
    return "\n".join(map(markdown, spending(profile)))


def _rows(parts: Sequence[Part]) -> Iterator[list[str]]:
    whole = sum(part.seconds for part in parts) or 1.0
    seconds: dict[tuple[str, ...], float] = {}
    calls: dict[tuple[str, ...], float] = {}
    for part in parts:
        for span in part.spans:
            seconds[span.path] = seconds.get(span.path, 0.0) + span.seconds
            calls[span.path] = calls.get(span.path, 0) + span.calls

    def row(path: tuple[str, ...], spent: float) -> list[str]:
        called = f"{calls[path] / len(parts):,.4g}" if path in calls else ""
        return [" / ".join(path), f"{spent / len(parts):.4f}", percent(spent / whole), called]

    def below(outer: tuple[str, ...], spent: float) -> Iterator[list[str]]:
        inner = [path for path in seconds if path and path[:-1] == outer]
        for path in inner:
            yield row(path, seconds[path])
            yield from below(path, seconds[path])
        if inner or not outer:
            yield row((*outer, "other") if outer else (ELSE,), spent - sum(seconds[path] for path in inner))

    yield from below((), whole)
    yield row(("in all",), whole)
