"""Which runs are seeds of one setting, which settings have accuracies that compare, and how they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from calfat_plugin.experiment.differences import comparable
from calfat_plugin.maths.intervals import Score, with_rivals
from calfat_plugin.options import Tag
from calfat_plugin.recipe.clients import group_keys_with
from calfat_plugin.recipe.tagged_keys import has_tag
from calfat_plugin.results import NATURAL, WORST_CASE, evaluator_of, release_of


def settings_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key to value of a recipe as run, for all that parts runs into settings."""
    return {key: value for key, value in comparable(recipe).items() if not has_tag(key, Tag.NO_SETTING)}


def problem_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree before accuracies compare, of a recipe as run: data, partition, model, clients and threat.

    Of groups of clients it is who attacks and who has a threat of its own; by what others train is a method.
    """
    problem = {key: value for key, value in settings_of(recipe).items() if has_tag(key, Tag.PROBLEM)}
    of_a_group = group_keys_with(Tag.PROBLEM)
    groups = []
    for group in recipe.get("calfat", {}).get("clients") or ():
        if "threat" in group or "attacker" in group:
            groups.append({key: value for key, value in group.items() if key in of_a_group})
    if groups:
        problem["calfat.clients"] = groups
    return problem


def measured_with(recipe: Mapping[str, Any], label: str) -> object:
    """The evaluator of a label as a recipe as run picks it, of a worst case all attacks; None: it has none."""
    picks = {pick.get("label", pick["name"]): pick for pick in recipe["calfat"]["evaluators"]}
    if label == WORST_CASE:
        return [pick for _, pick in sorted(picks.items()) if pick["name"] != NATURAL]
    return picks.get(label)


class Measured(Protocol):
    """A run with its results."""

    def value(self, metric: str) -> float | None:
        """An accuracy, also by the release's convention or of the worst, or another figure; None: not measured."""

    def num_examples(self, metric: str) -> int | None:
        """What an accuracy is a share of."""

    def not_run(self, metric: str) -> str:
        """Why the attack of a metric did not run, so that it has no value; empty where it ran."""


def score_of(
    runs: Mapping[int, Measured],
    metric: str,
    is_accuracy: bool = True,
    reported: float | None = None,
    tolerance: float | None = None,
) -> Score:
    """What runs of one setting, by seed, measured; ``reported`` in percent, and what may differ from it in points."""
    values: dict[int, float] = {}
    examples: set[int] = set()
    release: list[float] = []
    not_run: dict[int, str] = {}
    for seed, run in runs.items():
        value, number, why = run.value(metric), run.num_examples(metric), run.not_run(metric)
        if why:
            not_run[seed] = why
        if value is None:
            continue
        values[seed] = value
        if number is not None:
            examples.add(number)
        by_release = run.value(release_of(metric))
        if by_release is not None:
            release.append(by_release)
    if reported is None or len(release) < len(values):
        release = []  # of all of them or of none
    return Score(
        values,
        examples.pop() if len(examples) == 1 else None,
        is_accuracy,
        None if reported is None else reported / 100,
        tuple(release),
        None if tolerance is None else tolerance / 100,
        not_run=not_run,
    )


def compared_alike(rows: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Score]]]) -> dict[str, dict[str, Score]]:
    """Row to its scores, each accuracy with its rival: the best of those that were measured alike on one problem.

    A worst case is measured alike where all attacks are.

    Figures of plugins have no rival: of some of them less is better.

    Args:
        rows: name to (recipe as run, metric to score).
    """
    alike: dict[tuple[str, str], dict[str, Score]] = {}  # metric, and problem and evaluator, to the scores of rows
    for name, (recipe, scores) in rows.items():
        problem = problem_of(recipe)
        for metric, score in scores.items():
            if score.is_accuracy:
                kind = repr((problem, measured_with(recipe, evaluator_of(metric))))
                alike.setdefault((metric, kind), {})[name] = score
    found = {name: dict(scores) for name, (_, scores) in rows.items()}
    for (metric, _), scores in alike.items():
        for name, score in with_rivals(scores).items():
            found[name][metric] = score
    return found
