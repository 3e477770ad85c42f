"""Choosing a cell's values: its choice runs, what they measured, the best of them, and what is said about it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from calfat_plugin.errors import CalfatError, RecipeError, RunError, listed
from calfat_plugin.exact import parse_number
from calfat_plugin.experiment import Experiment, same_but_rounds
from calfat_plugin.options import to_plain, yaml_text
from calfat_plugin.recipe.document import KeyPath
from calfat_plugin.registry import Registry
from calfat_plugin.report.numbers import bare_percent as percent
from calfat_plugin.report.numbers import counted, listing
from calfat_plugin.rounds import read_rounds
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites.cells import Cell, SuiteRun, in_cell, look_again, resolve, why_lost
from calfat_plugin.suites.record import CHOICE, GUESS, add_to_record
from calfat_plugin.suites.suite import MOST_TRIES, Choose, Grid, Setting, Suite

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
    value: float | None  # the mean of ``choose.metric`` after the last round; LOST of a lost run, None of one to come
    guess: float | None  # what one answer to all images has; None: not known

    @classmethod
    def read(cls, run: SuiteRun, choose: Choose) -> ChoiceRun:
        """What a run measured, from the suite's record or from its own directory."""
        if run.state == "lost":
            return cls(run, LOST, None)
        if run.state != "finished":
            return cls(run, None, None)
        if run.recorded is not None:
            return cls(run, run.recorded.values[CHOICE], run.recorded.values.get(GUESS))
        path = RunDirectory(run.directory).rounds
        accuracies: list[float] = []
        guesses: list[float] = []
        for record in read_rounds(path)[-1:]:
            for label in choose.metric:
                result = record.evaluations.get(label)
                if result is None:
                    continue
                if result.not_run:
                    raise RunError(
                        f"{path}: {label} did not run ({result.not_run}), so nothing can be chosen by it. Name "
                        f"another attack in the suite's choose.metric, and move {run.directory} away."
                    )
                if result.accuracy is not None and math.isfinite(result.accuracy):
                    accuracies.append(result.accuracy)
                if result.guess is not None:
                    guesses.append(result.guess)
        count = len(choose.metric)
        if len(accuracies) < count:
            raise RunError(
                f"{path}: there is no value of {' and '.join(choose.metric)} in it. Move {run.directory} away to run "
                "it again."
            )
        guess = None
        if len(guesses) == count:
            guess = math.fsum(guesses) / count
        return cls(run, math.fsum(accuracies) / count, guess)

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
        runs_of_tries = [tried.runs for tried in self.tries]
        runs_by_seed = zip(*runs_of_tries, strict=True)
        return tuple(itertools.chain.from_iterable(runs_by_seed))

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
        values = ",".join(f"{key}={value}" for key, value in texts.items())
        folder_name = quote(values, safe="=,+")  # ``learning_rate=0.05``; another one for every point
        if len(folder_name) > _LONGEST:
            longest = max(point, key=lambda setting: len(yaml_text(setting.value)))
            raise suite.document.error(
                (*CHOOSE, "grid", longest.key),
                f"its values are too long to name a folder ({longest.place}); write fewer options.",
            )
        folder = suite.runs_directory / cell.folder / FOLDER / folder_name
        planned = [SuiteRun(cell_of_try, experiment, seed, folder / f"seed-{seed}") for seed in self.choose.seeds]
        runs = look_again(suite.record, *planned)
        return Try(point, tuple(ChoiceRun.read(run, self.choose) for run in runs))

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
            text = f"'{twin.name}' and '{tried.name}' of the cell '{cell.name}' are the same run"
            if as_run != other_run:
                text += ", for what they differ in changes no result"
            raise suite.document.error((*CHOOSE, "grid"), f"{text}; keep one.")
        earlier.append((as_run, tried))


def _length(as_run: Mapping[str, Any]) -> tuple[Any, Any]:
    """How long a run trains, which ``same_but_rounds`` does not look at."""
    train = as_run["train_args"]
    return train["comm_round"], train["patience"]


# --- in words, and for programs ---------------------------------------------------------------------------------------


def chosen_text(choice: Tuning) -> str:
    """``learning_rate 0.1, upper edge of the grid``; several keys are separated by semicolons; empty before."""
    if choice.guessing:
        return "nothing: no value is better than guessing"
    if choice.hopeless:
        return "nothing: every run was lost"
    if choice.best is None:
        return ""
    parts = []
    for (key, value), setting in zip(texts_of(choice.best.point).items(), choice.best.point, strict=True):
        place = place_in_grid(setting.value, [tried.value for tried in choice.grid[setting.key]])
        text = f"{key} {value}"
        if place:
            text += f", {place}"
        parts.append(text)
    return "; ".join(parts)


def place_in_grid(value: Any, values: Sequence[Any]) -> str:
    """``upper edge of the grid``: larger values may be better still; empty inside, and where there is no order."""
    if len(values) == 1:
        return "the only value tried"
    try:
        chosen = parse_number(value)
        numbers = [parse_number(other) for other in values]
    except ValueError:  # names, mappings, true and false
        return ""
    if chosen >= max(numbers):
        return "upper edge of the grid"
    if chosen <= min(numbers):
        return "lower edge of the grid"
    return ""


def choice_notes(choice: Tuning) -> list[str]:
    """What every try measured, and why runs were lost, a line each; nothing before the first run has ended."""
    if all(run.state not in ("finished", "lost") for run in choice.runs):
        return []
    notes = [f"tried {tries_text(choice)}", *remarks(choice)]
    for run in choice.runs:
        if run.state == "lost":
            notes.append(f"{run.cell.tried}, seed {run.seed} was lost: {why_lost(run)}")
    return notes


def remarks(choice: Tuning) -> list[str]:
    """What is wrong with a choice, and what to do next: no value learned anything, or several are equally good."""
    if choice.guessing:
        guess = 0.0
        for tried in choice.tries:
            for choice_run in tried.choice_runs:
                guess = max(guess, choice_run.guess or 0.0)
        return [
            f"nothing is chosen: every run ended no better than one answer to all images, which has "
            f"{percent(guess)}. Try other values in choose.grid, or more rounds, and give the same command again"
        ]
    tied = choice.tied
    if not tied:
        return []
    names = listing([tried.name for tried in tied])
    new_seed = max(run.seed for run in tied[0].runs) + 1
    return [
        f"a tie: {names} have the same mean, {percent(tied[0].mean)}, and the first was taken. To run the tie "
        f"again, add a seed to choose.seeds, such as {new_seed}, and give the same command again: finished "
        "runs are kept"
    ]


def tries_text(choice: Tuning) -> str:
    """``learning_rate 0.02: 61.30; learning_rate 0.5: 12.10, 1 of 2 runs lost``; the chosen one is marked."""
    best = choice.best
    texts = []
    for tried in choice.tries:
        mean = "not finished"
        if tried.mean is not None:
            mean = percent(tried.mean)
        text = f"{tried.name}: {mean}"
        if tried.lost:
            text += f", {tried.lost} of {counted(len(tried.runs), 'run')} lost"
        if tried is best:
            text += " (chosen)"
        texts.append(text)
    return "; ".join(texts)


def how_chosen(choose: Choose, choices: Mapping[str, Tuning]) -> str:
    """How values were chosen, for a caption, and whether every cell had as many tries."""
    metric = choose.metric[0]
    if len(choose.metric) > 1:
        metric = f"the mean of {listing(choose.metric)}"
    seeds = f"seed {choose.seeds[0]}"
    if len(choose.seeds) > 1:
        seeds = f"seeds {', '.join(map(str, choose.seeds))}"
    text = (
        f"Values are chosen for each row by {metric} on the validation split after the last round, the mean over "
        f"{seeds}, in runs that never see the test split; a run that failed counts as 0."
    )
    if choose.set:
        overrides = [Setting(key, value).override for key, value in choose.set.items()]
        text += f" Only these runs have {listing(overrides)}."
    if choose.extend:
        factors = [f"{key} {factor:g}" for key, factor in choose.extend.items()]
        text += (
            " While the best value is an end of its grid, the next one beyond is tried, too (factors: "
            f"{listing(factors)})."
        )
    num_tries = {len(choice.tries) for choice in choices.values()}
    if len(num_tries) <= 1:
        return text + f" Tries of every row: {max(num_tries, default=0)}."
    rows = ", ".join(f"{name} {len(choice.tries)}" for name, choice in choices.items())
    return f"{text} Rows have different numbers of tries: {rows}."


def choice_as_json(choice: Tuning) -> dict[str, Any]:
    """A choice with the values of all its runs; accuracies are fractions."""
    best = choice.best
    tries = []
    for tried in choice.tries:
        runs = []
        for choice_run in tried.choice_runs:
            run = choice_run.run
            runs.append(
                {
                    "seed": run.seed,
                    "directory": str(run.directory),
                    "status": run.state,
                    "value": choice_run.value,
                    "guess": choice_run.guess,
                }
            )
        tries.append({"settings": _settings(tried.point), "mean": tried.mean, "lost": tried.lost, "runs": runs})
    chosen = None
    if best is not None:
        chosen = _settings(best.point)
    return {
        "chosen": chosen,
        "text": chosen_text(choice),
        "tried": tries_text(choice),
        "guessing": choice.guessing,
        "tied": [_settings(tried.point) for tried in choice.tied],
        "remarks": remarks(choice),
        "tries": tries,
    }


def _settings(point: Sequence[Setting]) -> dict[str, Any]:
    return {setting.key: to_plain(setting.value) for setting in point}
