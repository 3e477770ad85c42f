"""Tables: what stands in them, and how they look on the console, in Markdown, in LaTeX and as CSV.

Their HTML is the macro ``table`` of ``templates/macros.html``.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

NOTHING = "-"  # in Markdown and CSV, where there is no number
_UNBROKEN = 3  # columns of numbers that stay whole on a narrow console: those that matter most come first
_SIGN = re.compile(r"-|(?<!e)\+")
# What Markdown would read as HTML, an entity, emphasis, code or a link.
_MARKDOWN = re.compile(r"[\\`*<\[\]]|(?<!\w)_|_(?!\w)|~(?=~)|&(?=#?\w+;)")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


class Cell(NamedTuple):
    """What is written in one place of a table; a dash, where the text is empty."""

    text: str
    spread: str = ""  # behind a ±
    beside: Sequence[str] = ()  # smaller, behind the text or below it: an interval, a published number
    best: bool = False  # in bold
    beyond: bool = False  # marked: the last text of ``beside``, or else the text


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """Rows under a head: first columns of texts, then columns of numbers."""

    name: str
    head: Sequence[str]
    rows: Sequence[Row]
    texts: int = 1  # columns of texts
    notes: Sequence[str] = ()  # what the numbers mean
    groups: Sequence[str] = ()  # for each row, the heading of its block; empty: all rows are one block

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def cells(self) -> list[list[Cell]]:
        """The rows, each text as a cell."""
        rows = []
        for row in self.rows:
            cells = []
            for content in row:
                cells.append(content if isinstance(content, Cell) else Cell(content))
            rows.append(cells)
        return rows

    @property
    def blocks(self) -> Mapping[str, list[list[Cell]]]:
        """Heading to the rows below it."""
        blocks: dict[str, list[list[Cell]]] = {}
        headings = self.groups or [""] * len(self.rows)
        for heading, row in zip(headings, self.cells, strict=True):
            blocks.setdefault(heading, []).append(row)
        return blocks


def one_line(text: str) -> str:
    return " ".join(text.split())


# --- renderers --------------------------------------------------------------------------------------------------------


def print_table(console: Console, table: Table) -> None:
    """Print a table on a console of rich's. Its name stays on one line, because it may be a path to be copied."""
    from rich.table import Table as ConsoleTable

    on_console = ConsoleTable(show_edge=False, pad_edge=False)
    for heading in table.head[: table.texts]:
        on_console.add_column(heading)
    for place, heading in enumerate(table.head[table.texts :]):
        on_console.add_column(heading, justify="right", no_wrap=place < _UNBROKEN)
    for row in table.cells:
        texts = []
        for column, cell in enumerate(row):
            texts.append("\n".join((cell.text, *cell.beside)) if column < table.texts else _plain(cell, "", "{}"))
        on_console.add_row(*texts)
    if table.name:
        console.print(table.name, soft_wrap=True)
    console.print(on_console)


def markdown(table: Table) -> str:
    """A table of pipes, then its notes. In columns of texts, Markdown and HTML are escaped."""
    rows = [[_in_pipes(text) for text in table.head]]
    for row in table.cells:
        texts = []
        for column, cell in enumerate(row):
            text = _plain(cell, NOTHING, "**{}**")
            texts.append(_in_pipes(text) if column < table.texts else text)
        rows.append(texts)
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = []
    for column, width in enumerate(widths):
        rule.append("-" * width if column < table.texts else "-" * (width - 1) + ":")
    rows.insert(1, rule)
    lines = []
    for texts in rows:
        cells = []
        for column, (text, width) in enumerate(zip(texts, widths, strict=True)):
            cells.append(text.ljust(width) if column < table.texts else text.rjust(width))
        lines.append(f"| {' | '.join(cells)} |\n")
    for note in table.notes:
        lines.append(f"\n{in_markdown(note)}\n")
    return "".join(lines)


def _in_pipes(text: str) -> str:
    return in_markdown(text).replace("|", "\\|")


def latex(table: Table, label: str, comments: Iterable[str]) -> str:
    """A booktabs ``table``, its name as caption; lines of ``comments`` below it."""
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{_in_latex(table.name)}}}",
        f"  \\label{{tab:{label}}}",
        f"  \\begin{{tabular}}{{{'l' * table.texts}{'r' * (len(table.head) - table.texts)}}}",
        "    \\toprule",
    ]
    head = []
    for heading in table.head:
        head.append("$n$" if heading == "n" else _in_latex(heading))
    lines.append(_latex_row(head))
    for block in table.blocks.values():
        lines.append("    \\midrule")
        for row in block:
            cells = []
            for column, cell in enumerate(row):
                cells.append(_in_latex(cell.text) if column < table.texts else _number_in_latex(cell))
            lines.append(_latex_row(cells))
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}"]
    lines += [f"% {comment}" for comment in comments]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return f"    {' & '.join(cells)} \\\\"


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Rows, the head first, as a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _plain(cell: Cell, nothing: str, bold: str) -> str:
    """A cell on one line; ``nothing`` in the place of an empty text, and ``bold`` with braces around the best one."""
    text = cell.text or nothing
    if cell.spread:
        text = f"{cell.text} ± {cell.spread}"
    if cell.best:
        text = bold.format(text)
    return " ".join((text, *cell.beside))


def in_markdown(text: str) -> str:
    """A text on one line, with Markdown and HTML escaped."""
    return _MARKDOWN.sub(r"\\\g<0>", one_line(text))


def _number_in_latex(cell: Cell) -> str:
    text = cell.text or "--"
    if cell.best:
        text = f"\\mathbf{{{text}}}"
    if cell.spread:
        text = f"${text} \\pm {cell.spread}$"
    small = _SIGN.sub(r"$\g<0>$", " ".join(cell.beside))
    if small:
        text += f" {{\\scriptsize {small}}}"
    return text


def _in_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
