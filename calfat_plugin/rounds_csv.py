"""``rounds.csv``, a row a round: its columns, each declared once, how rows are written, and how they are read.

Of many clients, their columns are in ``clients.csv`` beside it, a value a row; whoever reads rows finds them there.
What is added to :data:`COLUMNS` is written and read, and refused as a label of an evaluator; it is on the page, and
given to loggers and suites, as its declaration says. ``python tests/runs/columns.py`` adds it to docs/run_directory.md.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from calfat_plugin.disk import read_whole, reporting_disk_errors, write_text
from calfat_plugin.errors import RunError
from calfat_plugin.results import OVERFITTED_ATTACK, EvaluationResult, RoundRecord

LABEL, CLIENT, METRIC = "<label>", "<k>", "<metric>"
MOST_IN_COLUMNS = 10  #: clients that have columns of their own in ``rounds.csv``
_CLIENTS_HEADER = ("round", "client", "column", "value")
_LARGEST = 500_000_000  # bytes: a thousand clients in ten thousand rounds have some 300 MB in clients.csv
_LONGEST_FIELD = 2**31 - 1  # characters; the most that the library takes on every system
_LONGEST_ROUND = 1e10  # seconds: three hundred years
_REMEDY = "Restore the file from a copy, or start the run again in another directory."


@dataclass(frozen=True)
class Column:
    """A column, or one for each monitored evaluator, client or metric of a plugin, whose name has a placeholder."""

    name: str
    about: str  #: what it holds, in Markdown
    value: Callable[[RoundRecord], Any] | None = None  #: of a round, or by key; else its attribute ``name``
    kind: str = "number"  #: ``number``, ``text``, or ``share`` (from 0 to 1, on pages in percent)
    written: Callable[[Any], str] = str  #: makes the text of a value
    page: str = ""  #: heading in the page's table of rounds; empty: it is not there
    logged: str = ""  #: name for loggers, which get a number, of a text the number of its entries; empty: none
    in_results: Literal["", "last", "sum"] = ""  #: of which rounds ``results.json`` has the number
    is_cost: bool = False  #: whether two runs of one recipe and seed may differ in it
    key: str | int | None = None  #: what took the placeholder's place

    @property
    def place(self) -> str:
        """The placeholder in its name; empty without one."""
        return next((place for place in (LABEL, CLIENT, METRIC) if place in self.name), "")

    def of(self, key: str | int) -> Column:
        """The column of one label, client or metric."""
        named = {field: getattr(self, field).replace(self.place, str(key)) for field in ("name", "page", "logged")}
        return dataclasses.replace(self, key=key, **named)

    def found(self, record: RoundRecord) -> Any:
        """Its value in a round; None where nothing was measured."""
        value = getattr(record, self.name) if self.value is None else self.value(record)
        return value if self.key is None else value.get(self.key)


def _of_each(number: Callable[[EvaluationResult], Any]) -> Callable[[RoundRecord], dict[str, Any]]:
    return lambda record: {label: number(result) for label, result in record.evaluations.items()}


COLUMNS: tuple[Column, ...] = (
    Column("round", "number of the round, from 1"),
    Column(
        "<label>",
        "accuracy of the global model (with `calfat.ema` of its average) after the round: the share of examples that "
        "are classified correctly both clean and under attack, of the validation split if there is one, else of the "
        "test split. Empty in rounds that are not monitored, and where the attack did not run (`alarms` says why)",
        value=_of_each(lambda result: result.accuracy),
        kind="share",
        page="<label> %",
        logged="accuracy/<label>",
    ),
    Column(
        "<label>_release",
        "the share that is classified correctly under attack, whatever the clean image: the [convention of the CalFAT "
        "release](evaluation.md#evaluators)",
        value=_of_each(lambda result: result.accuracy_release),
        kind="share",
        logged="accuracy/<label>_release",
    ),
    Column(
        "heterogeneity",
        "s² of the CalFAT paper, section 3.2, before aggregation ([methods.md](methods.md))",
        page="s²",
        logged="heterogeneity",
    ),
    Column(
        "clients",
        "numbers of the clients whose updates were used, separated by spaces",
        kind="text",
        written=lambda clients: " ".join(map(str, clients)),
    ),
    Column(
        "refused",
        "clients whose updates were not used, each with the reason: `3: reason; 5: reason`",
        kind="text",
        # On one line, whatever a client or a plugin wrote: a row is a line, which keep_until counts on.
        written=lambda refused: " ".join("; ".join(f"{who}: {why}" for who, why in refused.items()).split()),
        logged="refused",
    ),
    Column(
        "loss_<k>",
        "mean training loss of client k in its last local epoch; with `local_steps`, in the round. It is what the "
        "client claims",
        value=lambda record: record.losses,
        logged="loss/client_<k>",
    ),
    Column(
        "update_norm_<k>",
        "L2 norm of client k's update over the trainable parameters",
        value=lambda record: record.update_norms,
        logged="update_norm/client_<k>",
    ),
    Column(
        METRIC,
        "what a plugin declares: `train/<name>` of the trainer, `server/<name>` of the aggregator, `<label>/<name>` of "
        "an evaluator ([beyond_two_losses.md](beyond_two_losses.md))",
        value=lambda record: record.metrics,
        page=METRIC,
        logged=METRIC,
        in_results="last",
    ),
    Column(
        "bytes_down",
        "bytes of the tensors that the clients of the round received",
        logged="bytes/down",
        in_results="sum",
    ),
    Column("bytes_up", "bytes of the tensors that the server received from them", logged="bytes/up", in_results="sum"),
    Column(
        "seconds",
        "wall-clock time of the round, with its evaluation",
        written="{:.3f}".format,
        page="seconds",
        logged="seconds",
        is_cost=True,
    ),
    Column(
        "alarms",
        "findings about clients whose updates were used, and about monitored attacks that did not run, each a code and "
        "a sentence (`large-update: the update of …`), separated by `; ` ([evaluation.md](evaluation.md#alarms))",
        kind="text",
        written="; ".join,
    ),
    Column(
        "peak_memory_mb",
        "peak of memory in MB (10^6 bytes); [speed.md](speed.md#memory)",
        written="{:.1f}".format,
        page="peak memory, MB",
        logged="peak_memory_mb",
        is_cost=True,
    ),
    Column(
        "peak_gpu_memory_mb",
        "the same of the GPU's memory",
        written="{:.1f}".format,
        page="peak on the GPU, MB",
        logged="peak_gpu_memory_mb",
        is_cost=True,
    ),
    Column(
        "learning_rate",
        "learning rate of the round, by `train_args`. A trainer of a plugin may have another one if the recipe has no "
        "schedule",
        logged="learning_rate",
    ),
    Column(
        "<label>_worst_class",
        "lowest accuracy of a class, by the counting of `<label>`",
        value=_of_each(lambda result: result.worst_class and result.worst_class.accuracy),
        kind="share",
        page="<label>, worst class %",
    ),
    Column(
        "<label>_worst_clients",
        "mean accuracy of the worst 10 % of clients ([evaluation.md](evaluation.md#worst-classes-and-clients)). Empty "
        "in a cross-silo run, where the server does not know the clients' labels",
        value=_of_each(lambda result: result.worst_clients and result.worst_clients.accuracy),
        kind="share",
        page="<label>, worst clients %",
    ),
    Column(
        "<label>_guess",
        "share of the most frequent class of the images: what a model gets that gives them all this one answer",
        value=_of_each(lambda result: result.guess),
        kind="share",
    ),
    Column(
        "update_cosine_<k>",
        "cosine of client k's update to the coordinate-wise median of the round's updates",
        value=lambda record: record.update_cosines,
        logged="update_cosine/client_<k>",
    ),
    Column(
        "attackers_named",
        "share of the attackers of `calfat.clients` that a finding about their updates has named so far "
        "([evaluation.md](evaluation.md#alarms)). Empty without attackers",
        in_results="last",
    ),
    Column("others_named", "likewise, of all other clients", in_results="last"),
    Column(
        "num_examples_<k>", "number of training examples that client k claims", value=lambda record: record.num_examples
    ),
    Column(
        "weight_<k>",
        "share of the average that client k's update got, from 0 to 1. Empty where the aggregator of a plugin does not "
        "say",
        value=lambda record: record.weights,
    ),
    Column(
        "passes",
        "how often a training image went forward through the network, by the attacks and training steps of all clients "
        "together. It is what the clients count",
        page="passes",
        logged="passes",
        in_results="sum",
    ),
    Column(
        "overfitted",
        "clients of which `alarms` says that they have overfitted their attack",
        value=lambda record: sum(alarm.startswith(OVERFITTED_ATTACK) for alarm in record.alarms),
        in_results="sum",
    ),
    Column(
        "alignment_<k>",
        "mean cosine of the loss's gradient at clean images of client k's last batch and one step of eps further, as "
        "the client claims: near 1 where its loss is nearly linear there. Empty where training attacks in three steps "
        "or more, and where the model gives these images one answer, wrong for most",
        value=lambda record: record.alignments,
        logged="alignment/client_<k>",
    ),
)
"""In the order of the file, in which the columns of a label follow each other."""
COST_COLUMNS = tuple(column.name for column in COLUMNS if column.is_cost)


def columns_of(labels: Iterable[str], clients: Iterable[int] = (), metrics: Iterable[str] = ()) -> list[Column]:
    """The columns of a run, in the order of the file, with these monitored evaluators, clients and plugins' metrics."""
    keys: dict[str, list[Any]] = {LABEL: list(labels), CLIENT: list(clients), METRIC: list(metrics)}
    found: list[Column] = []
    for _, group in groupby(COLUMNS, key=lambda column: column.place == LABEL or column.name):
        together = list(group)
        if place := together[0].place:
            found += [column.of(key) for key in keys[place] for column in together]
        else:
            found += together
    return found


def text_columns() -> set[str]:
    """Names of the columns that hold no numbers."""
    return {column.name for column in COLUMNS if column.kind == "text"}


def owner_of(label: str, labels: Collection[str]) -> str:
    """Whose column has the name of an evaluator's label: ``of every run``, ``of 'pgd20'``; empty where it is free."""
    for column in COLUMNS:
        if column.place == LABEL and column.name != LABEL:
            owner = label.removesuffix(column.name.removeprefix(LABEL))
            if owner in labels and owner != label:
                return f"of '{owner}'"
    others = (column.name for column in COLUMNS if column.place in ("", CLIENT))
    pattern = "|".join(re.escape(name).replace(CLIENT, "[0-9]+") for name in others)
    return "of every run" if re.fullmatch(pattern, label) else ""


# --- writing ----------------------------------------------------------------------------------------------------------


class RoundsFile:
    """Appends the rows of a run with these monitored evaluators, clients in total, and plugins' metrics."""

    def __init__(self, path: Path, labels: Sequence[str], num_clients: int, metrics: Sequence[str] = ()) -> None:
        self.path, self.labels, self._metrics = path, tuple(labels), tuple(metrics)
        wide = num_clients <= MOST_IN_COLUMNS
        self.paths = [path] if wide else [clients_csv(path), path]  # what a round is written to
        columns = columns_of(labels, range(num_clients) if wide else (), metrics)
        self.columns = [column.name for column in columns]  # the header
        of_evaluators = tuple(f"{label}/" for label in labels)  # the final evaluation has its own
        self._sizes: dict[Path, int] = {}  # of the files as this process has left them
        found = (column for column in columns if column.in_results)
        self.in_results = [column for column in found if not column.name.startswith(of_evaluators)]

    def append(self, record: RoundRecord) -> None:
        """Add one row, and the header before the first. A crash of this process keeps it, one of the system may not."""
        columns = columns_of(self.labels, record.clients, self._metrics)
        found = ((column, column.found(record)) for column in columns)
        row = {column.name: "" if value is None else column.written(value) for column, value in found}
        for path in self.paths:
            self._refuse_change(path)
            text = self._text(path, [row], header=not path.exists())
            with reporting_disk_errors(path), path.open("a", encoding="utf-8") as file:
                file.write(text)
            self._sizes[path] = path.stat().st_size

    def keep_until(self, last_round: int) -> None:
        """Drop rows after ``last_round``: a crash between row and checkpoint leaves one too many, or half a row."""
        kept = _whole_lines(self.path)[: last_round + 1]
        rounds = [line.partition(",")[0] for line in kept]
        has_all = rounds == ["round", *map(str, range(1, last_round + 1))]
        rows = _rows_of(self.path, kept) if has_all else []
        if not has_all or any(not row.get(f"loss_{client}") for row in rows for client in row["clients"].split()):
            path = self.paths[0] if has_all else self.path
            raise RunError(
                f"{path}: the rows of rounds 1 to {last_round}, which the checkpoint continues from, are not all "
                "there; the file was changed by hand. Start the run again without --resume."
            )
        for path in self.paths:
            write_text(path, self._text(path, rows))
            self._sizes[path] = path.stat().st_size

    def _refuse_change(self, path: Path) -> None:
        """Refuse to add to a file that somebody has removed or changed: the rounds before would be missing in it."""
        size = path.stat().st_size if path.exists() else 0
        if self._sizes.get(path, size) != size:
            raise RunError(
                f"{path}: was removed or changed while the run writes it: it has {size} bytes, and had "
                f"{self._sizes[path]} after the last round. {_REMEDY}"
            )

    def _text(self, path: Path, rows: Sequence[Mapping[str, str]], *, header: bool = True) -> str:
        """What one of the files says of rounds."""
        lines: list[Sequence[str]]
        if path == self.path:
            lines = [self.columns, *([row.get(name, "") for name in self.columns] for row in rows)]
        else:
            names = [column.name.removesuffix(CLIENT) for column in COLUMNS if column.place == CLIENT]
            of_clients = ((row, client, name) for row in rows for client in row["clients"].split() for name in names)
            lines = [
                _CLIENTS_HEADER,
                *(
                    (row["round"], client, name.removesuffix("_"), value)
                    for row, client, name in of_clients
                    if (value := row.get(name + client))
                ),
            ]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(lines if header else lines[1:])
        return text.getvalue()


# --- reading ----------------------------------------------------------------------------------------------------------


def read_rounds(path: Path) -> list[dict[str, str]]:
    """The rows as text, in order, none without a file; empty fields are rounds without that measurement."""
    return _rows_of(path, _whole_lines(path))


def number_of_rows(path: Path) -> int:
    """How many rounds the file has; 0 without one. What is in the rows does not matter."""
    return max(0, len(_whole_lines(path)) - 1)  # less the header


def seconds_of(path: Path) -> float:
    """Wall-clock seconds of all rounds in the file together; 0 without one."""
    return sum(float(row["seconds"]) for row in read_rounds(path))


def last_used(path: Path) -> dict[int, int]:
    """Client to the last round in which its update was used; without clients whose updates never were."""
    return {int(client): int(row["round"]) for row in read_rounds(path) for client in row["clients"].split()}


def clients_csv(path: Path) -> Path:
    """The file of the clients of a ``rounds.csv``; it is there where they are more than :data:`MOST_IN_COLUMNS`."""
    return path.with_name("clients.csv")


def _rows_of(path: Path, lines: Sequence[str]) -> list[dict[str, str]]:
    """The rows of the file's lines, each with as many values as there are columns, and numbers where they belong."""
    rows: list[dict[str, str]] = []
    texts, limit = text_columns(), csv.field_size_limit(_LONGEST_FIELD)
    try:
        reader = csv.DictReader(lines, strict=True)
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(f"expected {len(reader.fieldnames or ())} values")
            int(row["round"]), [int(client) for client in row["clients"].split()]
            for name in row.keys() - texts:
                float(row[name] or 0)
            if not 0 <= float(row["seconds"]) <= _LONGEST_ROUND:  # their sum would not fit into results.json
                raise ValueError(f"seconds is {row['seconds']}")
            rows.append(row)
    except (ValueError, KeyError, csv.Error) as error:
        reason = f"no column {error}" if isinstance(error, KeyError) else error
        raise RunError(f"{path}: row {len(rows) + 1} is damaged ({reason}). {_REMEDY}") from None
    finally:
        csv.field_size_limit(limit)
    if rows and "loss_0" not in rows[0]:
        _add_clients(rows, clients_csv(path))
    return rows


def _add_clients(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Give rows what ``clients.csv`` has of their rounds, as the columns of clients; it may have more rounds."""
    by_round = {row["round"]: row for row in rows}
    for number, line in enumerate(_whole_lines(path)):
        round, *fields = line.rstrip("\n").split(",")
        if round in by_round:
            try:
                client, column, value = fields
                int(client), float(value)
            except ValueError as error:
                raise RunError(f"{path}: row {number} is damaged ({error}). {_REMEDY}") from None
            by_round[round][f"{column}_{client}"] = value


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file but the last if it is without its end: it is being written, or was cut by a crash."""
    try:
        text = read_whole(path, _LARGEST).decode()
    except FileNotFoundError:  # before the first round is finished
        return []
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RunError(f"{path}: cannot be read ({reason}). {_REMEDY}") from None
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
