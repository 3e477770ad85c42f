"""Run directories as a report sees them: whatever is there, read once, typed where it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from calfat_plugin.disk import RESTORE, read_json
from calfat_plugin.errors import RunError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe.document import read_document
from calfat_plugin.registry import Registry
from calfat_plugin.report import shapes
from calfat_plugin.report.shapes import check_shape, damaged
from calfat_plugin.results import RESULTS_FORMAT, EarlyStop, RoundRecord, examples_of, measured, why_not_run
from calfat_plugin.rounds import read_rounds
from calfat_plugin.rounds_csv import MOST_IN_COLUMNS, Column, columns_of

RECIPE = "recipe.yaml"
ATTACKS = "attacks"
SUITE = "suite.json"
_FILES = {  # JSON beside results.json, each a field of RunFiles
    "environment": shapes.ENVIRONMENT,
    "partition": shapes.PARTITION,
    "profile": shapes.PROFILE,
    "trust": shapes.TRUST,
}


@dataclass(frozen=True)
class RunFiles:
    """The contents of one run directory. A file that is not there yet is empty here."""

    path: Path
    recipe: Experiment  # as run; a plugin of it that is not installed has untyped options
    rounds: Sequence[RoundRecord]
    results: Mapping[str, Any]  # ``results.json``; empty while the run is not finished
    environment: Mapping[str, Any]
    partition: Mapping[str, Any]
    profile: Mapping[str, Any]  # ``profile.json``, made by ``calfat run --profile``
    trust: Mapping[str, Any] = field(default_factory=dict)  # ``trust.json``, made by ``calfat trust``
    attacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        return self.recipe.as_run()

    @property
    def name(self) -> str:
        return str(self.results.get("recipe") or self.path.resolve().parent.name)

    @property
    def stop(self) -> EarlyStop | None:
        """Why training ended before the recipe's last round; None: it did not, or the run is not finished."""
        noted = self.results.get("stopped_early")
        return None if noted is None else EarlyStop(**{field.name: noted[field.name] for field in fields(EarlyStop)})

    @property
    def finished(self) -> bool:
        return bool(self.results)

    @property
    def evaluations(self) -> Sequence[Mapping[str, Any]]:
        return self.results.get("evaluations") or ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; their numbers where no name is known."""
        names = self.partition.get("class_names")
        if names:
            return tuple(map(str, names))
        counted = next((e["per_class"] for e in self.evaluations if e.get("per_class")), ())
        return tuple(map(str, range(len(counted))))

    @property
    def class_counts(self) -> tuple[tuple[int, ...], ...]:
        """Training examples: a row a client, a column a class."""
        return tuple(tuple(map(int, row)) for row in self.partition.get("class_counts") or ())

    @cached_property
    def monitored(self) -> tuple[str, ...]:
        """Labels of the evaluators that were measured during the run, in the recipe's order."""
        return tuple(label for label in self._monitored_labels if self.curve(label))

    @cached_property
    def columns(self) -> Mapping[str, Column]:
        """Name to column, of all numbers that its rounds may have."""
        clients = {client for record in self.rounds for client in record.clients}
        columns = columns_of(self._monitored_labels, sorted(clients), self._metric_columns)
        return {column.name: column for column in columns if column.kind != "text"}

    def table_of_rounds(self) -> list[dict[str, Any]]:
        """A mapping a round, from column to value; None where nothing was measured. Texts are as in ``rounds.csv``.

        Of more than ten clients, a mapping has only those of its round.
        """
        rows = []
        for record in self.rounds:
            clients: Sequence[int] = range(self.recipe.num_clients)
            if len(clients) > MOST_IN_COLUMNS:
                clients = record.clients
            row: dict[str, Any] = {}
            for column in columns_of(self._monitored_labels, clients, self._metric_columns):
                row[column.name] = column.text_in(record) if column.kind == "text" else column.value_in(record)
            rows.append(row)
        return rows

    @property
    def _monitored_labels(self) -> list[str]:
        return [plugin.label for plugin in self.recipe.monitor.evaluators]

    @cached_property
    def _metric_columns(self) -> list[str]:
        """What plugins measure beside: those that the recipe declares, and those of a plugin that is not installed."""
        names = dict.fromkeys(self.recipe.metric_columns)
        for record in self.rounds:
            names.update(dict.fromkeys(record.metrics))
        return list(names)

    def value(self, metric: str) -> float | None:
        """What the final evaluation measured, a metric as suites name it."""
        return measured(self.results, metric)

    def num_examples(self, metric: str) -> int | None:
        return examples_of(self.results, metric)

    def not_run(self, metric: str) -> str:
        """Why the attack of a metric did not run; empty where it ran."""
        return why_not_run(self.results, metric)

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(round, number) for every round that has a finite one in the column of this name."""
        column = self.columns.get(name)
        if column is None:
            return []
        points = []
        for record in self.rounds:
            value = column.value_in(record)
            if value is not None and math.isfinite(value):
                points.append((record.round, value))
        return points


@cache
def _installed() -> Registry:
    return Registry.load()


def read_run(path: Path) -> RunFiles:
    if not (path / RECIPE).is_file():
        raise RunError(f"{path}: there is no run in this directory (no {RECIPE}).")
    recipe = assemble(read_document(path / RECIPE), _installed(), finished=True)
    run = RunFiles(
        path=path,
        recipe=recipe,
        rounds=read_rounds(path / "rounds.jsonl"),
        results=read_results(path / "results.json"),
        **{name: _checked(path / f"{name}.json", shape) for name, shape in _FILES.items()},
        attacks={
            str(file.relative_to(path)): content
            for file in sorted((path / ATTACKS).glob("*.json"), key=lambda file: file.stem)
            if _begun(file) and (content := _checked(file, shapes.ATTACKS)).get("evaluations")
        },
    )
    _check_sizes(run)
    return run


def read_trust(path: Path) -> Mapping[str, Any]:
    """``trust.json`` of a run directory; empty where ``calfat trust`` was not asked."""
    return _checked(path / "trust.json", shapes.TRUST)


def _checked(path: Path, shape: shapes.Shape) -> Mapping[str, Any]:
    """A JSON file of some shape; empty where there is none, or an empty mapping is in it."""
    content = read_json(path)
    if content:
        check_shape(content, shape, path)
    for index, evaluation in enumerate(content.get("evaluations", ())):
        if evaluation["accuracy"] is None and not evaluation.get("not_run"):
            damaged(path, f"evaluations[{index}].accuracy", "is nothing, and no 'not_run' says why")
    return content


def _begun(file: Path) -> bool:
    """Whether there is something in the file: one that is just being written is empty."""
    try:
        return file.stat().st_size > 0
    except OSError as error:
        raise RunError(f"{file}: cannot be read ({error.strerror}). {RESTORE}") from None


def _check_sizes(run: RunFiles) -> None:
    """Check that lists which belong together are of one length."""
    number = len(run.class_names)
    for index, row in enumerate(run.class_counts):
        if len(row) != number:
            damaged(
                run.path / "partition.json", f"class_counts[{index}]", f"has {len(row)} entries for {number} classes"
            )
    for index, found in enumerate(run.evaluations):
        if found.get("per_class") and len(found["per_class"]) != number:
            what = f"has {len(found['per_class'])} entries for {number} classes"
            damaged(run.path / "results.json", f"evaluations[{index}].per_class", what)


@dataclass(frozen=True)
class SuiteFiles:
    """A suite's ``suite.json``; everything is empty where there is none."""

    title: str
    axes: tuple[str, ...]  # names of the axes, which cells are named after
    headings: Mapping[str, str]  # evaluator label to heading, in the order of the table's columns
    cells: Sequence[Mapping[str, Any]]  # as ``suites/tables.py`` writes them
    notes: Sequence[str] = ()
    tolerance: Mapping[str, float] = field(default_factory=dict)  # label to the points that pass unmarked


NO_SUITE = SuiteFiles("", (), {}, ())


def read_suite(path: Path) -> SuiteFiles:
    """Read ``suite.json`` in ``path``, with how values were chosen, and which runs a page leaves out, in words."""
    found = _checked(path / SUITE, shapes.SUITE)
    notes = [found["choose"]["how"]] if found.get("choose") else []
    for cell in found.get("cells", ()) if notes else ():
        if choice := cell.get("choice"):
            notes.append(f"{cell['name']}: {choice['text'] or 'nothing is chosen yet'} (tried {choice['tried']}).")
            notes += [f"{cell['name']}: {remark}" for remark in choice.get("remarks", ())]
    # Such a run may have left no directory.
    lost = sum(run.get("status") == "lost" for cell in found.get("cells", ()) for run in cell.get("runs", ()))
    if lost:
        what = "run whose training diverged; it counts" if lost == 1 else "runs whose training diverged; they count"
        notes.append(f"Left out of the means: {lost} {what} as 0 in the suite's table.")
    return SuiteFiles(
        title=str(found.get("title") or ""),
        axes=tuple(str(axis["name"]) for axis in found.get("axes", ())),
        headings={str(metric["label"]): str(metric["heading"]) for metric in found.get("metrics", ())},
        cells=found.get("cells", ()),
        notes=notes,
        tolerance=found.get("tolerance_points") or {},
    )


def find_runs(path: Path) -> list[Path]:
    """The run directories at ``path``, those that its suite lists, or all below it, sorted.

    A suite lists its runs in ``suite.json``; they may lie with another suite that shares them.
    """
    if (path / RECIPE).is_file():
        return [path]
    if path.is_file():  # such as the page of a run
        run = path.parent if (path.parent / RECIPE).is_file() else "runs/calfat_digits/0-20260101-120000"
        raise RunError(f"{path}: not a directory. Name run directories, such as {run}.")
    listed = [run for cell in read_suite(path).cells for run in cell.get("runs", ())]
    found = [found for run in listed if (found := listed_run(path, Path(run["directory"]))) is not None]
    if found:
        return found
    found = sorted(recipe.parent for recipe in path.rglob(RECIPE)) if path.is_dir() else []
    if not found:
        what = "neither here nor below is there a run" if path.is_dir() else "no such directory"
        raise RunError(f"{path}: {what}. Name run directories, such as runs/calfat_digits/0-20260101-120000.")
    return found


def listed_run(suite: Path, written: Path) -> Path | None:
    """A run of a suite: where ``suite.json`` says, or at the same place beside the suite, if both were moved."""
    moved = suite.resolve().parent.joinpath(*written.parts[-3:])  # resolved: "." has no parent
    return next((place for place in (written, moved) if (place / RECIPE).is_file()), None)


def read_results(path: Path) -> Mapping[str, Any]:
    """Read ``results.json``; empty where there is none: the run is not finished."""
    found = _checked(path, shapes.RESULTS)
    if (number := found.get("format") or 0) > RESULTS_FORMAT:
        raise RunError(
            f"{path}: its format is {number}, and the newest that this version knows is {RESULTS_FORMAT}. A newer "
            "calfat-plugin wrote it: update yours."
        )
    return found
