"""``rounds.csv``: a row a round."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from calfat_plugin.disk import long_csv_fields, reporting_disk_errors, write_text
from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.alarms import Alarm
from calfat_plugin.results import RoundRecord

ALARMS = "alarms"
TEXT_COLUMNS = ("clients", "refused", ALARMS)
_REMEDY = "Restore the file from a copy, or start the run again in another directory."
_MEMORY = ("peak_memory_mb", "peak_gpu_memory_mb")
COST_COLUMNS = ("seconds", *_MEMORY)  # the only columns that two runs of one recipe and seed may differ in
_RATE = "learning_rate"
_ADDED = (ALARMS, *_MEMORY, _RATE)  # the last columns, in this order, some of which files of older versions lack
_LISTED = 5  # rounds whose alarms are quoted on the page


class RoundsFile:
    """Appends rows.

    Args:
        path: the file.
        labels: monitored evaluators, a column each (strict counting beside it).
        num_clients: clients in total, for a column of losses and of update norms each.
        metrics: what plugins measure beside, a column each (``RoundRecord.metrics``).
    """

    def __init__(self, path: Path, labels: Sequence[str], num_clients: int, metrics: Sequence[str] = ()) -> None:
        self.path, self.labels, self.num_clients, self.metrics = path, tuple(labels), num_clients, tuple(metrics)

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
            *self.metrics,
            "bytes_down",
            "bytes_up",
            "seconds",
            *_ADDED,
        ]

    def append(self, record: RoundRecord) -> None:
        """Add one row, and the header before the first. A crash of this process keeps it, one of the system may not.

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

    def keep_until(self, last_round: int) -> None:
        """Drop rows after ``last_round``: a crash between row and checkpoint leaves one too many, or half a row.

        A file of an older version, without the last columns, gets them.

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
        header, *rows = (line.rstrip("\n") for line in kept)
        missing = [column for column in _ADDED if column not in header.split(",")]
        lines = [",".join([header, *missing]), *(row + "," * len(missing) for row in rows)]
        write_text(self.path, "".join(f"{line}\n" for line in lines))

    def _row(self, record: RoundRecord) -> dict[str, object]:
        row: dict[str, object] = {
            "round": record.round,
            "heterogeneity": repr(record.heterogeneity),
            "clients": " ".join(map(str, record.clients)),
            # On one line, whatever a client or a plugin wrote: a row is a line, which keep_until counts on.
            "refused": " ".join("; ".join(f"{who}: {why}" for who, why in record.refused.items()).split()),
            ALARMS: "; ".join(record.alarms),
            "bytes_down": record.bytes_down,
            "bytes_up": record.bytes_up,
            "seconds": f"{record.seconds:.3f}",
        }
        if record.learning_rate is not None:
            row[_RATE] = repr(record.learning_rate)
        row |= {column: f"{peak:.1f}" for column in _MEMORY if (peak := getattr(record, column)) is not None}
        for label, result in record.evaluations.items():
            row[label], row[f"{label}_strict"] = repr(result.accuracy), repr(result.accuracy_strict)
        row.update({f"loss_{client}": repr(loss) for client, loss in record.losses.items()})
        row.update({f"update_norm_{client}": repr(norm) for client, norm in record.update_norms.items()})
        row.update({name: repr(value) for name, value in record.metrics.items()})
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
        with long_csv_fields():
            reader = csv.DictReader(lines, strict=True)
            for row in reader:
                _check_row(row, len(reader.fieldnames or ()))
                rows.append(row)
    except (ValueError, KeyError, csv.Error) as error:
        reason = f"no column {error}" if isinstance(error, KeyError) else error
        raise RunError(f"{path}: row {len(rows) + 1} is damaged ({reason}). {_REMEDY}") from None
    return rows


def _check_row(row: Mapping[str, str], columns: int) -> None:
    """Refuse with ``ValueError`` or ``KeyError``."""
    if None in row or None in row.values():
        raise ValueError(f"expected {columns} values")
    int(row["round"]), float(row["seconds"]), [int(client) for client in row["clients"].split()]
    for column in row.keys() - set(TEXT_COLUMNS):
        float(row[column] or 0)


def alarms_of(path: Path) -> tuple[Alarm, ...]:
    """The findings about updates of all rounds in the file, as one alarm; none without any."""
    rows = read_rounds(path) if path.exists() else []
    found = [f"round {row['round']}: {row[ALARMS]}" for row in rows if row.get(ALARMS)]
    if not found:
        return ()
    more = f" (and {len(found) - _LISTED} more rounds in rounds.csv)" if len(found) > _LISTED else ""
    advice = "Such an update can replace the model: look at that client's data, learning rate and intentions."
    return (Alarm("large-update", f"{'; '.join(found[:_LISTED])}{more}. {advice}", ()),)


def seconds_of(path: Path) -> float:
    """Wall-clock seconds of all rounds in the file together; 0 without one."""
    return sum(float(row["seconds"]) for row in read_rounds(path)) if path.exists() else 0.0


def last_used(path: Path) -> dict[int, int]:
    """Client to the last round in which its update was used; without clients whose updates never were."""
    if not path.exists():
        return {}
    return {int(client): int(row["round"]) for row in read_rounds(path) for client in row["clients"].split()}
