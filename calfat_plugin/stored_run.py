"""A run as its directory says: paths, recipe, rounds, results. Whoever asks about a run on disk asks here.

What writes a run directory is ``runs/directory.py`` and ``runs/writer.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from html import escape
from pathlib import Path
from typing import Any

from calfat_plugin.disk import RESTORE
from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.alarms import Alarm
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe.document import read_document
from calfat_plugin.registry import Registry
from calfat_plugin.results import EVIDENCE, EarlyStop, EvaluationResult, RoundRecord
from calfat_plugin.rounds import read_rounds
from calfat_plugin.rounds_csv import MOST_IN_COLUMNS, Column, columns_of
from calfat_plugin.run_files import (
    AttackResults,
    Environment,
    Partition,
    Results,
    Spending,
    TrustResults,
    check_evaluations,
    read_results,
)
from calfat_plugin.typed_json import damaged, read_typed

RECIPE_FILE = "recipe.yaml"
CLIENT_STATES = "clients"  # folder beside the checkpoints


class RunPaths:
    """Where the files of a run are."""

    #: The file whose presence says that the run is finished.
    results_name = "results.json"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / RECIPE_FILE
        self.environment = path / "environment.json"
        self.partition = path / "partition.json"
        self.rounds = path / "rounds.jsonl"
        self.tables = [path / "rounds.csv", path / "clients.csv"]  # the same for people
        self.results = path / self.results_name
        self.evaluation = path / "evaluation"
        self.evidence = path / EVIDENCE
        self.profile = path / "profile.json"
        self.attacks = path / "attacks"
        self.trust = path / "trust.json"
        self.log = path / "log.txt"
        self.page = path / "report.html"
        self.last_checkpoint = self.checkpoint("last")
        self.client_states = self.last_checkpoint.parent / CLIENT_STATES

    def checkpoint(self, name: str) -> Path:
        return self.path / "checkpoints" / f"{name}.safetensors"


class Run:
    """A run, finished or not, as its directory says.

    A file is read when it is first asked for, and then kept. ``rounds`` are read anew each time.

    Attributes:
        directory: the run directory.
        paths: where its files are.
    """

    def __init__(self, directory: Path) -> None:
        """A run of which nothing is read yet.

        Args:
            directory: the run directory.
        """
        self.directory = directory
        self.paths = RunPaths(directory)

    @classmethod
    def load(cls, directory: Path) -> Run:
        """Read all files of a run, so that one that is damaged is named now, and not in the middle of a page.

        Args:
            directory: the run directory.

        Raises:
            CalfatError: there is no run in it, or a file of it is damaged.
        """
        run = cls(directory)
        if not run.paths.recipe.is_file():
            raise RunError(f"{directory}: there is no run in this directory (no {RECIPE_FILE}).")
        _ = run.experiment, run.records, run.final, run.environment, run.partition, run.spending, run.trust, run.attacks
        run._check_sizes()
        return run

    # --- its recipe ---------------------------------------------------------------------------------------------------

    @cached_property
    def experiment(self) -> Experiment:
        """The recipe as run; a plugin of it that is not installed has untyped options."""
        return assemble(read_document(self.paths.recipe), _installed(), finished=True)

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe as run, every default written out."""
        return self.experiment.document.data

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The same, as this version would write it."""
        return self.experiment.as_run()

    # --- its rounds ---------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> Any:
        """The rounds that are finished now: a ``pandas.DataFrame``, or without pandas a list with a mapping for each.

        It has the columns of ``rounds.csv``. Accuracies are fractions in [0, 1]; what was not measured in a round is
        None (in a DataFrame: nan). Of more than ten clients, a mapping has only those of its round.
        """
        rows = []
        for record in read_rounds(self.paths.rounds):
            clients: Sequence[int] = range(self.experiment.num_clients)
            if len(clients) > MOST_IN_COLUMNS:
                clients = record.clients
            row: dict[str, Any] = {}
            for column in columns_of(self.experiment.monitor.labels, clients, self._metric_columns):
                if column.kind == "text":  # as in rounds.csv
                    row[column.name] = column.text_in(record)
                else:
                    row[column.name] = column.value_in(record)
            rows.append(row)
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    @cached_property
    def records(self) -> Sequence[RoundRecord]:
        """The finished rounds, typed; as they were when first asked for."""
        return read_rounds(self.paths.rounds)

    @cached_property
    def columns(self) -> Mapping[str, Column]:
        """Name to column, of all numbers that its rounds may have."""
        clients = {client for record in self.records for client in record.clients}
        columns = columns_of(self.experiment.monitor.labels, sorted(clients), self._metric_columns)
        return {column.name: column for column in columns if column.kind != "text"}

    @cached_property
    def monitored(self) -> tuple[str, ...]:
        """Labels of the evaluators that were measured during the run, in the recipe's order."""
        return tuple(label for label in self.experiment.monitor.labels if self.curve(label))

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(round, number) for every round that has a finite one.

        Args:
            name: of a column of ``rounds.csv``, such as ``pgd20``.
        """
        column = self.columns.get(name)
        if column is None:
            return []
        points = []
        for record in self.records:
            value = column.value_in(record)
            if value is not None and math.isfinite(value):
                points.append((record.round, value))
        return points

    @cached_property
    def _metric_columns(self) -> list[str]:
        """What plugins measure beside: those that the recipe declares, and those of a plugin that is not installed."""
        names = dict.fromkeys(self.experiment.metric_columns)
        for record in self.records:
            names.update(dict.fromkeys(record.metrics))
        return list(names)

    # --- its results --------------------------------------------------------------------------------------------------

    @cached_property
    def final(self) -> Results | None:
        """``results.json``; None while the run is not finished."""
        return read_results(self.paths.results)

    @property
    def finished(self) -> bool:
        """Whether its results are there."""
        return self.final is not None

    @property
    def _final_or_empty(self) -> Results:
        """``results.json``; without any result while the run is not finished."""
        return self.final or Results()

    @property
    def name(self) -> str:
        """The name of the recipe."""
        return self._final_or_empty.recipe or self.directory.resolve().parent.name

    @property
    def evaluations(self) -> tuple[EvaluationResult, ...]:
        """Of the final evaluation, in the recipe's order; empty while the run is not finished."""
        return self._final_or_empty.evaluations

    @property
    def results(self) -> Mapping[str, EvaluationResult]:
        """Label to final result, in the recipe's order; empty while the run is not finished."""
        return self._final_or_empty.by_label

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Findings about results that look too good; each has a ``code`` and a ``text``."""
        return self._final_or_empty.alarms

    @property
    def stopped_early(self) -> EarlyStop | None:
        """Why training ended before the recipe's last round: its attribute ``round`` is the last one.

        As a text it is a sentence. None: it did not end early, or the run is not finished.
        """
        return self._final_or_empty.stopped_early

    def value(self, metric: str) -> float | None:
        """What the final evaluation measured; None where there is no number.

        Args:
            metric: as suites name it, such as ``pgd20`` or ``pgd20:worst-class``.
        """
        return self._final_or_empty.value(metric)

    def num_examples(self, metric: str) -> int | None:
        """The number of test examples that an accuracy is a share of; None for other metrics.

        Args:
            metric: as suites name it.
        """
        return self._final_or_empty.num_examples(metric)

    def not_run(self, metric: str) -> str:
        """Why the attack of a metric did not run; empty where it ran.

        Args:
            metric: as suites name it.
        """
        return self._final_or_empty.not_run(metric)

    # --- other files --------------------------------------------------------------------------------------------------

    @cached_property
    def environment(self) -> Environment | None:
        """Where and with what the last process of the run computed."""
        return read_typed(Environment, self.paths.environment)

    @cached_property
    def partition(self) -> Partition:
        """Which data the clients have; empty for a cross-silo run, where nobody knows."""
        return read_typed(Partition, self.paths.partition) or Partition()

    @cached_property
    def spending(self) -> Spending | None:
        """Where the time went, of a run with ``--profile``."""
        return read_typed(Spending, self.paths.profile)

    @cached_property
    def trust(self) -> TrustResults | None:
        """What ``calfat trust`` found."""
        return read_typed(TrustResults, self.paths.trust)

    @cached_property
    def attacks(self) -> Mapping[str, AttackResults]:
        """What ``calfat attack`` measured, by file below the run directory; without attacks that were just begun."""
        attacks = {}
        for file in sorted(self.paths.attacks.glob("*.json"), key=lambda file: file.stem):
            try:
                if file.stat().st_size == 0:  # it was just begun
                    continue
            except OSError as error:
                raise RunError(f"{file}: cannot be read ({error.strerror}). {RESTORE}") from None
            results = read_typed(AttackResults, file)
            if results is not None and results.evaluations:
                check_evaluations(results.evaluations, file)
                attacks[str(file.relative_to(self.directory))] = results
        return attacks

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; their numbers where no name is known."""
        if self.partition.class_names:
            return self.partition.class_names
        for evaluation in self.evaluations:
            if evaluation.per_class:
                return tuple(map(str, range(len(evaluation.per_class))))
        return ()

    @property
    def report(self) -> Path:
        """The page with curves and tables; it is written when the run finishes."""
        return self.paths.page

    def _check_sizes(self) -> None:
        """Check that lists which belong together are of one length."""
        number = len(self.class_names)
        for index, row in enumerate(self.partition.class_counts):
            if len(row) != number:
                problem = f"class_counts[{index}] has {len(row)} entries for {number} classes"
                raise damaged(self.paths.partition, problem)
        for index, evaluation in enumerate(self.evaluations):
            if evaluation.per_class and len(evaluation.per_class) != number:
                problem = f"evaluations[{index}].per_class has {len(evaluation.per_class)} entries for {number} classes"
                raise damaged(self.paths.results, problem)

    # --- how a notebook shows it --------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        accuracies = [f"{label} {_percent(result.accuracy)}" for label, result in self.results.items()]
        text = ", ".join(accuracies) or "not finished"
        if self.stopped_early is not None:
            text += f", {self.stopped_early}"
        return f"<Run {self.directory}: {text}>"

    def _repr_html_(self) -> str:
        table = [["evaluator", "accuracy", "release", "examples"]]
        for result in self.evaluations:
            accuracies = [_percent(result.accuracy), _percent(result.accuracy_release)]
            table.append([result.label, *accuracies, str(result.num_examples)])
        if all(result.accuracy_release == result.accuracy for result in self.evaluations):
            for row in table:
                del row[2]  # the release
        if not self.evaluations:
            table = [["not finished"]]
        html = f"<p>{escape(str(self.directory))}</p><table>"
        for row in table:
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
            html += f"<tr>{cells}</tr>"
        html += "</table>"
        if self.stopped_early is not None:
            html += f"<p>{escape(str(self.stopped_early))}</p>"
        for alarm in self.alarms:
            html += f"<p>{escape(alarm.code)}: {escape(alarm.text)}</p>"
        return f"<div>{html}</div>"


@cache
def _installed() -> Registry:
    return Registry.load()


def _percent(share: float | None) -> str:
    return "not run" if share is None else f"{100 * share:.1f} %"
