"""What a suite has measured so far: means over seeds with their intervals, compared with each other and with published
numbers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from calfat_plugin.maths.intervals import (
    Difference,
    Score,
    holm,
    is_level,
    paired,
    paired_p_value,
    with_rivals,
)
from calfat_plugin.report.comparability import problem_of
from calfat_plugin.report.reading import read_results
from calfat_plugin.results import RELEASE, evaluator_of, measured, release_of
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites.cells import Cell, PlannedRun, why_lost
from calfat_plugin.suites.parse import Suite
from calfat_plugin.suites.plan import SuitePlan
from calfat_plugin.suites.record import verdict_of
from calfat_plugin.suites.runner import RunOutcome
from calfat_plugin.suites.schema import Compare
from calfat_plugin.suites.tuning import Tuning, choice_notes


@dataclass(frozen=True)
class RunSummary:
    """One run of a cell."""

    run: PlannedRun
    status: str
    message: str  # what went wrong, for people
    results: Mapping[str, Any]  # ``results.json``; empty until the run is finished

    @property
    def verdict(self) -> str:
        """What ``calfat trust`` says of its model; empty where it was not asked."""
        if self.status != "finished":
            return ""
        recorded = self.run.recorded
        return verdict_of(self.run.directory, self.run.experiment) if recorded is None else recorded.verdict

    def value(self, metric: str) -> float | None:
        """Accuracy of one evaluator, also by the release's convention or of its worst class or clients, or a plugin's
        figure."""
        recorded = self.run.recorded
        return measured(self.results, metric) if recorded is None else recorded.values.get(metric)

    def num_examples(self, metric: str) -> int | None:
        """Test examples that an evaluator's accuracy is a share of; None for other metrics."""
        found = {
            evaluation["label"]: evaluation.get("num_examples") for evaluation in self.results.get("evaluations", ())
        }
        return found.get(metric.removesuffix(f":{RELEASE}"))


@dataclass(frozen=True)
class CellSummary:
    """One row of the table."""

    cell: Cell
    runs: tuple[RunSummary, ...]  # one a seed; none for a skipped cell
    scores: dict[str, Score]  # one for each of the suite's metrics, by its label
    source: str | None  # where the numbers are published, or None
    choice: Tuning | None = None  # how its values were chosen; None where the suite chooses none
    waiting: tuple[int, ...] = ()  # seeds that wait until its values are chosen

    @property
    def ended(self) -> int:
        """How many seeds the accuracies are over: those that finished or were lost."""
        return sum(run.status in ("finished", "lost") for run in self.runs)

    @property
    def verdict(self) -> str:
        """``holds (seed 0)``: what ``calfat trust`` says of the first model that it was asked about; empty for none."""
        found = ((run.verdict, run.run.seed) for run in self.runs)
        return next((f"{verdict} (seed {seed})" for verdict, seed in found if verdict), "")

    @property
    def left(self) -> list[int]:
        """The seeds that have not been run, or not to their end; a failed one is no longer left."""
        unfinished = ("new", "unfinished", "interrupted", "elsewhere")
        return [*self.waiting, *(run.run.seed for run in self.runs if run.status in unfinished)]

    @property
    def notes(self) -> list[str]:
        """What the numbers alone do not say: skipped, failed, stopped, and what was tried before."""
        if self.cell.skipped:
            return [f"skipped: {self.cell.skipped}"]
        notes = [] if self.choice is None else choice_notes(self.choice)
        return notes + [
            f"seed {run.run.seed} {run.status}"
            + (", which counts as 0 in accuracies" if run.status == "lost" else "")
            + (f": {run.message}" if run.message else "")
            for run in self.runs
            if run.status not in ("finished", "new", "unfinished")
        ]


@dataclass(frozen=True)
class SuiteSummary:
    """The whole table."""

    plan: SuitePlan
    cells: tuple[CellSummary, ...]

    @property
    def suite(self) -> Suite:
        """The suite it is of."""
        return self.plan.suite

    @property
    def judged(self) -> bool:
        """Whether ``calfat trust`` was asked about some row."""
        return any(cell.verdict for cell in self.cells)

    def groups(self) -> Iterator[list[CellSummary]]:
        """The rows that tables set apart: those of one label of the first axis, or all where there is one axis."""
        several = len(self.suite.axes) > 1
        for _, cells in itertools.groupby(self.cells, lambda cell: several and cell.cell.labels[0]):
            yield list(cells)


def summarise(plan: SuitePlan, outcomes: Iterable[RunOutcome] = ()) -> SuiteSummary:
    """Read the results of all finished runs."""
    ended = {outcome.run.key: outcome for outcome in outcomes}
    by_cell: dict[str, list[RunSummary]] = {cell.name: [] for cell in plan.cells}
    for run in sorted(plan.runs, key=lambda run: plan.seeds.index(run.seed)):
        by_cell[run.cell.name].append(_run_summary(run, ended.get(run.key)))
    cells = [_cell_summary(plan, cell, by_cell[cell.name]) for cell in plan.cells]
    return SuiteSummary(plan, tuple(_with_rivals(cells)))


def _cell_summary(plan: SuitePlan, cell: Cell, runs: Sequence[RunSummary]) -> CellSummary:
    suite = plan.suite
    reported = suite.reported.percent.get(cell.name)
    scores = {}
    figures = () if cell.experiment is None else cell.experiment.final_metrics
    for label in suite.metrics:
        value_of = RunSummary.value if label in figures else _accuracy
        known = {run.run.seed: value for run in runs if (value := value_of(run, label)) is not None}
        examples = {run.num_examples(label) for run in runs if run.run.seed in known and run.status != "lost"}
        published = None if reported is None else reported.percent.get(label)
        points = suite.reported.tolerance.get(label)
        scores[label] = Score(
            known,
            examples.pop() if len(examples) == 1 else None,
            label not in figures,
            None if published is None else published / 100,
            _release(runs, known, label) if published is not None else (),
            None if points is None else points / 100,
        )
    waiting = plan.seeds if cell.name in plan.waiting else ()
    source = suite.reported.source_of(cell.name)
    return CellSummary(cell, tuple(runs), scores, source, plan.choices.get(cell.name), waiting)


def _accuracy(run: RunSummary, metric: str) -> float | None:
    """What a run measured; 0 where its training diverged: without such a run, a method that diverges now and then would
    be shown by its good runs alone."""
    return 0.0 if run.status == "lost" else run.value(metric)


def _release(runs: Sequence[RunSummary], known: Collection[int], label: str) -> tuple[float, ...]:
    """The values of an accuracy by the release's convention; none where a seed's is not known."""
    found = [_accuracy(run, release_of(label)) for run in runs if run.run.seed in known]
    values = tuple(value for value in found if value is not None)
    return values if len(values) == len(found) else ()


def _with_rivals(cells: Sequence[CellSummary]) -> Iterator[CellSummary]:
    """The cells, each accuracy compared with the best of those that were measured alike on one problem."""
    kinds = [dict(_kinds(cell)) for cell in cells]
    alike: dict[str, dict[str, Score]] = {}
    for cell, of in zip(cells, kinds, strict=True):
        for metric, kind in of.items():
            alike.setdefault(kind, {})[cell.cell.name] = cell.scores[metric]
    found = {kind: with_rivals(scores) for kind, scores in alike.items()}
    for cell, of in zip(cells, kinds, strict=True):
        yield replace(cell, scores=cell.scores | {metric: found[kind][cell.cell.name] for metric, kind in of.items()})


def _kinds(cell: CellSummary) -> Iterator[tuple[str, str]]:
    """(metric, what must agree before its numbers compare) of the cell's accuracies.

    Figures of plugins are left out: of some of them less is better.
    """
    experiment = cell.cell.experiment
    if experiment is None:
        return
    problem, picks = problem_of(experiment.as_run()), {pick.label: pick.as_run() for pick in experiment.evaluators}
    for metric, score in cell.scores.items():
        if score.is_accuracy:
            yield metric, repr((metric, problem, picks.get(evaluator_of(metric))))


def _run_summary(run: PlannedRun, outcome: RunOutcome | None) -> RunSummary:
    # Another machine may have recorded the run since the plan was made: the outcome knows.
    run, status, message = (run, run.state, "") if outcome is None else (outcome.run, outcome.status, outcome.message)
    if status == "lost" and not message:
        message = why_lost(run)
    if status != "finished" or run.recorded is not None:
        return RunSummary(run, status, message, {})
    return RunSummary(run, "finished", message, read_results(RunDirectory(run.directory).results))


# --- planned comparisons: the section ``compare``, one row against all others, corrected for their number -------------

SIGNIFICANT = 0.05
TOO_FEW = "too few seeds"


@dataclass(frozen=True)
class Compared:
    """One comparison of the named row with another one."""

    row: CellSummary  # the other row
    endpoint: str  # the label of the metric that is compared
    difference: Difference | None  # the named row minus the other, paired over seeds; None where they share no seed
    p_value: float | None  # of the paired test; None where it cannot be made, or not yet
    adjusted: float | None = None  # the same after Holm over the family
    is_level: bool = False  # whether equivalence was tested and holds
    why_none: str = ""  # why it cannot be made; empty where it can be once both rows have finished all their seeds

    @property
    def word(self) -> str:
        """``clear``, ``level``, ``not clear``, why it cannot be made, or nothing for one that has not been made yet."""
        if self.p_value is None:
            return self.why_none
        if self.adjusted is not None and self.adjusted < SIGNIFICANT:
            return "clear"
        return "level" if self.is_level else "not clear"


def comparisons(summary: SuiteSummary) -> Iterator[list[Compared]]:
    """The comparisons of each family, in the order of the table: one family for each label of the other axes.

    A family is corrected for all comparisons that were planned, those included that cannot be made yet, but not those
    of skipped rows, which are never run.
    """
    plan = summary.suite.compare
    if plan is None:
        return
    for rows in _families(summary, plan).values():
        if plan.row in rows and (family := _family(summary, plan, rows)):
            yield family


def _families(summary: SuiteSummary, plan: Compare) -> dict[tuple[str, ...], dict[str, CellSummary]]:
    """Labels of the other axes to label of the compared axis to row, without those that are skipped.

    With the suite's seeds alone: who may add seeds until a difference is clear finds one that is.
    """
    axis = next(index for index, variants in enumerate(summary.suite.axes.values()) if plan.row in variants)
    families: dict[tuple[str, ...], dict[str, CellSummary]] = {}
    for row in summary.cells:
        labels = row.cell.labels
        family = families.setdefault((*labels[:axis], *labels[axis + 1 :]), {})
        if not row.cell.skipped:
            family[labels[axis]] = _of_seeds(row, summary.suite.seeds)
    return families


def _of_seeds(row: CellSummary, seeds: Collection[int]) -> CellSummary:
    values = {
        metric: {seed: value for seed, value in score.by_seed.items() if seed in seeds}
        for metric, score in row.scores.items()
    }
    return replace(row, scores={metric: replace(row.scores[metric], by_seed=of) for metric, of in values.items()})


def _family(summary: SuiteSummary, plan: Compare, rows: Mapping[str, CellSummary]) -> list[Compared]:
    found = [
        _compared(summary, plan, rows[plan.row], row, metric)
        for label, row in rows.items()
        if label != plan.row
        for metric in plan.metrics
    ]
    adjusted = holm([each.p_value for each in found])
    return [replace(each, adjusted=p_value) for each, p_value in zip(found, adjusted, strict=True)]


def _compared(summary: SuiteSummary, plan: Compare, row: CellSummary, other: CellSummary, metric: str) -> Compared:
    one, two = (each.scores[metric].by_seed for each in (row, other))
    there = all(seed in of for of in (one, two) for seed in summary.suite.seeds)
    p_value = paired_p_value(one, two) if there else None
    level = metric == plan.robust and plan.level is not None and is_level(one, two, plan.level / 100)
    why_none = TOO_FEW if there and p_value is None else ""
    return Compared(other, metric, paired(one, two), p_value, is_level=p_value is not None and level, why_none=why_none)
