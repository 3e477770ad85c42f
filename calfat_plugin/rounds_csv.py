"""The numbers of a round by name, each declared once, and ``rounds.csv``, which has them for people and pandas.

Of many clients, their columns are in ``clients.csv`` beside it, a value a row. This package reads neither: it reads
``rounds.jsonl`` (``rounds.py``).

What is added to :data:`COLUMNS` is written, and refused as a label of an evaluator. It is on the page, and given to
loggers and suites, as its declaration says. ``python tests/runs/columns.py`` adds it to docs/run_directory.md.
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

from calfat_plugin.disk import reporting_disk_errors, write_text
from calfat_plugin.results import OVERFITTED_ATTACK, EvaluationResult, RoundRecord

LABEL, CLIENT, METRIC = "<label>", "<k>", "<metric>"
MOST_IN_COLUMNS = 10  #: clients that have columns of their own in ``rounds.csv``
_CLIENTS_HEADER = ("round", "client", "column", "value")


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
        for place in (LABEL, CLIENT, METRIC):
            if place in self.name:
                return place
        return ""

    def of(self, key: str | int) -> Column:
        """The column of one label, client or metric."""
        names = {}
        for field in ("name", "page", "logged"):
            names[field] = getattr(self, field).replace(self.place, str(key))
        return dataclasses.replace(self, key=key, **names)

    def value_in(self, record: RoundRecord) -> Any:
        """Its value in a round; None where nothing was measured."""
        if self.value is None:
            value = getattr(record, self.name)
        else:
            value = self.value(record)
        if self.key is None:
            return value
        return value.get(self.key)

    def text_in(self, record: RoundRecord) -> str:
        """The same as a file has it; empty where nothing was measured."""
        value = self.value_in(record)
        if value is None:
            return ""
        return self.written(value)


def _of_each(number: Callable[[EvaluationResult], Any]) -> Callable[[RoundRecord], dict[str, Any]]:
    return lambda record: {label: number(result) for label, result in record.evaluations.items()}


def _written_reasons(refused: Mapping[int, str]) -> str:
    """On one line, whatever a client or a plugin wrote: people count lines."""
    text = "; ".join(f"{client}: {reason}" for client, reason in refused.items())
    return " ".join(text.split())


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
        written=_written_reasons,
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
    columns: list[Column] = []
    # Neighbours of a label are one block, which each label repeats.
    for _, block in groupby(COLUMNS, key=lambda column: column.place == LABEL or column.name):
        declared = list(block)
        place = declared[0].place
        if place:
            for key in keys[place]:
                columns += [column.of(key) for column in declared]
        else:
            columns += declared
    return columns


def owner_of(label: str, labels: Collection[str]) -> str:
    """Whose column has the name of an evaluator's label: ``of every run``, ``of 'pgd20'``; empty where it is free."""
    for column in COLUMNS:
        if column.place == LABEL and column.name != LABEL:
            owner = label.removesuffix(column.name.removeprefix(LABEL))
            if owner in labels and owner != label:
                return f"of '{owner}'"
    for column in COLUMNS:
        if column.place in ("", CLIENT) and re.fullmatch(re.escape(column.name).replace(CLIENT, "[0-9]+"), label):
            return "of every run"
    return ""


class RoundTables:
    """Writes ``rounds.csv``, and of many clients ``clients.csv``, in a run directory.

    Args:
        folder: the run directory.
        labels: of the monitored evaluators.
        num_clients: in total.
        metrics: names of what plugins measure.
    """

    def __init__(self, folder: Path, labels: Sequence[str], num_clients: int, metrics: Sequence[str] = ()) -> None:
        self.rounds = folder / "rounds.csv"
        self.clients: Path | None = None
        clients = range(num_clients)
        if num_clients > MOST_IN_COLUMNS:
            self.clients = folder / "clients.csv"
            clients = range(0)
        self._columns = columns_of(labels, clients, metrics)
        self._sizes: dict[Path, int] = {}  # of the files as this process has left them

    @property
    def paths(self) -> list[Path]:
        if self.clients is None:
            return [self.rounds]
        return [self.clients, self.rounds]

    @property
    def header(self) -> list[str]:
        return [column.name for column in self._columns]

    def write(self, records: Sequence[RoundRecord]) -> None:
        """Write the files anew; without a round, remove them."""
        for path in self.paths:
            if records:
                write_text(path, self._text(path, records, header=True))
                self._sizes[path] = path.stat().st_size
            else:
                path.unlink(missing_ok=True)
                self._sizes.pop(path, None)

    def append(self, record: RoundRecord) -> None:
        """Add one round to files that :attr:`are_as_left`."""
        for path in self.paths:
            text = self._text(path, [record], header=not path.exists())
            with reporting_disk_errors(path), path.open("a", encoding="utf-8") as file:
                file.write(text)
            self._sizes[path] = path.stat().st_size

    @property
    def are_as_left(self) -> bool:
        """Whether nobody has removed or changed a file since this process wrote it."""
        return all(path.exists() and path.stat().st_size == size for path, size in self._sizes.items())

    def _text(self, path: Path, records: Sequence[RoundRecord], *, header: bool) -> str:
        """The rows of these rounds in one of the two files."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if header:
            writer.writerow(self.header if path == self.rounds else _CLIENTS_HEADER)
        for record in records:
            if path == self.rounds:
                writer.writerow([column.text_in(record) for column in self._columns])
            else:
                writer.writerows(_rows_of_clients(record))
        return text.getvalue()


def _rows_of_clients(record: RoundRecord) -> list[Sequence[str]]:
    """What ``clients.csv`` has of a round: a row for each number of each client whose update was used."""
    declared = [column for column in COLUMNS if column.place == CLIENT]
    rows: list[Sequence[str]] = []
    for client in record.clients:
        for column in declared:
            text = column.of(client).text_in(record)
            if text:
                name = column.name.removesuffix(f"_{CLIENT}")
                rows.append((str(record.round), str(client), name, text))
    return rows
