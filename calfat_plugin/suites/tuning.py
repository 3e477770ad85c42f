"""Choosing a cell's values: its choice runs, what they measured, the best of them, and all of it in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from calfat_plugin.errors import CalfatError, RecipeError, RunError, listed
from calfat_plugin.exact import parse_number
from calfat_plugin.experiment import Experiment, same_but_rounds
from calfat_plugin.federation.outliers import why_not_run
from calfat_plugin.options import to_plain, yaml_text
from calfat_plugin.recipe.document import KeyPath
from calfat_plugin.registry import Registry
from calfat_plugin.report.labels import listing
from calfat_plugin.report.numbers import bare_percent as percent
from calfat_plugin.report.numbers import counted
from calfat_plugin.rounds_csv import read_rounds
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites.cells import Cell, SuiteRun, in_cell, look_again, resolve, why_lost
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
class Try:
    """One point of a cell's grid."""

    point: tuple[Setting, ...]  # a setting a key
    runs: tuple[SuiteRun, ...]  # one a seed
    values: tuple[float | None, ...]  # of each run, on the validation split; LOST of a lost run, None of one to come
    guesses: tuple[float | None, ...]  # of each run, what one answer to all these images has; None: not known

    @property
    def name(self) -> str:
        """``learning_rate 0.05, weight_decay 0.001``."""
        return self.runs[0].cell.tried

    @property
    def lost(self) -> int:
        return sum(run.state == "lost" for run in self.runs)

    @property
    def is_guessing(self) -> bool:
        """Whether all runs have ended, none of them better than one answer to all images would be."""
        for run, value, guess in zip(self.runs, self.values, self.guesses, strict=True):
            if value is None:
                return False
            if run.state != "lost" and (guess is None or value > guess + _ROUNDING):
                return False
        return True

    @property
    def mean(self) -> float | None:
        """Over seeds, lost runs included; None until all have ended."""
        known = [value for value in self.values if value is not None]
        return math.fsum(known) / len(known) if len(known) == len(self.values) else None


@dataclass(frozen=True)
class Tuning:
    """What a cell tries, and what came of it so far."""

    grid: Grid  # the values of each key
    tries: tuple[Try, ...]  # one for each point, in the order of the grid, the last key running fastest

    @property
    def runs(self) -> tuple[SuiteRun, ...]:
        """All choice runs of the cell; the first seed of each point before the second of any."""
        by_seed = zip(*(each.runs for each in self.tries), strict=True)
        return tuple(itertools.chain.from_iterable(by_seed))

    @property
    def open(self) -> bool:
        """Whether some run has not ended, so that nothing is chosen yet."""
        return any(each.mean is None for each in self.tries)

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
        worth = [each for each in self.tries if each.lost < len(each.runs)]
        if self.open or self.guessing:
            return None
        return max(worth, key=lambda each: each.mean or LOST, default=None)

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
        return tuple(equal) if len(equal) > 1 else ()


def try_again(choice: Tuning, record: Path | None) -> None:
    """Forget that every run of a cell was lost: something else may have been wrong, such as missing data.

    Where some of them were not, the lost ones stay lost, because a value was chosen without them.
    """
    if choice.hopeless:
        for run in choice.runs:
            run.lost.unlink(missing_ok=True)
        if record is not None:
            add_to_record(record, {}, gone=[run.key for run in choice.runs])


def choice_of(
    suite: Suite, choose: Choose, registry: Registry, cell: Cell, experiment: Experiment, overrides: Sequence[str]
) -> Tuning:
    """What a cell tries, with the state of every run."""
    try:
        measuring = _measuring(suite, choose, experiment)
    except CalfatError as error:
        raise in_cell(error, cell.name, suite) from None

    alone = suite.settings_at("choose", "set")

    def tried(point: tuple[Setting, ...]) -> Try:
        texts = texts_of(point)
        name = ", ".join(f"{key} {value}" for key, value in texts.items())
        settings = (*cell.settings, *alone, *point, *measuring)
        made = resolve(suite, registry, f"{cell.name}, {name}", settings, overrides)
        trying = Cell(cell.labels, settings, made, tried=name)
        folder = suite.runs_directory / cell.folder / FOLDER / _folder(suite, point, texts)
        runs = [SuiteRun(trying, made, seed, folder / f"seed-{seed}") for seed in choose.seeds]
        found = look_again(suite.record, *runs)
        values = tuple(value_of_try(run, choose) for run in found)
        return Try(point, found, values, tuple(guess_of_try(run, choose) for run in found))

    grid: Grid | None = suite.tried
    while grid is not None:
        tries = tuple(map(tried, itertools.product(*grid.values())))
        _refuse_twins(suite, cell, tries)
        choice = Tuning(grid, tries)
        grid = _extended(choice, choose, tried)
    return choice


def _extended(choice: Tuning, choose: Choose, tried: Callable[[tuple[Setting, ...]], Try]) -> Grid | None:
    """The grid with the next value, to two digits, beyond each end of it that is chosen; None where no end grows.

    It comes last, so that it is chosen only if it is better than those before it. A value that an option does not take
    is left out: what has been chosen stands.
    """
    grid = dict(choice.grid)
    for setting in () if choice.best is None else choice.best.point:
        factor, values = choose.extend.get(setting.key), [each.value for each in choice.grid[setting.key]]
        if factor is not None and setting.value in (min(values), max(values)):
            beyond = setting.value * factor if setting.value == max(values) else setting.value / factor
            added = replace(setting, value=float(f"{beyond:.2g}"))
            with suppress(RecipeError):
                for point in itertools.product(*{**grid, setting.key: (added,)}.values()):
                    tried(point)
                grid[setting.key] = (*choice.grid[setting.key], added)
    grows = grid != choice.grid and math.prod(map(len, grid.values())) <= MOST_TRIES
    return grid if grows else None


def _measuring(suite: Suite, choose: Choose, experiment: Experiment) -> tuple[Setting, ...]:
    """What makes a run of a cell one of its choice runs: it is evaluated on the validation split alone."""
    if experiment.data.monitored_split != "validation":
        raise suite.document.error(
            CHOOSE,
            "there is no validation split, and what is chosen on test examples is no test of it. Set "
            "data_args.validation_share, such as 0.1, in the suite's 'set' or in the base recipe.",
        )
    offered = {pick.label: pick for pick in (*experiment.monitor.evaluators, *experiment.evaluators)}
    for label in choose.metric:
        if label not in offered:
            raise suite.document.error(
                (*CHOOSE, "metric"), f"'{label}' is not among the evaluators of the run: {listed(offered)}."
            )
    document = experiment.document
    monitor = {
        "every": _ONLY_THE_LAST,
        "evaluators": [document.get(offered[label].path) or offered[label].name for label in choose.metric],
    }
    changed: dict[str, Any] = {"calfat.evaluators": [], "calfat.monitor": monitor}
    if experiment.reported.percent:
        changed["calfat.reported"] = {}  # of a paper's test split
    return tuple(Setting(key, value, suite.document.place(CHOOSE)) for key, value in changed.items())


def texts_of(point: Sequence[Setting]) -> dict[str, str]:
    """Key to value, both as texts; keys by their last part where these differ."""
    short = [setting.key.rpartition(".")[2] for setting in point]
    names = short if len(set(short)) == len(short) else [setting.key for setting in point]
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
    if run.state != "finished":
        return LOST if run.state == "lost" else None
    if run.recorded is not None:
        return run.recorded.values[CHOICE]
    path = RunDirectory(run.directory).rounds
    rows = read_rounds(path)
    for label in choose.metric if rows else ():
        if why := why_not_run(rows[-1], label):
            raise RunError(
                f"{path}: {label} did not run ({why}), so nothing can be chosen by it. Name another attack in the "
                f"suite's choose.metric, and move {run.directory} away."
            )
    try:
        last = rows[-1]
        value = math.fsum(float(last[label]) for label in choose.metric) / len(choose.metric)
        if not math.isfinite(value):
            raise ValueError
        return value
    except (IndexError, KeyError, ValueError):
        what = f"there is no value of {' and '.join(choose.metric)} in it"
        raise RunError(f"{path}: {what}. Move {run.directory} away to run it again.") from None


def guess_of_try(run: SuiteRun, choose: Choose) -> float | None:
    """What one answer to all images would have by the metric; None where it is not known.

    An earlier version did not write it, and an evaluator of a plugin need not say it.
    """
    if run.state != "finished":
        return None
    if run.recorded is not None:
        return run.recorded.values.get(GUESS)
    last = read_rounds(RunDirectory(run.directory).rounds)[-1]
    texts = [last.get(f"{label}_guess") for label in choose.metric]
    known = [float(text) for text in texts if text]
    return math.fsum(known) / len(known) if len(known) == len(texts) else None


def _refuse_twins(suite: Suite, cell: Cell, tries: Sequence[Try]) -> None:
    """Two spellings of one value would be two tries for the price of one, and so would a key without effect."""
    seen: list[tuple[dict[str, Any], Try]] = []
    for each in tries:
        experiment = each.runs[0].experiment
        starts = tuple(f"{setting.place}: {setting.key}: " for setting in each.point)
        useless = next((w for w in experiment.warnings if w.startswith(starts) and "no effect" in w), None)
        if useless:
            raise in_cell(RecipeError(f"{useless} So it cannot be chosen; remove it."), cell.name, suite)
        as_run = experiment.as_run()
        length = [as_run["train_args"][key] for key in ("comm_round", "patience")]
        for other_run, twin in seen:
            other_length = [other_run["train_args"][key] for key in ("comm_round", "patience")]
            if length == other_length and not same_but_rounds(as_run, other_run):
                why = "" if as_run == other_run else ", for what they differ in changes no result"
                what = f"'{twin.name}' and '{each.name}' of the cell '{cell.name}' are the same run{why}; keep one."
                raise suite.document.error((*CHOOSE, "grid"), what)
        seen.append((as_run, each))


# --- in words ---------------------------------------------------------------------------------------------------------


def chosen_text(choice: Tuning) -> str:
    """``learning_rate 0.1, upper edge of the grid``; several keys are separated by semicolons; empty before."""
    if choice.guessing:
        return "nothing: no value is better than guessing"
    if choice.best is None:
        return "nothing: every run was lost" if choice.hopeless else ""
    parts = []
    for (key, value), setting in zip(texts_of(choice.best.point).items(), choice.best.point, strict=True):
        place = place_in_grid(setting.value, [each.value for each in choice.grid[setting.key]])
        parts.append(f"{key} {value}, {place}" if place else f"{key} {value}")
    return "; ".join(parts)


def place_in_grid(value: Any, values: Sequence[Any]) -> str:
    """``upper edge of the grid``: larger values may be better still; empty inside, and where there is no order."""
    if len(values) == 1:
        return "the only value tried"
    try:
        chosen, numbers = parse_number(value), [parse_number(each) for each in values]
    except ValueError:  # names, mappings, true and false
        return ""
    if min(numbers) < chosen < max(numbers):
        return ""
    return f"{'lower' if chosen < max(numbers) else 'upper'} edge of the grid"


def choice_notes(choice: Tuning) -> list[str]:
    """What every try measured, and why runs were lost, a line each; nothing before the first run has ended."""
    if all(value is None for each in choice.tries for value in each.values):
        return []
    lost = [
        f"{run.cell.tried}, seed {run.seed} was lost: {why_lost(run)}" for run in choice.runs if run.state == "lost"
    ]
    return [f"tried {tries_text(choice)}", *remarks(choice), *lost]


def remarks(choice: Tuning) -> list[str]:
    """What is wrong with a choice, and what to do next: no value learned anything, or several are equally good."""
    if choice.guessing:
        guesses = [guess for tried in choice.tries for guess in tried.guesses if guess is not None]
        return [
            f"nothing is chosen: every run ended no better than one answer to all images, which has "
            f"{percent(max(guesses))}. Try other values in choose.grid, or more rounds, and give the same command again"
        ]
    if tied := choice.tied:
        seeds = [run.seed for run in tied[0].runs]
        names = listing([tried.name for tried in tied])
        return [
            f"a tie: {names} have the same mean, {percent(tied[0].mean)}, and the first was taken. To run the tie "
            f"again, add a seed to choose.seeds, such as {max(seeds) + 1}, and give the same command again: finished "
            "runs are kept"
        ]
    return []


def tries_text(choice: Tuning) -> str:
    """``learning_rate 0.02: 61.30; learning_rate 0.5: 12.10, 1 of 2 runs lost``; the chosen one is marked."""
    texts = []
    for each in choice.tries:
        number = percent(each.mean) if each.mean is not None else "not finished"
        lost = f", {each.lost} of {counted(len(each.runs), 'run')} lost" if each.lost else ""
        texts.append(f"{each.name}: {number}{lost}{' (chosen)' if each is choice.best else ''}")
    return "; ".join(texts)


def how_chosen(choose: Choose, choices: Mapping[str, Tuning]) -> str:
    """How values were chosen, for a caption, and whether every cell had as many tries."""
    metric = f"the mean of {listing(choose.metric)}" if len(choose.metric) > 1 else choose.metric[0]
    seeds = f"seed{'s' if len(choose.seeds) > 1 else ''} {', '.join(map(str, choose.seeds))}"
    text = (
        f"Values are chosen for each row by {metric} on the validation split after the last round, the mean over "
        f"{seeds}, in runs that never see the test split; a run that failed counts as 0."
    )
    if choose.set:
        text += f" Only these runs have {listing([Setting(*each).override for each in choose.set.items()])}."
    if choose.extend:
        factors = listing([f"{key} {factor:g}" for key, factor in choose.extend.items()])
        text += f" While the best value is an end of its grid, the next one beyond is tried, too (factors: {factors})."
    numbers = {name: len(choice.tries) for name, choice in choices.items()}
    if len(set(numbers.values())) <= 1:
        return text + f" Tries of every row: {max(numbers.values(), default=0)}."
    each = ", ".join(f"{name} {number}" for name, number in numbers.items())
    return f"{text} Rows have different numbers of tries: {each}."


def as_json(choice: Tuning) -> dict[str, Any]:
    """A choice with the values of all its runs; accuracies are fractions."""
    best = choice.best
    return {
        "chosen": None if best is None else _settings(best.point),
        "text": chosen_text(choice),
        "tried": tries_text(choice),
        "guessing": choice.guessing,
        "tied": [_settings(tried.point) for tried in choice.tied],
        "remarks": remarks(choice),
        "tries": [
            {
                "settings": _settings(each.point),
                "mean": each.mean,
                "lost": each.lost,
                "runs": [
                    {
                        "seed": run.seed,
                        "directory": str(run.directory),
                        "status": run.state,
                        "value": value,
                        "guess": guess,
                    }
                    for run, value, guess in zip(each.runs, each.values, each.guesses, strict=True)
                ],
            }
            for each in choice.tries
        ],
    }


def _settings(point: Sequence[Setting]) -> dict[str, Any]:
    return {setting.key: to_plain(setting.value) for setting in point}
