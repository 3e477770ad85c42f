"""What the scripts of the studies write into pages: tables between two comments, and figures.

A table stands between ``<!-- STUDY: table argument -->`` and ``<!-- end -->``. ``python -m studies.STUDY.tables``
writes those of a study anew; a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
COLOURS = ("#0072b2", "#d55e00", "#936ffd", "#234e3b", "#c77962", "#2f033f", "#966a8d", "#833c0f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

Table = tuple[int, Sequence[Sequence[str]]]
"""How many columns are texts, and the rows, the head first."""
Tables = Mapping[str, Callable[[str], Table]]


def with_tables(page: str, study: str, tables: Tables) -> str:
    """The page with the tables of a study made anew."""

    def made(found: re.Match[str]) -> str:
        texts, (head, *rows) = tables[found[2]](found[3] or "")
        aligned = ["---" if index < texts else "--:" for index in range(len(head))]
        lines = [f"| {' | '.join(cells)} |" for cells in (head, aligned, *rows)]
        return f"{found[1]}{chr(10).join(lines)}\n\n{found[4]}"

    return re.sub(rf"(<!-- {study}: (\w+)(?: (\S+))? -->\n\n).*?(<!-- end -->)", made, page, flags=re.DOTALL)


def write_tables(page: Path, study: str, tables: Tables) -> None:
    page.write_text(with_tables(page.read_text(encoding="utf-8"), study, tables), encoding="utf-8")


def svg(draw: Callable[[Figure], None], file: Path, width: float, height: float) -> None:
    """A figure for pages: the same bytes each time on one machine, with texts as texts."""
    plain: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "studies",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(plain):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        figure.savefig(file, facecolor="white", metadata={"Date": None})
