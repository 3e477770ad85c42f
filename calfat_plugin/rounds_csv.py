"""Reads ``rounds.csv``: for runs that continue, for reports and for Python. ``runs/rounds.py`` writes it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from calfat_plugin.disk import long_csv_fields
from calfat_plugin.earlier import RELEASE, WORST, round_as_today
from calfat_plugin.errors import RunError

ALARMS = "alarms"
TEXT_COLUMNS = ("clients", "refused", ALARMS)
#: What the columns of a monitored evaluator have after its label, beside the column of its accuracy.
SUFFIXES = (RELEASE, *WORST)
_LONGEST_ROUND = 1e10  # seconds: three hundred years
_REMEDY = "Restore the file from a copy, or start the run again in another directory."


def read_rounds(path: Path) -> list[dict[str, str]]:
    """The rows as text, in order, none without a file; empty fields are rounds without that measurement.

    Raises:
        RunError: it cannot be read, or is damaged.
    """
    lines = text_of(path).splitlines(keepends=True)
    # The last line may be without its end: it is being written, or was cut by a crash.
    return rows_of(path, [line for line in lines if line.endswith("\n")])


def text_of(path: Path) -> str:
    """What is in the file; nothing before the first round is finished.

    Raises:
        RunError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RunError(f"{path}: cannot be read ({reason}). {_REMEDY}") from None


def rows_of(path: Path, lines: Sequence[str]) -> list[dict[str, str]]:
    """The rows of the file's lines, each with a value for every column of today, numbers where numbers belong.

    Raises:
        RunError: a row is otherwise.
    """
    rows: list[dict[str, str]] = []
    try:
        with long_csv_fields():
            reader = csv.DictReader(lines, strict=True)
            for row in reader:
                _check_row(row, len(reader.fieldnames or ()))
                rows.append(round_as_today(row))
    except (ValueError, KeyError, csv.Error) as error:
        reason = f"no column {error}" if isinstance(error, KeyError) else error
        raise RunError(f"{path}: row {len(rows) + 1} is damaged ({reason}). {_REMEDY}") from None
    return rows


def _check_row(row: Mapping[str, str], columns: int) -> None:
    """Refuse with ``ValueError`` or ``KeyError``."""
    if None in row or None in row.values():
        raise ValueError(f"expected {columns} values")
    int(row["round"]), [int(client) for client in row["clients"].split()]
    for column in row.keys() - set(TEXT_COLUMNS):
        float(row[column] or 0)
    if not 0 <= float(row["seconds"]) <= _LONGEST_ROUND:  # a sum of others would not fit into results.json
        raise ValueError(f"seconds is {row['seconds']}")
