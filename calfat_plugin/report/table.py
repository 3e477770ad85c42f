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
    """A place of a table; without a text a dash stands there."""

    text: str
    spread: str = ""  # behind a ±
    beside: Sequence[str] = ()  # smaller, behind it or below it: an interval, a published number
    best: bool = False  # in bold
    beyond: bool = False  # to be noticed: the last text of ``beside``, else the text


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """Rows under a head: first columns of texts, then columns of numbers."""

    name: str
    head: Sequence[str]
    rows: Sequence[Row]
    texts: int = 1  # columns of texts
    notes: Sequence[str] = ()  # what the numbers mean
    groups: Sequence[str] = ()  # for each row, what it stands under; empty: all rows are one group

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def cells(self) -> list[list[Cell]]:
        return [list(map(_cell, row)) for row in self.rows]

    @property
    def blocks(self) -> Mapping[str, list[list[Cell]]]:
        """Group to its rows."""
        blocks: dict[str, list[list[Cell]]] = {}
        for group, row in zip(self.groups or [""] * len(self.rows), self.cells, strict=True):
            blocks.setdefault(group, []).append(row)
        return blocks


def _cell(content: str | Cell) -> Cell:
    return content if isinstance(content, Cell) else Cell(content)


def one_line(text: str) -> str:
    return " ".join(text.split())


# --- renderers --------------------------------------------------------------------------------------------------------


def print_table(console: Console, table: Table) -> None:
    """On a console of rich's; a name may be a path to be copied, so it is one line however narrow the table is."""
    from rich.table import Table as ConsoleTable

    on_console = ConsoleTable(show_edge=False, pad_edge=False)
    for heading in table.head[: table.texts]:
        on_console.add_column(heading)
    for place, heading in enumerate(table.head[table.texts :]):
        on_console.add_column(heading, justify="right", no_wrap=place < _UNBROKEN)
    for row in table.cells:
        texts = ["\n".join((cell.text, *cell.beside)) for cell in row[: table.texts]]
        numbers = [_plain(cell, "", "{}") for cell in row[table.texts :]]
        on_console.add_row(*texts, *numbers)
    if table.name:
        console.print(table.name, soft_wrap=True)
    console.print(on_console)


def markdown(table: Table) -> str:
    """A table of pipes, then its notes. Texts stay texts: none is Markdown or HTML; numbers are Markdown of ours."""
    rows = [[_in_pipes(text) for text in table.head]]
    for row in table.cells:
        texts = [_in_pipes(_plain(cell, NOTHING, "**{}**")) for cell in row[: table.texts]]
        numbers = [_plain(cell, NOTHING, "**{}**") for cell in row[table.texts :]]
        rows.append([*texts, *numbers])
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width for width in widths[: table.texts]]
    rule += ["-" * (width - 1) + ":" for width in widths[table.texts :]]
    rows.insert(1, rule)
    lines = []
    for written in rows:
        cells = [text.ljust(width) for text, width in zip(written[: table.texts], widths, strict=False)]
        for text, width in zip(written[table.texts :], widths[table.texts :], strict=True):
            cells.append(text.rjust(width))
        lines.append(f"| {' | '.join(cells)} |\n")
    lines += [f"\n{in_markdown(note)}\n" for note in table.notes]
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
    head = ["$n$" if heading == "n" else _in_latex(heading) for heading in table.head]
    lines.append(_latex_row(head))
    for block in table.blocks.values():
        lines.append("    \\midrule")
        for row in block:
            texts = [_in_latex(cell.text) for cell in row[: table.texts]]
            numbers = [_number_in_latex(cell) for cell in row[table.texts :]]
            lines.append(_latex_row([*texts, *numbers]))
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
    text = f"{cell.text} ± {cell.spread}" if cell.spread else cell.text or nothing
    return " ".join((bold.format(text) if cell.best else text, *cell.beside))


def in_markdown(text: str) -> str:
    """A text of others on one line, none of it Markdown or HTML."""
    return _MARKDOWN.sub(r"\\\g<0>", one_line(text))


def _number_in_latex(cell: Cell) -> str:
    mean = f"\\mathbf{{{cell.text}}}" if cell.best else cell.text or "--"
    text = f"${mean} \\pm {cell.spread}$" if cell.spread else mean
    small = _SIGN.sub(r"$\g<0>$", " ".join(cell.beside))
    return text + (f" {{\\scriptsize {small}}}" if small else "")


def _in_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
