"""What a suite has measured so far: means over seeds with their intervals, compared with each other and with published
numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from calfat_plugin.maths.intervals import (
    Difference,
    Score,
    holm,
    is_level,
    paired,
    paired_p_value,
)
from calfat_plugin.report.scores import compared_alike, score_of
from calfat_plugin.results import NOT_RUN, WORST_CASE, evaluator_of
from calfat_plugin.run_files import read_results
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites.cells import Cell, SuiteRun, why_lost
from calfat_plugin.suites.plan import SuitePlan
from calfat_plugin.suites.suite import Compare, Suite
from calfat_plugin.suites.tuning import Tuning, choice_notes


@dataclass(frozen=True)
class CellSummary:
    """One row of the table."""

    cell: Cell
    runs: tuple[SuiteRun, ...]  # one a seed; none for a skipped cell
    scores: dict[str, Score]  # one for each of the suite's metrics, by its label
    source: str | None  # where the numbers are published, or None
    choice: Tuning | None = None  # how its values were chosen; None where the suite chooses none
    waiting: tuple[int, ...] = ()  # seeds that wait until its values are chosen

    @property
    def ended(self) -> int:
        """How many seeds the accuracies are over: those that finished or were lost."""
        return sum(run.has_numbers for run in self.runs)

    @property
    def verdict(self) -> str:
        """``holds (seed 0)``: what ``calfat trust`` says of the first model that it was asked about; empty for none."""
        for run in self.runs:
            verdict = run.verdict
            if verdict:
                return f"{verdict} (seed {run.seed})"
        return ""

    @property
    def left(self) -> list[int]:
        """The seeds that have not been run, or not to their end; a failed one is no longer left."""
        unfinished = ("new", "unfinished", "unmeasured", "interrupted", "elsewhere")
        return [*self.waiting, *(run.seed for run in self.runs if run.state in unfinished)]

    @property
    def notes(self) -> list[str]:
        """What the numbers alone do not say: skipped, failed, stopped, and what was tried before."""
        if self.cell.skipped:
            return [f"skipped: {self.cell.skipped}"]
        notes: list[str] = []
        if self.choice is not None:
            notes += choice_notes(self.choice)
        notes += [*self._lacking_notes, *self._without_number, *self._findings]
        for run in self.runs:
            if run.state in ("finished", "new", "unfinished", "unmeasured"):
                continue
            note = f"seed {run.seed} {run.state}"
            if run.state == "lost":
                note += ", which counts as 0 in accuracies"
            if run.message:
                note += f": {run.message}"
            notes.append(note)
        return notes

    @property
    def _without_number(self) -> Iterator[str]:
        """Attacks that did not run, a note each."""
        for label, score in self.scores.items():
            seeds_of: dict[str, list[int]] = {}  # why it did not run, to the seeds
            for seed, why in score.not_run.items():
                seeds_of.setdefault(why, []).append(seed)
            for why, seeds in seeds_of.items():
                text = f"{label} did not run with {_seeds(seeds)}, so it has no number"
                if score.values:
                    text += ", and its mean is over the others"
                yield f"{text}: {why}"

    @property
    def _findings(self) -> Iterator[str]:
        """What runs found about their numbers, a note for each kind, in the words of the first that found it."""
        without_number = {evaluator_of(label) for label, score in self.scores.items() if score.not_run}
        text_of: dict[str, str] = {}  # by code
        seeds_of: dict[str, list[int]] = {}
        for run in self.runs:
            for alarm in run.findings:
                if alarm.code == NOT_RUN and alarm.labels and without_number.issuperset(alarm.labels):
                    continue  # the note about a missing number says it
                text_of.setdefault(alarm.code, alarm.text)
                seeds = seeds_of.setdefault(alarm.code, [])
                if run.seed not in seeds:
                    seeds.append(run.seed)
        for code, text in text_of.items():
            yield f"finding {code} ({_seeds(seeds_of[code])}): {text}"

    @property
    def _lacking_notes(self) -> Iterator[str]:
        """Which metrics runs that count do not have: the suite may have them since, and n of the row is of all."""
        for label, score in self.scores.items():
            in_record: list[int] = []  # seeds
            not_measured: list[int] = []
            of_other_attacks: list[int] = []
            for run in self.runs:
                is_explained = run.seed in score.by_seed or run.seed in score.not_run
                if is_explained or not run.has_numbers or run.state == "lost":
                    continue
                if run.recorded is not None:
                    in_record.append(run.seed)
                elif run.lacks:
                    not_measured.append(run.seed)
                elif evaluator_of(label) == WORST_CASE:
                    of_other_attacks.append(run.seed)
            if in_record:
                yield (
                    f"the record has no {label} of {_seeds(in_record)}: its mean is over the others. Run the suite "
                    "with this record where the directories of these runs are, or remove their rows to run them again"
                )
            if not_measured:
                yield f"{_seeds(not_measured)}: {label} is not measured yet; run the suite again"
            if of_other_attacks:
                yield (
                    f"{_seeds(of_other_attacks)}: the worst case in the results is of other attacks than the suite's; "
                    "put these back, or move the run directories away to run them again"
                )


def _seeds(seeds: Sequence[int]) -> str:
    """``seed 0``; ``seeds 0, 1``."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"seeds {', '.join(map(str, seeds))}"


@dataclass(frozen=True)
class SuiteSummary:
    """The whole table."""

    plan: SuitePlan
    cells: tuple[CellSummary, ...]

    @property
    def suite(self) -> Suite:
        return self.plan.suite

    @property
    def judged(self) -> bool:
        """Whether ``calfat trust`` was asked about some row."""
        return any(cell.verdict for cell in self.cells)


def summarise(plan: SuitePlan, ended: Iterable[SuiteRun] = ()) -> SuiteSummary:
    """Read the results of all finished runs; ``ended``: the runs of this session, as they ended."""
    of_this_session = {run.key: run for run in ended}
    by_cell: dict[str, list[SuiteRun]] = {cell.name: [] for cell in plan.cells}
    for planned in sorted(plan.runs, key=lambda run: plan.seeds.index(run.seed)):
        # Another machine may have recorded the run since the plan was made.
        run = of_this_session.get(planned.key, planned)
        if run.state == "lost" and not run.message:
            run = replace(run, message=why_lost(run))
        if run.has_numbers and run.state != "lost" and run.recorded is None:
            run = replace(run, results=read_results(RunDirectory(run.directory).results))
        by_cell[run.cell.name].append(run)
    rows = [_cell_summary(plan, cell, by_cell[cell.name]) for cell in plan.cells]
    comparable = {}
    for row in rows:
        if row.cell.experiment is not None:
            comparable[row.cell.name] = (row.cell.experiment.as_run(), row.scores)
    scores = compared_alike(comparable)
    compared_rows = [replace(row, scores=scores.get(row.cell.name, row.scores)) for row in rows]
    return SuiteSummary(plan, tuple(compared_rows))


def _cell_summary(plan: SuitePlan, cell: Cell, runs: Sequence[SuiteRun]) -> CellSummary:
    reported = plan.suite.reported
    by_seed = {run.seed: run for run in runs}
    published: dict[str, float] = {}
    if cell.name in reported.percent:
        published = reported.percent[cell.name].percent
    figures: Collection[str] = ()
    if cell.experiment is not None:
        figures = cell.experiment.final_metrics
    scores = {}
    for label in plan.suite.metrics:
        is_accuracy = label not in figures
        scores[label] = score_of(by_seed, label, is_accuracy, published.get(label), reported.tolerance.get(label))
    waiting: tuple[int, ...] = ()
    if cell.name in plan.waiting:
        waiting = plan.seeds
    return CellSummary(
        cell,
        tuple(runs),
        scores,
        source=reported.source_of(cell.name),
        choice=plan.choices.get(cell.name),
        waiting=waiting,
    )


# --- planned comparisons: the section ``compare``, one row against all others, corrected for their number -------------

SIGNIFICANT = 0.05
TOO_FEW = "too few seeds"
NO_VALUE = "no number"  # an attack did not run, or the record has no number of it


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
        if self.is_level:
            return "level"
        return "not clear"


def comparisons(summary: SuiteSummary) -> Iterator[list[Compared]]:
    """The comparisons of each family, in the order of the table: one family for each label of the other axes.

    A family is corrected for all comparisons that were planned, those included that cannot be made yet, but not those
    of skipped rows, which are never run.
    """
    suite = summary.suite
    plan = suite.compare
    if plan is None:
        return
    axis = next(index for index, labels in enumerate(suite.axes.values()) if plan.row in labels)
    families: dict[tuple[str, ...], dict[str, CellSummary]] = {}  # labels of the other axes, to label to row
    for row in summary.cells:
        labels = row.cell.labels
        family = families.setdefault((*labels[:axis], *labels[axis + 1 :]), {})
        if not row.cell.skipped:
            family[labels[axis]] = row
    for family in families.values():
        named = family.pop(plan.row, None)
        if named is None:
            continue
        uncorrected = []
        for other in family.values():
            for metric in plan.metrics:
                uncorrected.append(_compared(suite, plan, named, other, metric))
        p_values = holm([compared.p_value for compared in uncorrected])
        corrected = []
        for compared, p_value in zip(uncorrected, p_values, strict=True):
            corrected.append(replace(compared, adjusted=p_value))
        if corrected:
            yield corrected


def _compared(suite: Suite, plan: Compare, row: CellSummary, other: CellSummary, metric: str) -> Compared:
    """The comparison of a metric between two rows."""
    one = _of_the_suites_seeds(suite, row, metric)
    two = _of_the_suites_seeds(suite, other, metric)
    p_value = None
    why_none = ""
    if len(one) == len(two) == len(suite.seeds):
        p_value = paired_p_value(one, two)
        if p_value is None:
            why_none = TOO_FEW
    if _lacks(suite, row, metric) or _lacks(suite, other, metric):
        why_none = NO_VALUE
    level = False
    if p_value is not None and metric == plan.robust and plan.level is not None:
        level = is_level(one, two, plan.level / 100)
    return Compared(other, metric, paired(one, two), p_value, is_level=level, why_none=why_none)


def _of_the_suites_seeds(suite: Suite, row: CellSummary, metric: str) -> dict[int, float]:
    """Seed to value, of the suite's seeds alone: who may add seeds until a difference is clear finds one that is."""
    by_seed = row.scores[metric].by_seed
    return {seed: value for seed, value in by_seed.items() if seed in suite.seeds}


def _lacks(suite: Suite, row: CellSummary, metric: str) -> bool:
    """Whether a finished run of a row has no number of a metric, so that a comparison will never have it."""
    finished = {run.seed for run in row.runs if run.state == "finished" and run.seed in suite.seeds}
    return not finished <= row.scores[metric].by_seed.keys()
