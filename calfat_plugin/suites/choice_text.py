"""How a cell's values were chosen, in words and for programs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from calfat_plugin.exact import parse_number
from calfat_plugin.options import to_plain
from calfat_plugin.report.numbers import bare_percent as percent
from calfat_plugin.report.numbers import counted, listing
from calfat_plugin.suites.cells import why_lost
from calfat_plugin.suites.parse import Setting
from calfat_plugin.suites.schema import Choose
from calfat_plugin.suites.tuning import ChoiceRun, Tuning, texts_of


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
    values = itertools.chain.from_iterable(tried.values for tried in choice.tries)
    if all(value is None for value in values):
        return []
    notes = [f"tried {tries_text(choice)}", *remarks(choice)]
    for run in choice.runs:
        if run.state == "lost":
            notes.append(f"{run.cell.tried}, seed {run.seed} was lost: {why_lost(run)}")
    return notes


def remarks(choice: Tuning) -> list[str]:
    """What is wrong with a choice, and what to do next: no value learned anything, or several are equally good."""
    if choice.guessing:
        choice_runs = itertools.chain.from_iterable(tried.choice_runs for tried in choice.tries)
        guess = max(run.guess for run in choice_runs if run.guess is not None)
        return [
            f"nothing is chosen: every run ended no better than one answer to all images, which has "
            f"{percent(guess)}. Try other values in choose.grid, or more rounds, and give the same command again"
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
        text += f" Only these runs have {listing([Setting(*change).override for change in choose.set.items()])}."
    if choose.extend:
        factors = listing([f"{key} {factor:g}" for key, factor in choose.extend.items()])
        text += f" While the best value is an end of its grid, the next one beyond is tried, too (factors: {factors})."
    num_tries = {name: len(choice.tries) for name, choice in choices.items()}
    if len(set(num_tries.values())) <= 1:
        return text + f" Tries of every row: {max(num_tries.values(), default=0)}."
    of_rows = ", ".join(f"{name} {number}" for name, number in num_tries.items())
    return f"{text} Rows have different numbers of tries: {of_rows}."


def as_json(choice: Tuning) -> dict[str, Any]:
    """A choice with the values of all its runs; accuracies are fractions."""
    best = choice.best
    tries = []
    for tried in choice.tries:
        runs = [_run_as_json(choice_run) for choice_run in tried.choice_runs]
        tries.append({"settings": _settings(tried.point), "mean": tried.mean, "lost": tried.lost, "runs": runs})
    return {
        "chosen": None if best is None else _settings(best.point),
        "text": chosen_text(choice),
        "tried": tries_text(choice),
        "guessing": choice.guessing,
        "tied": [_settings(tried.point) for tried in choice.tied],
        "remarks": remarks(choice),
        "tries": tries,
    }


def _run_as_json(choice_run: ChoiceRun) -> dict[str, Any]:
    run = choice_run.run
    return {
        "seed": run.seed,
        "directory": str(run.directory),
        "status": run.state,
        "value": choice_run.value,
        "guess": choice_run.guess,
    }


def _settings(point: Sequence[Setting]) -> dict[str, Any]:
    return {setting.key: to_plain(setting.value) for setting in point}
