"""What a suite has measured so far: means over seeds with their intervals, compared with each other, with a row that
the user names, and with published numbers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from calfat_plugin.errors import OptionError, did_you_mean
from calfat_plugin.maths.intervals import Difference, Interval, Rival, of_accuracy, paired, rivals, student
from calfat_plugin.maths.metrics import mean_std
from calfat_plugin.report.labels import differing, problem_of
from calfat_plugin.report.reading import read_results
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites.cells import Cell, PlannedRun
from calfat_plugin.suites.plan import SuitePlan
from calfat_plugin.suites.record import measured, verdict_of
from calfat_plugin.suites.runner import RunOutcome
from calfat_plugin.suites.schema import RELEASE, Suite, evaluator_of, release_of
from calfat_plugin.suites.tuning import Tuning, choice_notes

_ROUNDING = 1e-9  # differences of decimals are not exact: 0.3112 - 0.2912 > 0.02


@dataclass(frozen=True)
class Score:
    """One number of the table. Accuracies are fractions in [0, 1].

    Attributes:
        is_accuracy: False for a figure of a plugin (``train/margin``, ``pgd20/ece``), which is shown as it is.
        values: one a finished seed, in the order of the seeds.
        reported: the published number, or None.
        release: ``values`` by the release's convention, with which the published number compares.
        tolerance: difference from it that passes unmarked, a fraction too; None: none is given.
        seeds: one for each value.
        num_examples: what one value is a share of; None where it is no share of examples.
        rival: the best score of the same problem, or the next best for the best itself; None where there is none.
    """

    values: tuple[float, ...]
    reported: float | None = None
    release: tuple[float, ...] = ()
    tolerance: float | None = None
    is_accuracy: bool = True
    seeds: tuple[int, ...] = ()
    num_examples: int | None = None
    rival: Rival | None = None

    @property
    def by_seed(self) -> dict[int, float]:
        """Seed to value."""
        return dict(zip(self.seeds, self.values, strict=True))

    @property
    def mean(self) -> float | None:
        """Over seeds; None when none has finished."""
        return mean_std(self.values)[0] if self.values else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation (ddof 1); None for fewer than two seeds."""
        return mean_std(self.values)[1] if self.values else None

    @property
    def release_mean(self) -> float | None:
        """Over seeds; None where nothing is reported to compare it with, or none has finished."""
        return mean_std(self.release)[0] if self.release else None

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the mean: Student's over seeds; of a single accuracy Wilson's, over its test examples."""
        return of_accuracy(self.values, self.num_examples) if self.is_accuracy else student(self.values)

    @property
    def is_clear_best(self) -> bool:
        """Whether it is bold: the best, and the interval of its paired difference to the next best excludes zero."""
        return self.rival is not None and self.rival.is_clear_best

    @property
    def difference(self) -> float | None:
        """Measured minus reported, both by the release's convention, which the paper's tables follow."""
        return None if self.release_mean is None or self.reported is None else self.release_mean - self.reported

    @property
    def beyond(self) -> bool | None:
        """Whether the difference exceeds the tolerance; None where there is nothing to compare."""
        difference = self.difference
        return None if difference is None or self.tolerance is None else abs(difference) > self.tolerance + _ROUNDING


@dataclass(frozen=True)
class RunSummary:
    """One run of a cell.

    Attributes:
        status: ``finished``, ``failed``, ``interrupted``, ``unfinished``, ``new``, ``elsewhere`` or ``not tried``.
        message: what went wrong, for people.
        results: ``results.json``; empty until the run is finished.
    """

    run: PlannedRun
    status: str
    message: str
    results: Mapping[str, Any]

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
    """One row of the table.

    Attributes:
        runs: one a seed; none for a skipped cell.
        scores: one for each of the suite's metrics, by its label.
        source: where the numbers are published, or None.
        choice: how its values were chosen; None where the suite chooses none.
        waiting: seeds that wait until its values are chosen.
    """

    cell: Cell
    runs: tuple[RunSummary, ...]
    scores: Mapping[str, Score]
    source: str | None
    choice: Tuning | None = None
    waiting: tuple[int, ...] = ()

    @property
    def finished(self) -> int:
        """How many seeds the numbers are over."""
        return sum(run.status == "finished" for run in self.runs)

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
            f"seed {run.run.seed} {run.status}" + (f": {run.message}" if run.message else "")
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
    """Read the results of all finished runs.

    Args:
        plan: the suite; what is finished is looked up on disk.
        outcomes: how the runs of this session ended.

    Raises:
        RunError: a results file that cannot be read.
    """
    ended = {(outcome.run.cell.name, outcome.run.seed): outcome for outcome in outcomes}
    by_cell: dict[str, list[RunSummary]] = {cell.name: [] for cell in plan.cells}
    for run in sorted(plan.runs, key=lambda run: plan.seeds.index(run.seed)):
        by_cell[run.cell.name].append(_run_summary(run, ended.get((run.cell.name, run.seed))))
    cells = [_cell_summary(plan, cell, by_cell[cell.name]) for cell in plan.cells]
    return SuiteSummary(plan, tuple(_compared(cells)))


def _cell_summary(plan: SuitePlan, cell: Cell, runs: Sequence[RunSummary]) -> CellSummary:
    suite = plan.suite
    reported = suite.reported.get(cell.name)
    scores = {}
    figures = () if cell.experiment is None else cell.experiment.final_metrics
    for label in suite.metrics:
        measured = {run.run.seed: (run.value(label), run.num_examples(label)) for run in runs}
        known = {seed: value for seed, (value, _) in measured.items() if value is not None}  # with results
        examples = {number for seed, (_, number) in measured.items() if seed in known}
        published = None if reported is None else reported.accuracy.get(label)
        points = suite.tolerance.get(label)
        tolerance = None if points is None else points / 100
        scores[label] = Score(
            tuple(known.values()),
            published,
            _release(runs, known, label) if published is not None else (),
            tolerance,
            label not in figures,
            seeds=tuple(known),
            num_examples=examples.pop() if len(examples) == 1 else None,
        )
    source = None if reported is None else reported.source
    waiting = plan.seeds if cell.name in plan.waiting else ()
    return CellSummary(cell, tuple(runs), scores, source, plan.choices.get(cell.name), waiting)


def _release(runs: Sequence[RunSummary], known: Collection[int], label: str) -> tuple[float, ...]:
    """The values of an accuracy by the release's convention; none where a seed's is not known."""
    found = [run.value(release_of(label)) for run in runs if run.run.seed in known]
    values = tuple(value for value in found if value is not None)
    return values if len(values) == len(found) else ()


def _compared(cells: Sequence[CellSummary]) -> Iterator[CellSummary]:
    """The cells, each accuracy compared with the best of those that were measured alike on one problem."""
    kinds = [dict(_kinds(cell)) for cell in cells]
    alike: dict[str, dict[str, Mapping[int, float]]] = {}
    for cell, of in zip(cells, kinds, strict=True):
        for metric, kind in of.items():
            score = cell.scores[metric]
            alike.setdefault(kind, {})[cell.cell.name] = score.by_seed
    found = {kind: rivals(settings) for kind, settings in alike.items()}
    for cell, of in zip(cells, kinds, strict=True):
        rival = {metric: found[kind].get(cell.cell.name) for metric, kind in of.items()}
        yield replace(cell, scores={name: replace(score, rival=rival.get(name)) for name, score in cell.scores.items()})


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
    status, message = (run.state, "") if outcome is None else (outcome.status, outcome.message)
    if status != "finished" or run.recorded is not None:
        return RunSummary(run, status, message, {})
    return RunSummary(run, "finished", message, read_results(RunDirectory(run.directory).results))


# --- a row that the user names ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """A row beside the named one of the same other labels.

    Attributes:
        row: what is compared.
        differences: the row minus the named one, paired over seeds, by metric; None where they share no seed.
        unlike: keys of the recipe that differ although numbers compare only where they agree: data, partition, model,
            clients, threat model, evaluators.
    """

    row: CellSummary
    differences: dict[str, Difference | None]
    unlike: tuple[str, ...]


def check_versus(suite: Suite, label: str) -> None:
    """Whether the suite has rows of this label.

    Raises:
        OptionError: it has none.
    """
    labels = [each for variants in suite.axes.values() for each in variants]
    if label not in labels:
        hint = did_you_mean(label, labels) or f" Labels: {', '.join(dict.fromkeys(labels))}."
        raise OptionError(f"--versus '{label}': no row of {suite.document.file} has this label.{hint}")


def versus(summary: SuiteSummary, label: str) -> Iterator[Beside]:
    """The other rows, each compared with the row that has ``label`` on that axis and its own labels on all others.

    Unlike the comparison with the best row, this also compares rows of different problems: the user asked for it.

    Args:
        summary: what was measured.
        label: of any axis; see :func:`check_versus`.
    """
    axis = next(index for index, variants in enumerate(summary.suite.axes.values()) if label in variants)
    rows = {cell.cell.labels: cell for cell in summary.cells}
    for labels, row in rows.items():
        wanted = (*labels[:axis], label, *labels[axis + 1 :])
        named = rows[wanted]
        if row is not named:
            pairs = {metric: _paired(score, named.scores[metric]) for metric, score in row.scores.items()}
            yield Beside(row, pairs, _unlike(row, named))


def _paired(one: Score, other: Score) -> Difference | None:
    return paired(one.by_seed, other.by_seed) if one.is_accuracy else None


def _unlike(one: CellSummary, other: CellSummary) -> tuple[str, ...]:
    recipes = [cell.cell.experiment.as_run() for cell in (one, other) if cell.cell.experiment is not None]
    evaluators = "calfat.evaluators"
    return tuple(differing([{**problem_of(recipe), evaluators: recipe["calfat"]["evaluators"]} for recipe in recipes]))
