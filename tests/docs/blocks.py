"""Tables of documentation pages that are made of committed records: between ``<!-- NAME: table argument -->`` and
``<!-- end -->``. ``pytest FILE --update-snapshots`` writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Table = tuple[int, Sequence[Sequence[str]]]
"""How many columns are texts, and the rows, the head first."""


def blocks_of(page: str, name: str) -> list[str]:
    """The tables that a page names."""
    return [found[2] for found in _pattern(name).finditer(page)]


def with_tables(page: str, name: str, tables: Mapping[str, Callable[[str], Table]]) -> str:
    """The page with its tables made anew."""

    def made(found: re.Match[str]) -> str:
        texts, (head, *rows) = tables[found[2]](found[3] or "")
        aligned = ["---" if index < texts else "--:" for index in range(len(head))]
        lines = [f"| {' | '.join(cells)} |" for cells in (head, aligned, *rows)]
        return f"{found[1]}{chr(10).join(lines)}\n\n{found[5]}"

    return _pattern(name).sub(made, page)


def check_tables(path: Path, name: str, tables: Mapping[str, Callable[[str], Table]], *, update: bool) -> None:
    """That a page has all of the tables, as the records say; or write them."""
    page = path.read_text(encoding="utf-8")
    found = with_tables(page, name, tables)
    if update:
        path.write_text(found, encoding="utf-8")
    assert set(blocks_of(page, name)) == set(tables)
    assert update or page == found, "pytest with --update-snapshots writes the tables anew"


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: (\w+)(?: (\S+))? -->\n\n)(.*?)(<!-- end -->)", re.DOTALL)
