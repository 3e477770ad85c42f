"""Choices in words: what was chosen, how near the edge of its grid it lies, and what every try measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from calfat_plugin.disk import read_bytes
from calfat_plugin.options import to_plain
from calfat_plugin.recipe.document import dotted
from calfat_plugin.report.numbers import bare_percent as percent
from calfat_plugin.report.numbers import counted
from calfat_plugin.report.words import listing
from calfat_plugin.suites.cells import PlannedRun
from calfat_plugin.suites.choices import Choice, Try
from calfat_plugin.suites.schema import Choose, Setting
from calfat_plugin.threat import parse_number

_LONGEST_REASON = 100_000  # bytes; longer ones are not ours


def chosen_text(choice: Choice) -> str:
    """``learning_rate 0.1, upper edge of the grid``; several keys are separated by semicolons; empty before."""
    if choice.best is None:
        return "nothing: every run was lost" if choice.hopeless else ""
    parts = []
    for text, setting in zip(choice.best.texts, choice.best.point, strict=True):
        place = place_in_grid(setting.value, [each.value for each in choice.grid[setting.path]])
        parts.append(f"{text}, {place}" if place else text)
    return "; ".join(parts)


def place_in_grid(value: Any, values: Sequence[Any]) -> str:
    """How near the edge of its grid a number lies, in words; empty where the values have no order.

    Args:
        value: the chosen one.
        values: all that were tried, in any order.
    """
    if len(values) == 1:
        return "the only value tried"
    try:
        chosen, numbers = parse_number(value), [parse_number(each) for each in values]
    except ValueError:  # names, mappings, true and false
        return ""
    below, above = (sum(_sign(number - chosen) == side for number in numbers) for side in (-1, 1))
    if not above or not below:
        return f"{'lower' if above else 'upper'} edge of the grid"
    edge = "both edges" if below == above else f"the {'lower' if below < above else 'upper'} edge"
    return f"{counted(min(below, above), 'step')} from {edge} of the grid"


def _sign(number: Fraction) -> int:
    return (number > 0) - (number < 0)


def choice_notes(choice: Choice) -> list[str]:
    """What every try measured, and why runs were lost, a line each; nothing before the first run has ended."""
    if all(value is None for each in choice.tries for value in each.values):
        return []
    lost = [f"{run.cell.tried}, seed {run.seed} was lost: {_reason(run)}" for run in choice.runs if run.state == "lost"]
    return [f"tried {tries_text(choice)}", *lost]


def _reason(run: PlannedRun) -> str:
    if run.recorded is not None:
        return "it is so in the suite's record"
    return read_bytes(run.lost, _LONGEST_REASON).decode("utf-8", "replace").strip()


def tries_text(choice: Choice) -> str:
    """``learning_rate 0.02: 61.30; learning_rate 0.5: 12.10, 1 of 2 runs lost``; the chosen one is marked."""
    return "; ".join(_try_text(each, choice) + (" (chosen)" if each is choice.best else "") for each in choice.tries)


def _try_text(each: Try, choice: Choice) -> str:
    number = percent(each.mean) if each.mean is not None else "not finished"
    one = " with the first seed" if len(each.runs) < choice.seeds else ""
    lost = f", {each.lost} of {counted(len(each.runs), 'run')} lost" if each.lost else ""
    return f"{each.name}: {number}{one}{lost}"


def how_chosen(choose: Choose, choices: Mapping[str, Choice]) -> str:
    """How values were chosen, for a caption, and whether every cell had as many tries."""
    labels = listing(choose.metric)
    metric = f"the mean of {labels}" if len(choose.metric) > 1 else labels
    when = "after the last round" if choose.by == "last" else "in the best round"
    seeds = f"seed{'s' if len(choose.seeds) > 1 else ''} {', '.join(map(str, choose.seeds))}"
    text = (
        f"Values are chosen for each row by {metric} on the validation split {when}, the mean over {seeds}, in runs "
        "that never see the test split; a run that failed counts as 0."
    )
    if choose.finalists is not None:
        finals = "the best value" if choose.finalists == 1 else f"the {choose.finalists} best values"
        text += f" The first seed tries all values, the others {finals} by it, and the choice is among these."
    if choose.extend:
        factors = listing([f"{dotted(key)} {factor:g}" for key, factor in choose.extend.items()])
        text += (
            f" Where the best value is an end of its grid, the next one beyond it is tried, too, until it is not "
            f"(factors: {factors})."
        )
    numbers = {name: len(choice.tries) for name, choice in choices.items()}
    if len(set(numbers.values())) <= 1:
        return text + f" Tries of every row: {max(numbers.values(), default=0)}."
    each = ", ".join(f"{name} {number}" for name, number in numbers.items())
    return f"{text} Rows have different numbers of tries: {each}."


def as_json(choice: Choice) -> dict[str, Any]:
    """A choice with the values of all its runs; accuracies are fractions."""
    best = choice.best
    return {
        "chosen": None if best is None else _settings(best.point),
        "text": chosen_text(choice),
        "tried": tries_text(choice),
        "tries": [
            {
                "settings": _settings(each.point),
                "mean": each.mean,
                "lost": each.lost,
                "runs": [
                    {"seed": run.seed, "directory": str(run.directory), "status": run.state, "value": value}
                    for run, value in zip(each.runs, each.values, strict=True)
                ],
            }
            for each in choice.tries
        ],
    }


def _settings(point: Sequence[Setting]) -> dict[str, Any]:
    return {setting.key: to_plain(setting.value) for setting in point}
