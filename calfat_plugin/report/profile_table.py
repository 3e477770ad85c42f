"""``profile.json``: where the time of a run with ``--profile`` went, as rows for the console, the log and the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from calfat_plugin.report.numbers import counted, percent

ELSE = "everything else: host, messages, waiting"
_INDENT = "  "


class Row(NamedTuple):
    """One span: seconds and calls are those of one part on average, ``share`` is of the part's seconds."""

    name: str
    depth: int
    seconds: float
    share: float
    calls: float | None


def spending(profile: Mapping[str, Any]) -> list[tuple[str, list[Row]]]:
    """(title, rows) of the rounds together, and of the final evaluation; without parts that the run did not reach."""
    rounds = [part for part in profile.get("parts", ()) if part["name"].startswith("round ")]
    others = [part for part in profile.get("parts", ()) if part not in rounds]
    title = f"a round of {profile.get('method')}, mean of {counted(len(rounds), 'round')}"
    titled = [(title, rounds)] if rounds else []
    titled += [(part["name"], [part]) for part in others]
    return [(title, list(_rows(parts))) for title, parts in titled]


def spending_text(profile: Mapping[str, Any]) -> str:
    """The same for a terminal and a log."""
    lines = []
    for title, rows in spending(profile):
        width = max(len(_INDENT * row.depth + row.name) for row in rows)
        lines.append(f"{title:<{width}}  {'seconds':>9}  {'share':>7}  {'calls':>7}")
        for row in rows:
            name, calls = _INDENT * row.depth + row.name, cells(row)[-1]
            lines.append(f"{name:<{width}}  {row.seconds:>9.4f}  {percent(row.share):>7}  {calls:>7}".rstrip())
    return "\n".join(lines)


def cells(row: Row) -> list[str]:
    """Seconds, share and calls as people read them."""
    return [f"{row.seconds:.4f}", percent(row.share), "" if row.calls is None else f"{row.calls:,.4g}"]


def _rows(parts: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    whole = sum(part["seconds"] for part in parts) or 1.0
    seconds: dict[tuple[str, ...], float] = {}
    calls: dict[tuple[str, ...], float] = {}
    for span in (span for part in parts for span in part["spans"]):
        path = tuple(span["path"])
        seconds[path] = seconds.get(path, 0.0) + span["seconds"]
        calls[path] = calls.get(path, 0) + span["calls"]

    def row(name: str, depth: int, spent: float, called: float | None) -> Row:
        return Row(name, depth, spent / len(parts), spent / whole, None if called is None else called / len(parts))

    def below(outer: tuple[str, ...], spent: float) -> Iterator[Row]:
        inner = [path for path in seconds if path and path[:-1] == outer]
        for path in inner:
            yield row(path[-1], len(outer), seconds[path], calls[path])
            yield from below(path, seconds[path])
        if inner or not outer:
            yield row("other" if outer else ELSE, len(outer), spent - sum(seconds[path] for path in inner), None)

    yield from below((), whole)
    yield row("in all", 0, whole, None)
