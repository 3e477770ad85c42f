"""A cell of a suite, its runs, and what is on disk of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from calfat_plugin.disk import TRY_AGAIN, read_bytes, write_text
from calfat_plugin.errors import CalfatError, RecipeError, RunError
from calfat_plugin.evaluators.alarms import Alarm
from calfat_plugin.experiment import Experiment, assemble, changes, evaluators_of, same_but_rounds
from calfat_plugin.federation.early_stopping import is_more_patient
from calfat_plugin.host.runtimes import supported_runtime
from calfat_plugin.recipe.document import read_document, read_text
from calfat_plugin.registry import Registry
from calfat_plugin.results import WORST_CASE, evaluator_of
from calfat_plugin.run_files import Results, read_results
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import with_resolved_precision
from calfat_plugin.suites.record import Digests, Key, Recorded, digest, read_record, verdict_of
from calfat_plugin.suites.suite import SEED_KEY, Setting, Suite, slug

_SHOWN = 3  # changed runs that a message names
_LONGEST_REASON = 100_000  # bytes; longer ones are not ours
_LOST_WITH = "recipe "  # before the digest, in the first line of a mark

State = Literal[
    "new", "unfinished", "unmeasured", "finished", "lost", "failed", "interrupted", "elsewhere", "not tried"
]


@dataclass(frozen=True)
class Cell:
    """One place of the grid."""

    labels: tuple[str, ...]  # one an axis
    settings: tuple[Setting, ...]  # in order: the suite's, then each axis's, then published numbers
    experiment: Experiment | None  # the recipe resolved; None for a skipped cell
    skipped: str = ""  # why it is not run; empty when it is
    tried: str = ""  # what a choice run tries, such as ``learning_rate 0.05``; empty for the runs of the table

    @property
    def name(self) -> str:
        """``CIFAR-10/CalFAT``."""
        return "/".join(self.labels)

    @property
    def folder(self) -> str:
        """``cifar-10_calfat``."""
        return "_".join(map(slug, self.labels))


@dataclass(frozen=True)
class SuiteRun:
    """One cell with one seed, and where it stands."""

    cell: Cell
    experiment: Experiment  # the cell's recipe resolved
    seed: int
    directory: Path
    # Finished: its results are there, or in the record; unfinished: a run directory to resume; unmeasured: trained
    # to its end, but its results lack evaluators that the suite has since; lost: a choice run failed, or the training
    # of another diverged, which are answers, too, and count as the worst. In a session also: elsewhere: a process that
    # is not ours is at it; not tried: the cell failed with an earlier seed before its first round was finished.
    state: State = "new"
    recorded: Recorded | None = None  # its row of the suite's record; None where its directory is there
    lacks: tuple[str, ...] = ()  # labels of evaluators that the suite has since and its results, or its row, do not
    message: str = ""  # what went wrong, for people
    seconds: float = 0.0  # wall-clock time in this session
    results: Results | None = None  # where a summary has read them

    def ended(self, state: State, message: str = "", seconds: float = 0.0) -> SuiteRun:
        """The run as it ended in this session."""
        run = dataclasses.replace(self, state=state, message=message, seconds=seconds)
        if state == "finished":
            run = dataclasses.replace(run, lacks=())
        return run

    @property
    def key(self) -> Key:
        """Names the run in the suite's record."""
        return self.cell.name, self.cell.tried, self.seed

    @property
    def name(self) -> str:
        """``CIFAR-10/CalFAT seed 0``; of a choice run ``CIFAR-10/CalFAT, learning_rate 0.05, seed 100``."""
        if self.cell.tried:
            return f"{self.cell.name}, {self.cell.tried}, seed {self.seed}"
        return f"{self.cell.name} seed {self.seed}"

    @property
    def output(self) -> Path:
        """Where what the command printed is kept."""
        return self.directory.with_name(f"{self.directory.name}.txt")

    @property
    def lost(self) -> Path:
        """Where it is kept with which recipe a run was lost, and why; removed, it is tried again."""
        return self.directory.with_name(f"{self.directory.name}.lost")

    @property
    def to_do(self) -> bool:
        return self.state in ("new", "unfinished", "unmeasured")

    @property
    def has_numbers(self) -> bool:
        """Whether it counts in the table: it has results, if not of all evaluators, or was lost."""
        return self.state in ("finished", "lost") or (bool(self.lacks) and self.recorded is None)

    @property
    def verdict(self) -> str | None:
        """What ``calfat trust`` says of its model; empty where it was not asked, None where it was of another model."""
        if self.state == "lost" or not self.has_numbers:
            return ""
        if self.recorded is not None:
            return self.recorded.verdict
        return verdict_of(self.directory, self.experiment)

    def value(self, metric: str) -> float | None:
        """What was measured: an accuracy, also by the release's convention or of the worst, or a plugin's figure.

        An accuracy of a lost run is 0: else a method that diverges now and then would be shown by its good runs alone.
        """
        if self.state == "lost" and metric not in self.experiment.final_metrics:
            return 0.0
        if evaluator_of(metric) == WORST_CASE and not self._worst_case_is_of_the_suite:
            return None
        if self.recorded is not None:
            return self.recorded.values.get(metric)
        if self.results is None:
            return None
        return self.results.value(metric)

    @property
    def _worst_case_is_of_the_suite(self) -> bool:
        """Whether the worst case is over attacks that the suite has, and over all of them.

        It has one label whatever the attacks are, and numbers over other attacks do not belong into one mean.
        """
        if self.lacks:
            return False
        if self.results is None or WORST_CASE not in self.results.by_label:
            return True
        attacks = self.results.by_label[WORST_CASE].settings.get("attacks", ())
        attacks_of_the_suite = {pick.label for pick in self.experiment.evaluators}
        return attacks_of_the_suite.issuperset(attacks)

    def num_examples(self, metric: str) -> int | None:
        if self.results is None:
            return None
        return self.results.num_examples(metric)

    def not_run(self, metric: str) -> str:
        """Why the attack of a metric did not run; empty where it ran, and where only a record has the run."""
        if self.results is None:
            return ""
        return self.results.not_run(metric)

    @property
    def findings(self) -> tuple[Alarm, ...]:
        """What the run found about its numbers; none where only a record has it."""
        if self.results is None:
            return ()
        return self.results.alarms


def look_again(record: Path | None, *runs: SuiteRun) -> tuple[SuiteRun, ...]:
    """The runs with their states as they are now: another process may have changed them since the plan was made."""
    rows: Mapping[Key, Recorded] = {}
    if record is not None:
        rows = read_record(record)
    digests_of: dict[int, Digests] = {}  # by experiment, which the seeds of a cell share

    def digests(run: SuiteRun) -> Digests:
        if id(run.experiment) not in digests_of:
            digests_of[id(run.experiment)] = Digests.of(run.experiment)
        return digests_of[id(run.experiment)]

    runs_now = []
    changed = []
    for run in runs:
        lost_with, _ = _mark(run)
        row = rows.get(run.key)
        if lost_with and digests(run).added_since(lost_with) is not None:
            runs_now.append(dataclasses.replace(run, recorded=None, lacks=(), state="lost"))
        elif row is None or RunDirectory(run.directory).recipe.exists():
            state, change, lacks = _state(run)
            runs_now.append(dataclasses.replace(run, recorded=None, lacks=lacks, state=state))
            if change:
                changed.append(f"{run.directory}: {change}")
        else:
            added = digests(run).added_since(row.recipe)
            if added is None:
                raise RunError(
                    f"{record}: {run.name} is recorded with another recipe than the suite has now (recipe "
                    f"{row.recipe} then, {digests(run).now} now; recorded by calfat-plugin {row.calfat_plugin}). Undo "
                    "the change, or remove that row to run it again."
                )
            runs_now.append(dataclasses.replace(run, recorded=row.without(added), lacks=added, state=row.state))
    if changed:
        lines = changed[:_SHOWN]
        if len(changed) > _SHOWN:
            lines.append(f"and {len(changed) - _SHOWN} more")
        raise RunError(
            "these runs were started with a recipe that differs from the suite's current one:\n  "
            + "\n  ".join(lines)
            + "\nUndo the change, or move these directories away to run the cells again."
        )
    return tuple(runs_now)


def mark_lost(run: SuiteRun, reason: str) -> None:
    """Keep that a run was lost, with which recipe, and why."""
    write_text(run.lost, f"{_LOST_WITH}{digest(run.experiment)}\n{reason}\n", TRY_AGAIN)


def why_lost(run: SuiteRun) -> str:
    """The error of a run that was lost."""
    if run.recorded is not None:
        return "it is so in the suite's record"
    _, reason = _mark(run)
    return reason


def _mark(run: SuiteRun) -> tuple[str, str]:
    """(digest of the recipe with which the run was lost, why); both empty where it was not.

    A mark without a digest, of an early version, counts as none: it may be of a recipe that the suite no longer has.
    """
    try:
        text = read_bytes(run.lost, _LONGEST_REASON).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return "", ""
    first, _, reason = text.partition("\n")
    if not first.startswith(_LOST_WITH):
        return "", ""
    return first.removeprefix(_LOST_WITH), reason.strip()


def _state(run: SuiteRun) -> tuple[State, str, tuple[str, ...]]:
    """(state, what has changed since the run was started, labels of evaluators that its results lack)."""
    directory, experiment = RunDirectory(run.directory), run.experiment
    if not directory.recipe.exists():
        return "new", "", ()
    try:
        then = _as_started(directory.recipe, read_text(directory.recipe, "recipe"), experiment.registry)
    except CalfatError as error:
        return "unfinished", f"its recipe can no longer be read: {error}", ()
    now = with_resolved_precision(experiment).as_run()
    section, _, key = SEED_KEY.partition(".")
    now[section][key] = run.seed
    changed_keys = same_but_rounds(then, now)
    rounds = now["train_args"]["comm_round"]
    rounds_then = then["train_args"]["comm_round"]
    if rounds < rounds_then and "train_args.comm_round" not in changed_keys:
        changed_keys.append("train_args.comm_round")
    patience = now["train_args"].get("patience")
    patience_then = then["train_args"].get("patience")
    if patience is not None and (patience_then is None or patience < patience_then):
        changed_keys.append("train_args.patience")  # with less of it the run might have stopped earlier
    if changed_keys:
        return "unfinished", changes(then, now, changed_keys, "then"), ()
    goes_further = rounds > rounds_then
    if patience_then is not None:
        results = read_results(directory.results)
        if results is not None and results.stopped_early is not None:
            goes_further |= is_more_patient(patience, patience_then)
    if not directory.finished or goes_further:
        return "unfinished", "", ()
    measured_then = evaluators_of(then)
    lacks = tuple(label for label in evaluators_of(now) if label not in measured_then)
    if lacks:
        return "unmeasured", "", lacks
    return "finished", "", ()


@lru_cache(1024)
def _as_started(file: Path, text: str, registry: Registry) -> Mapping[str, Any]:
    """The recipe that a run was started with: a plan looks at each again and again, and reading YAML takes long."""
    return assemble(read_document(file), registry).as_run()


def resolve(
    suite: Suite, registry: Registry, name: str, settings: Iterable[Setting], overrides: Sequence[str]
) -> Experiment:
    try:
        changes = [(setting.path, setting.value, setting.place) for setting in settings]
        shared = len(suite.settings)  # they come first
        document = suite.base_document.with_values(changes[:shared]).with_values(changes[shared:])
        experiment = assemble(document.with_overrides(overrides), registry)
        supported_runtime(experiment)
        return experiment
    except CalfatError as error:
        raise in_cell(error, name, suite) from None


def in_cell(error: CalfatError, name: str, suite: Suite) -> RecipeError:
    """The error with the cell that it is about."""
    return RecipeError(f"{error} (In cell '{name}' of {suite.document.file}.)")
