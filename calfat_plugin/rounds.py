"""``rounds.jsonl``: a finished round a line, written once and read back as the record that it was.

It is the one file of rounds that this package reads. ``rounds.csv`` is written beside it (``rounds_csv.py``), and made
anew from it where somebody has changed it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

from calfat_plugin.disk import opened_regular, read_json, read_whole, reporting_disk_errors, write_text
from calfat_plugin.errors import RunError
from calfat_plugin.results import RoundRecord
from calfat_plugin.rounds_csv import RoundTables
from calfat_plugin.typed_json import as_json, from_json

_LARGEST = 2_000_000_000  # bytes: a thousand clients in ten thousand rounds have 1.3 GB
_LONGEST_ROUND = 1e10  # seconds: three hundred years
_REMEDY = "Restore the file from a copy, or start the run again in another directory."


class RoundsFile:
    """Appends the rounds of a run to ``rounds.jsonl``, and to the tables beside it."""

    def __init__(self, path: Path, tables: RoundTables) -> None:
        self.path, self.tables = path, tables
        self.paths = [path, *tables.paths]  # what a round is written to
        self._size: int | None = None  # of the file as this process has left it; None: it has not written yet

    def append(self, record: RoundRecord) -> None:
        """Add one round. A crash of this process keeps it, one of the system may not."""
        size = 0
        if self.path.exists():
            size = self.path.stat().st_size
        if self._size not in (None, size):  # the rounds before would be missing
            raise RunError(
                f"{self.path}: was removed or changed while the run writes it: it has {size} bytes, and had "
                f"{self._size} after the last round. {_REMEDY}"
            )
        with reporting_disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))
        self._size = self.path.stat().st_size
        if self.tables.are_as_left:
            self.tables.append(record)
        else:
            self.tables.write(read_rounds(self.path))

    def rewrite(self, records: Sequence[RoundRecord]) -> None:
        """Write the file and its tables anew, with these rounds alone: a crash may have left more, or half a line."""
        if records:
            write_text(self.path, "".join(map(_line, records)))
            self._size = self.path.stat().st_size
        else:
            self.path.unlink(missing_ok=True)
        self.tables.write(records)


def read_rounds(path: Path) -> list[RoundRecord]:
    """The rounds of a ``rounds.jsonl``, in order; none without a file.

    Raises:
        RunError: a line is damaged, or the run is of an earlier version, which wrote ``rounds.csv`` alone.
    """
    table = path.with_name("rounds.csv")
    if table.exists() and not path.exists():
        versions = read_json(path.with_name("environment.json")).get("versions") or {}
        raise RunError(
            f"{path}: no such file, but there is {table.name}. This version needs {path.name}, and calfat-plugin "
            f"{versions.get('calfat-plugin') or 'of an unknown version'} wrote this run. Read it with that version, "
            "restore the file from a copy, or start the run again in another directory."
        )
    records = []
    for number, line in enumerate(_complete_lines(path), start=1):
        try:
            record = from_json(RoundRecord, json.loads(line))
            if not 0 <= record.seconds <= _LONGEST_ROUND:  # their sum would not fit into results.json
                raise ValueError(f"seconds is {record.seconds}")
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path}: line {number} is damaged ({error}). {_REMEDY}") from None
        records.append(record)
    return records


def _complete_lines(path: Path) -> list[str]:
    """The lines of a file but the last if it is without its end: it is being written, or was cut by a crash."""
    try:
        text = read_whole(path, _LARGEST).decode()
    except FileNotFoundError:  # before the first round is finished
        return []
    except OSError as error:
        raise _unreadable(path, error.strerror) from None
    except ValueError as error:
        raise _unreadable(path, str(error)) from None
    return text.split("\n")[:-1]


def number_of_rounds(path: Path) -> int:
    """How many rounds the file has; 0 without one. What is in its lines does not matter."""
    return RoundCount(path).now()


class RoundCount:
    """How many rounds a ``rounds.jsonl`` has while a run writes it. What was counted once is not read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rounds = 0
        self._end = 0  # bytes: where the last counted line ends

    def now(self) -> int:
        """The finished rounds; 0 without a file. A line without its end is being written, or was cut by a crash."""
        try:
            with opened_regular(self._path) as handle, os.fdopen(os.dup(handle), "rb") as file:
                if os.fstat(handle).st_size > _LARGEST:
                    raise OSError(errno.EFBIG, f"more than {_LARGEST:,} bytes", str(self._path))
                if self._end:
                    file.seek(self._end - 1)
                    if file.read(1) != b"\n":  # a resumed run has written it anew, without its last rounds
                        self._rounds, self._end = 0, 0
                        file.seek(0)
                for line in file:
                    if line.endswith(b"\n"):
                        self._rounds += 1
                        self._end += len(line)
        except FileNotFoundError:  # before the first round is finished
            self._rounds, self._end = 0, 0
        except OSError as error:
            raise _unreadable(self._path, error.strerror) from None
        return self._rounds


def _line(record: RoundRecord) -> str:
    return json.dumps(as_json(record)) + "\n"


def _unreadable(path: Path, reason: str | None) -> RunError:
    return RunError(f"{path}: cannot be read ({reason}). {_REMEDY}")
