"""Choosing a cell's values: its choice runs, what they measured, and the best of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from calfat_plugin.errors import CalfatError, RecipeError, RunError, listed
from calfat_plugin.experiment import Experiment, same_but_rounds
from calfat_plugin.options import yaml_text
from calfat_plugin.recipe.document import KeyPath
from calfat_plugin.registry import Registry
from calfat_plugin.rounds import read_rounds
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites.cells import Cell, SuiteRun, in_cell, look_again, resolve
from calfat_plugin.suites.parse import Grid, Setting, Suite
from calfat_plugin.suites.record import CHOICE, GUESS, add_to_record
from calfat_plugin.suites.schema import MOST_TRIES, Choose

CHOOSE: KeyPath = ("choose",)
FOLDER = "choose"  # below a cell's folder, beside the runs of its seeds
LOST = 0.0  # what a run that failed counts as: the worst accuracy there is
_ONLY_THE_LAST = 1_000_000  # rounds between evaluations; the last round is always evaluated
_LONGEST = 200  # characters of a folder's name
_ROUNDING = 1e-9  # of means of fractions


@dataclass(frozen=True)
class ChoiceRun:
    """One run of a try, and what it measured on the validation split."""

    run: SuiteRun
    value: float | None  # of ``choose.metric``; LOST of a lost run, None of one to come
    guess: float | None  # what one answer to all images has; None: not known

    @property
    def is_guessing(self) -> bool:
        """Whether it has ended and is no better than one answer to all images."""
        if self.value is None:
            return False
        if self.run.state == "lost":
            return True
        return self.guess is not None and self.value <= self.guess + _ROUNDING


@dataclass(frozen=True)
class Try:
    """One point of a cell's grid."""

    point: tuple[Setting, ...]  # a setting a key
    choice_runs: tuple[ChoiceRun, ...]  # one a seed

    @property
    def runs(self) -> tuple[SuiteRun, ...]:
        return tuple(choice_run.run for choice_run in self.choice_runs)

    @property
    def values(self) -> tuple[float | None, ...]:
        return tuple(choice_run.value for choice_run in self.choice_runs)

    @property
    def name(self) -> str:
        """``learning_rate 0.05, weight_decay 0.001``."""
        return self.runs[0].cell.tried

    @property
    def lost(self) -> int:
        """How many of its runs were lost."""
        return sum(run.state == "lost" for run in self.runs)

    @property
    def is_guessing(self) -> bool:
        """Whether all runs have ended, none of them better than one answer to all images would be."""
        return all(choice_run.is_guessing for choice_run in self.choice_runs)

    @property
    def mean(self) -> float | None:
        """Over seeds, lost runs included; None until all have ended."""
        known = [value for value in self.values if value is not None]
        if len(known) < len(self.values):
            return None
        return math.fsum(known) / len(known)


@dataclass(frozen=True)
class Tuning:
    """What a cell tries, and what came of it so far."""

    grid: Grid  # the values of each key
    tries: tuple[Try, ...]  # one for each point, in the order of the grid, the last key running fastest

    @property
    def runs(self) -> tuple[SuiteRun, ...]:
        """All choice runs of the cell; the first seed of each point before the second of any."""
        runs: list[SuiteRun] = []
        for of_one_seed in zip(*(tried.runs for tried in self.tries), strict=True):
            runs.extend(of_one_seed)
        return tuple(runs)

    @property
    def open(self) -> bool:
        """Whether some run has not ended, so that nothing is chosen yet."""
        return any(tried.mean is None for tried in self.tries)

    @property
    def hopeless(self) -> bool:
        """Whether every run was lost, so that there is nothing to choose."""
        return all(run.state == "lost" for run in self.runs)

    @property
    def guessing(self) -> bool:
        """Whether no run became better than one answer to all images: their order says nothing of the values."""
        return not self.hopeless and all(tried.is_guessing for tried in self.tries)

    @property
    def best(self) -> Try | None:
        """The try with the highest mean, of equals the first.

        None while runs are left, where all were lost, and where none became better than guessing.
        """
        if self.open or self.guessing:
            return None
        candidates = [tried for tried in self.tries if tried.lost < len(tried.runs)]
        return max(candidates, key=lambda tried: tried.mean or LOST, default=None)

    @property
    def tied(self) -> tuple[Try, ...]:
        """The tries that are as good as the best, itself among them; empty where it is better than all others."""
        best = self.best
        if best is None or best.mean is None:
            return ()
        equal = []
        for tried in self.tries:
            if tried.mean is not None and abs(tried.mean - best.mean) < _ROUNDING:
                equal.append(tried)
        if len(equal) == 1:
            return ()
        return tuple(equal)


def try_again(choice: Tuning, record: Path | None) -> None:
    """Forget that every run of a cell was lost: something else may have been wrong, such as missing data.

    Where some of them were not, the lost ones stay lost, because a value was chosen without them.
    """
    if not choice.hopeless:
        return
    for run in choice.runs:
        run.lost.unlink(missing_ok=True)
    if record is not None:
        add_to_record(record, {}, gone=[run.key for run in choice.runs])


# --- the choice runs of a cell ----------------------------------------------------------------------------------------


def choice_of(
    suite: Suite, choose: Choose, registry: Registry, cell: Cell, experiment: Experiment, overrides: Sequence[str]
) -> Tuning:
    """What a cell tries, with the state of every run."""
    try:
        measuring = _measuring(suite, choose, experiment)
    except CalfatError as error:
        raise in_cell(error, cell.name, suite) from None
    return _Planner(suite, choose, registry, cell, overrides, measuring).choice()


@dataclass(frozen=True)
class _Planner:
    """Makes the choice runs of one cell, and looks at what is there of them."""

    suite: Suite
    choose: Choose
    registry: Registry
    cell: Cell
    overrides: Sequence[str]
    measuring: tuple[Setting, ...]  # what makes a run of the cell a choice run

    def choice(self) -> Tuning:
        """The tries of the suite's grid, and of the values beyond its ends as far as their turn has come."""
        grid = self.suite.tried
        while True:
            tries = tuple(self.try_of(point) for point in itertools.product(*grid.values()))
            _refuse_twins(self.suite, self.cell, tries)
            choice = Tuning(grid, tries)
            wider_grid = self.wider_grid(choice)
            if wider_grid is None:
                return choice
            grid = wider_grid

    def try_of(self, point: tuple[Setting, ...]) -> Try:
        """The runs of one point of the grid, as they are on disk and in the record."""
        suite, cell = self.suite, self.cell
        texts = texts_of(point)
        name = ", ".join(f"{key} {value}" for key, value in texts.items())
        settings = (*cell.settings, *suite.settings_at("choose", "set"), *point, *self.measuring)
        experiment = resolve(suite, self.registry, f"{cell.name}, {name}", settings, self.overrides)
        cell_of_try = Cell(cell.labels, settings, experiment, tried=name)
        folder = suite.runs_directory / cell.folder / FOLDER / _folder(suite, point, texts)
        planned = [SuiteRun(cell_of_try, experiment, seed, folder / f"seed-{seed}") for seed in self.choose.seeds]
        choice_runs = []
        for run in look_again(suite.record, *planned):
            choice_runs.append(ChoiceRun(run, value_of_try(run, self.choose), guess_of_try(run, self.choose)))
        return Try(point, tuple(choice_runs))

    def wider_grid(self, choice: Tuning) -> Grid | None:
        """The grid with the next value beyond each end of it that is chosen; None where no end grows."""
        if choice.best is None:
            return None
        grid = dict(choice.grid)
        for setting in choice.best.point:
            beyond = self.value_beyond(setting, choice.grid[setting.key])
            if beyond is None:
                continue
            try:
                for point in itertools.product(*{**grid, setting.key: (beyond,)}.values()):
                    self.try_of(point)
            except RecipeError:  # an option does not take the next value, so what has been chosen stands
                continue
            # The new value comes last, so of equal values one that was there before is chosen.
            grid[setting.key] = (*grid[setting.key], beyond)
        num_tries = math.prod(map(len, grid.values()))
        if grid == choice.grid or num_tries > MOST_TRIES:
            return None
        return grid

    def value_beyond(self, setting: Setting, tried: Sequence[Setting]) -> Setting | None:
        """The next value, to two digits, beyond the end of a key's values; None inside, and where the key has none."""
        factor = self.choose.extend.get(setting.key)
        if factor is None:
            return None
        values = [one.value for one in tried]
        if setting.value == max(values):
            beyond = setting.value * factor
        elif setting.value == min(values):
            beyond = setting.value / factor
        else:
            return None
        return replace(setting, value=float(f"{beyond:.2g}"))


def _measuring(suite: Suite, choose: Choose, experiment: Experiment) -> tuple[Setting, ...]:
    """What makes a run of a cell one of its choice runs: it is evaluated on the validation split alone."""
    if experiment.data.monitored_split != "validation":
        raise suite.document.error(
            CHOOSE,
            "there is no validation split, and what is chosen on test examples is no test of it. Set "
            "data_args.validation_share, such as 0.1, in the suite's 'set' or in the base recipe.",
        )
    offered = {pick.label: pick for pick in (*experiment.monitor.evaluators, *experiment.evaluators)}
    evaluators = []
    for label in choose.metric:
        if label not in offered:
            raise suite.document.error(
                (*CHOOSE, "metric"), f"'{label}' is not among the evaluators of the run: {listed(offered)}."
            )
        pick = offered[label]
        evaluators.append(experiment.document.get(pick.path) or pick.name)
    changed: dict[str, Any] = {
        "calfat.evaluators": [],
        "calfat.monitor": {"every": _ONLY_THE_LAST, "evaluators": evaluators},
    }
    if experiment.reported.percent:
        changed["calfat.reported"] = {}  # of a paper's test split
    place = suite.document.place(CHOOSE)
    return tuple(Setting(key, value, place) for key, value in changed.items())


def texts_of(point: Sequence[Setting]) -> dict[str, str]:
    """Key to value, both as texts; keys by their last part where these differ."""
    names = [setting.key.rpartition(".")[2] for setting in point]
    if len(set(names)) < len(names):
        names = [setting.key for setting in point]
    return {name: yaml_text(setting.value) for name, setting in zip(names, point, strict=True)}


def _folder(suite: Suite, point: Sequence[Setting], texts: Mapping[str, str]) -> str:
    """``learning_rate=0.05``; another name for every point."""
    name = quote(",".join(f"{key}={value}" for key, value in texts.items()), safe="=,+")
    if len(name) > _LONGEST:
        longest = max(point, key=lambda setting: len(yaml_text(setting.value)))
        raise suite.document.error(
            (*CHOOSE, "grid", longest.key),
            f"its values are too long to name a folder ({longest.place}); write fewer options.",
        )
    return name


def value_of_try(run: SuiteRun, choose: Choose) -> float | None:
    """The mean of the metric's accuracies after the last round."""
    if run.state == "lost":
        return LOST
    if run.state != "finished":
        return None
    if run.recorded is not None:
        return run.recorded.values[CHOICE]
    path = RunDirectory(run.directory).rounds
    accuracies = []
    for record in read_rounds(path)[-1:]:
        for label in choose.metric:
            result = record.evaluations.get(label)
            if result is not None and result.not_run:
                raise RunError(
                    f"{path}: {label} did not run ({result.not_run}), so nothing can be chosen by it. Name "
                    f"another attack in the suite's choose.metric, and move {run.directory} away."
                )
            accuracy = record.accuracy(label)
            if accuracy is not None and math.isfinite(accuracy):
                accuracies.append(accuracy)
    if len(accuracies) < len(choose.metric):
        what = f"there is no value of {' and '.join(choose.metric)} in it"
        raise RunError(f"{path}: {what}. Move {run.directory} away to run it again.")
    return math.fsum(accuracies) / len(accuracies)


def guess_of_try(run: SuiteRun, choose: Choose) -> float | None:
    """What one answer to all images would have by the metric; None where it is not known.

    An evaluator of a plugin need not say it.
    """
    if run.state != "finished":
        return None
    if run.recorded is not None:
        return run.recorded.values.get(GUESS)
    last = read_rounds(RunDirectory(run.directory).rounds)[-1]
    guesses = []
    for label in choose.metric:
        guess = last.evaluations[label].guess
        if guess is None:
            return None
        guesses.append(guess)
    return math.fsum(guesses) / len(guesses)


def _refuse_twins(suite: Suite, cell: Cell, tries: Sequence[Try]) -> None:
    """Two spellings of one value would be two tries for the price of one, and so would a key without effect."""
    earlier: list[tuple[dict[str, Any], Try]] = []
    for tried in tries:
        experiment = tried.runs[0].experiment
        starts = tuple(f"{setting.place}: {setting.key}: " for setting in tried.point)
        for warning in experiment.warnings:
            if warning.startswith(starts) and "no effect" in warning:
                raise in_cell(RecipeError(f"{warning} So it cannot be chosen; remove it."), cell.name, suite)
        as_run = experiment.as_run()
        for other_run, twin in earlier:
            if _length(as_run) != _length(other_run) or same_but_rounds(as_run, other_run):
                continue
            why = "" if as_run == other_run else ", for what they differ in changes no result"
            what = f"'{twin.name}' and '{tried.name}' of the cell '{cell.name}' are the same run{why}; keep one."
            raise suite.document.error((*CHOOSE, "grid"), what)
        earlier.append((as_run, tried))


def _length(as_run: Mapping[str, Any]) -> tuple[Any, Any]:
    """How long a run trains, which ``same_but_rounds`` does not look at."""
    train = as_run["train_args"]
    return train["comm_round"], train["patience"]
