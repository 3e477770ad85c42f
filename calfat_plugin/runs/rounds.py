"""Writes ``rounds.csv``, a row a round, and says what a run that continues needs of it."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from calfat_plugin.disk import long_csv_fields, reporting_disk_errors, write_text
from calfat_plugin.earlier import RELEASE, WORST, round_as_today
from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.alarms import Alarm
from calfat_plugin.experiment import Experiment
from calfat_plugin.results import RoundRecord
from calfat_plugin.rounds_csv import ALARMS, read_rounds, rows_of, text_of

_MEMORY = ("peak_memory_mb", "peak_gpu_memory_mb")
COST_COLUMNS = ("seconds", *_MEMORY)  # the only columns that two runs of one recipe and seed may differ in
_RATE = "learning_rate"
_LISTED = 5  # rounds whose alarms are quoted on the page
_LARGE_UPDATE = "large-update"
_ADVICE = {
    _LARGE_UPDATE: "Such an update can replace the model: look at that client's data, learning rate and intentions.",
    "dominant-client": "It is nearly the whole average: check its number of examples, or use weights: uniform.",
    "attack-goes-down": "The loop climbs attack_loss: has it the wrong sign? What such training gives is not robust.",
    "implausible-loss": "The round's loss leaves it out, the average has its update: look at that client.",
}


class RoundsFile:
    """Appends rows.

    Args:
        path: the file.
        labels: monitored evaluators, a column each, with others beside it (``rounds_csv.SUFFIXES``).
        num_clients: clients in total, for a column of losses and of update norms each.
        metrics: what plugins measure beside, a column each (``RoundRecord.metrics``).
    """

    def __init__(self, path: Path, labels: Sequence[str], num_clients: int, metrics: Sequence[str] = ()) -> None:
        self.path, self.labels, self.num_clients, self.metrics = path, tuple(labels), num_clients, tuple(metrics)

    @classmethod
    def of(cls, path: Path, experiment: Experiment) -> RoundsFile:
        """The file of a run."""
        labels = [pick.label for pick in experiment.monitor.evaluators]
        return cls(path, labels, experiment.num_clients, experiment.metric_columns)

    @property
    def columns(self) -> list[str]:
        """The header."""
        clients = range(self.num_clients)
        return [
            "round",
            *(column for label in self.labels for column in (label, f"{label}{RELEASE}")),
            "heterogeneity",
            "clients",
            "refused",
            *(f"loss_{client}" for client in clients),
            *(f"update_norm_{client}" for client in clients),
            *self.metrics,
            "bytes_down",
            "bytes_up",
            "seconds",
            *self._added,
        ]

    @property
    def _added(self) -> list[str]:
        """The last columns, in this order, some of which files of older versions lack."""
        return [
            *(ALARMS, *_MEMORY, _RATE),
            *(f"{label}{suffix}" for label in self.labels for suffix in WORST),
            *(f"{name}_{client}" for name in ("num_examples", "weight") for client in range(self.num_clients)),
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

        A file of an older version gets the columns of today.

        Raises:
            RunError: rows up to ``last_round`` are missing.
        """
        lines = text_of(self.path).splitlines(keepends=True)
        kept = lines[: last_round + 1]
        rounds = [line.partition(",")[0] for line in kept if line.endswith("\n")]
        if rounds != ["round", *map(str, range(1, last_round + 1))]:
            raise RunError(
                f"{self.path}: the rows of rounds 1 to {last_round}, which the checkpoint continues from, are not all "
                "there; the file was changed by hand. Start the run again without --resume."
            )
        rows = rows_of(self.path, kept)
        with long_csv_fields():
            present = round_as_today(dict.fromkeys(next(csv.reader(kept)), ""))
        missing = [column for column in self._added if column not in present]
        text = io.StringIO()
        writer = csv.DictWriter(text, [*present, *missing], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())

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
            row[label], row[f"{label}{RELEASE}"] = repr(result.accuracy), repr(result.accuracy_release)
            worst = zip(WORST, (result.worst_class, result.worst_clients), strict=True)
            row |= {f"{label}{suffix}": repr(found.accuracy) for suffix, found in worst if found is not None}
        row.update({f"loss_{client}": repr(loss) for client, loss in record.losses.items()})
        row.update({f"update_norm_{client}": repr(norm) for client, norm in record.update_norms.items()})
        row.update({f"num_examples_{client}": count for client, count in record.num_examples.items()})
        row.update({f"weight_{client}": repr(weight) for client, weight in record.weights.items()})
        row.update({name: repr(value) for name, value in record.metrics.items()})
        return row


def alarms_of(path: Path) -> tuple[Alarm, ...]:
    """The findings about clients of all rounds in the file, an alarm for each kind; none without any."""
    found: dict[str, dict[str, list[str]]] = {code: {} for code in _ADVICE}  # code to round to sentences
    for row in read_rounds(path):
        for finding in filter(None, row.get(ALARMS, "").split("; ")):
            code, _, text = finding.partition(": ")
            if code not in _ADVICE:  # before there were others
                code, text = _LARGE_UPDATE, finding
            found[code].setdefault(row["round"], []).append(text)
    alarms = []
    for code, rounds in found.items():
        listed = [f"round {number}: {'; '.join(texts)}" for number, texts in rounds.items()]
        more = f" (and {len(listed) - _LISTED} more rounds in rounds.csv)" if len(listed) > _LISTED else ""
        if listed:
            alarms.append(Alarm(code, f"{'; '.join(listed[:_LISTED])}{more}. {_ADVICE[code]}", ()))
    return tuple(alarms)


def seconds_of(path: Path) -> float:
    """Wall-clock seconds of all rounds in the file together; 0 without one."""
    return sum(float(row["seconds"]) for row in read_rounds(path))


def last_used(path: Path) -> dict[int, int]:
    """Client to the last round in which its update was used; without clients whose updates never were."""
    return {int(client): int(row["round"]) for row in read_rounds(path) for client in row["clients"].split()}
