"""The table of columns in docs/run_directory.md: ``python tests/runs/columns.py`` writes it."""

from __future__ import annotations

from pathlib import Path

from calfat_plugin import rounds_csv

PAGE = Path(__file__).resolve().parents[2] / "docs" / "run_directory.md"
BEGIN, END = "<!-- columns: made by `python tests/runs/columns.py` -->", "<!-- end of columns -->"


def table() -> str:
    """The columns as a Markdown table, in the order of the file."""
    rows = [f"| `{column.name}` | {column.about} |" for column in rounds_csv.COLUMNS]
    return "\n".join(["| column | content |", "| --- | --- |", *rows])


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
