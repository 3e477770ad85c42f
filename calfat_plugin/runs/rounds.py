"""``rounds.csv``: a row a round."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

from calfat_plugin.disk import reporting_disk_errors, write_text
from calfat_plugin.errors import RunError
from calfat_plugin.results import RoundRecord

TEXT_COLUMNS = ("clients", "refused")
_REMEDY = "Restore the file from a copy, or start the run again in another directory."
TIMING_COLUMNS = ("seconds",)  # the only columns that two runs of one recipe and seed may differ in


class RoundsFile:
    """Appends rows; each is on disk before :meth:`append` returns.

    Args:
        path: the file.
        labels: monitored evaluators, a column each (strict counting beside it).
        num_clients: clients in total, for a column of losses and of update norms each.
    """

    def __init__(self, path: Path, labels: Sequence[str], num_clients: int) -> None:
        self.path, self.labels, self.num_clients = path, tuple(labels), num_clients

    @property
    def columns(self) -> list[str]:
        """The header."""
        clients = range(self.num_clients)
        return [
            "round",
            *(column for label in self.labels for column in (label, f"{label}_strict")),
            "heterogeneity",
            "clients",
            "refused",
            *(f"loss_{client}" for client in clients),
            *(f"update_norm_{client}" for client in clients),
            "bytes_down",
            "bytes_up",
            *TIMING_COLUMNS,
        ]

    def append(self, record: RoundRecord) -> None:
        """Add one row, and the header before the first.

        Raises:
            RunError: the disk refuses.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        if not self.path.exists():
            writer.writeheader()
        writer.writerow(self._row(record))
        with reporting_disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(text.getvalue())
            file.flush()
            os.fsync(file.fileno())

    def keep_until(self, last_round: int) -> None:
        """Drop rows after ``last_round``: a crash between row and checkpoint leaves one too many, or half a row.

        Raises:
            RunError: rows up to ``last_round`` are missing.
        """
        text = _text_of(self.path) if self.path.exists() else ""
        lines = text.splitlines(keepends=True)
        kept = lines[: last_round + 1]
        rounds = [line.partition(",")[0] for line in kept if line.endswith("\n")]
        if rounds != ["round", *map(str, range(1, last_round + 1))]:
            raise RunError(
                f"{self.path}: the rows of rounds 1 to {last_round}, which the checkpoint continues from, are not all "
                "there; the file was changed by hand. Start the run again without --resume."
            )
        _rows(self.path, kept)
        write_text(self.path, "".join(kept))

    def _row(self, record: RoundRecord) -> dict[str, object]:
        row: dict[str, object] = {
            "round": record.round,
            "heterogeneity": repr(record.heterogeneity),
            "clients": " ".join(map(str, record.clients)),
            # On one line, whatever a client or a plugin wrote: a row is a line, which keep_until counts on.
            "refused": " ".join("; ".join(f"{who}: {why}" for who, why in record.refused.items()).split()),
            "bytes_down": record.bytes_down,
            "bytes_up": record.bytes_up,
            "seconds": f"{record.seconds:.3f}",
        }
        for label, result in record.evaluations.items():
            row[label], row[f"{label}_strict"] = repr(result.accuracy), repr(result.accuracy_strict)
        row.update({f"loss_{client}": repr(loss) for client, loss in record.losses.items()})
        row.update({f"update_norm_{client}": repr(norm) for client, norm in record.update_norms.items()})
        return row


def read_rounds(path: Path) -> list[dict[str, str]]:
    """The rows as text, in order; empty fields are rounds without that measurement.

    Raises:
        RunError: there is no such file, or it is damaged.
    """
    lines = _text_of(path).splitlines(keepends=True)
    return _rows(path, [line for line in lines if line.endswith("\n")])  # without one: being written, or cut by a crash


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunError(f"{path}: no such file; the run has not finished a round yet.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RunError(f"{path}: cannot be read ({reason}). {_REMEDY}") from None


def _rows(path: Path, lines: Sequence[str]) -> list[dict[str, str]]:
    """The rows of the file's lines, each with a value for every column, numbers where numbers belong.

    Raises:
        RunError: a row is otherwise.
    """
    rows: list[dict[str, str]] = []
    try:
        reader = csv.DictReader(lines, strict=True)
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(f"expected {len(reader.fieldnames or ())} values")
            int(row["round"]), float(row["seconds"]), [int(client) for client in row["clients"].split()]
            for column in row.keys() - set(TEXT_COLUMNS):
                float(row[column] or 0)
            rows.append(row)
    except (ValueError, KeyError, csv.Error) as error:
        reason = f"no column {error}" if isinstance(error, KeyError) else error
        raise RunError(f"{path}: row {len(rows) + 1} is damaged ({reason}). {_REMEDY}") from None
    return rows


def seconds_of(path: Path) -> float:
    """Wall-clock seconds of all rounds in the file together; 0 without one."""
    return sum(float(row["seconds"]) for row in read_rounds(path)) if path.exists() else 0.0


def last_used(path: Path) -> dict[int, int]:
    """Client to the last round in which its update was used; without clients whose updates never were."""
    if not path.exists():
        return {}
    return {int(client): int(row["round"]) for row in read_rounds(path) for client in row["clients"].split()}
