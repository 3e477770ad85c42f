"""Which runs have accuracies that compare, their scores as means over seeds, and the tables of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from calfat_plugin.experiment.differences import comparable
from calfat_plugin.maths.intervals import Score, with_rivals
from calfat_plugin.options import Tag
from calfat_plugin.recipe.clients import group_keys_with
from calfat_plugin.recipe.tagged_keys import has_tag
from calfat_plugin.report.numbers import NO_NUMBER, bare_percent, figure, interval, listing, paired_points, points
from calfat_plugin.report.table import Cell, Row, Table
from calfat_plugin.results import NATURAL, WORST, WORST_CASE, evaluator_of, release_of


def settings_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key to value of a recipe as run: the keys in which runs of one setting agree."""
    return {key: value for key, value in comparable(recipe).items() if not has_tag(key, Tag.NO_SETTING)}


def problem_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree before accuracies compare, of a recipe as run: data, partition, model, clients and threat.

    A group of clients is a part of the problem if it attacks or has a threat of its own. How a group trains is a part
    of the method.
    """
    problem = {key: value for key, value in settings_of(recipe).items() if has_tag(key, Tag.PROBLEM)}
    keys_of_groups = group_keys_with(Tag.PROBLEM)
    groups = []
    for group in recipe.get("calfat", {}).get("clients") or ():
        if "threat" in group or "attacker" in group:
            groups.append({key: value for key, value in group.items() if key in keys_of_groups})
    if groups:
        problem["calfat.clients"] = groups
    return problem


def measured_with(recipe: Mapping[str, Any], label: str) -> object:
    """What a recipe as run says of the evaluator with this label: of a worst case, all attacks; None: it has none."""
    evaluators = {pick.get("label", pick["name"]): pick for pick in recipe["calfat"]["evaluators"]}
    if label != WORST_CASE:
        return evaluators.get(label)
    return [pick for _, pick in sorted(evaluators.items()) if pick["name"] != NATURAL]


class Measured(Protocol):
    """A run with its results."""

    def value(self, metric: str) -> float | None:
        """An accuracy (also by the release's convention, or of the worst) or another figure; None: not measured."""

    def num_examples(self, metric: str) -> int | None:
        """The number of examples of which an accuracy is a share."""

    def not_run(self, metric: str) -> str:
        """Why the attack of a metric did not run, so that it has no value; empty where it ran."""


def score_of(
    runs: Mapping[int, Measured],
    metric: str,
    is_accuracy: bool = True,
    reported: float | None = None,
    tolerance: float | None = None,
) -> Score:
    """The score of runs of one setting.

    Args:
        runs: by seed.
        metric: of a suite, such as ``pgd20`` or ``pgd20:worst-class``.
        is_accuracy: whether the metric is a share of examples.
        reported: what a paper reports, in percent.
        tolerance: the difference from it that passes unmarked, in points.
    """
    values: dict[int, float] = {}
    release: list[float] = []
    numbers_of_examples: set[int] = set()
    not_run: dict[int, str] = {}
    for seed, run in runs.items():
        reason = run.not_run(metric)
        if reason:
            not_run[seed] = reason
        value = run.value(metric)
        if value is None:
            continue
        values[seed] = value
        number = run.num_examples(metric)
        if number is not None:
            numbers_of_examples.add(number)
        release_value = run.value(release_of(metric))
        if release_value is not None:
            release.append(release_value)
    num_examples = None
    if len(numbers_of_examples) == 1:
        num_examples = numbers_of_examples.pop()
    # The mean by the release's convention is over all seeds, or there is none.
    if reported is None or len(release) < len(values):
        release = []
    if reported is not None:
        reported /= 100
    if tolerance is not None:
        tolerance /= 100
    return Score(values, num_examples, is_accuracy, reported, tuple(release), tolerance, not_run=not_run)


def compared_alike(rows: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Score]]]) -> dict[str, dict[str, Score]]:
    """Row to its scores, each accuracy with its rival: the best of those that were measured alike on one problem.

    Two worst cases were measured alike if all their attacks were. Figures of plugins have no rival, because of some of
    them less is better.

    Args:
        rows: name to (recipe as run, metric to score).
    """
    scores_of_rows: dict[str, dict[str, Score]] = {}
    comparable_scores: dict[tuple[str, str], dict[str, Score]] = {}  # by metric, and by problem and evaluator
    for name, (recipe, scores) in rows.items():
        scores_of_rows[name] = dict(scores)
        problem = problem_of(recipe)
        for metric, score in scores.items():
            if score.is_accuracy:
                measured = repr((problem, measured_with(recipe, evaluator_of(metric))))
                comparable_scores.setdefault((metric, measured), {})[name] = score
    for (metric, _), scores in comparable_scores.items():
        for name, score in with_rivals(scores).items():
            scores_of_rows[name][metric] = score
    return scores_of_rows


# --- their tables -----------------------------------------------------------------------------------------------------


INTERVALS = (
    "In brackets: a 95 % interval of the mean, Student's over seeds, or Wilson's of one run over its test examples. "
    "Bold: the best mean, where the 95 % interval of its difference to each other one, paired over seeds, excludes "
    "zero; rows compare if data, partition, model, clients, threat model and evaluator agree."
)
DIFFERENCES = (
    "Differences in points with 95 % intervals (Student's), paired over the seeds that both rows have: of the best row "
    "to the next best, and of each other row to the best."
)
#: What the metrics of ``results.WORST`` are.
WORST_DEFINED = (
    "Worst class: in each run the class with the lowest accuracy; worst clients: the mean of the worst 10 % of them."
)


class Scored(NamedTuple):
    """A row of a table of scores."""

    names: Sequence[str]  # its first columns, the number of its seeds last
    scores: Mapping[str, Score]  # by metric
    group: str = ""  # the heading of its block


def score_tables(
    first: Sequence[str], headings: Mapping[str, str], rows: Sequence[Scored], note: str = "", *, own: int = 1
) -> tuple[Table, Table]:
    """Results, and differences of the rows that have a rival. The second table has the first ``own`` columns alone."""
    result_rows: list[Row] = []
    difference_rows: list[Row] = []
    groups_of_differences = []
    for row in rows:
        scores = [row.scores[metric] for metric in headings]
        if headings:
            result_rows.append([*row.names, *map(score_cell, scores)])
        differences = []
        for score in scores:
            difference = None if score.rival is None else score.rival.difference
            differences.append(paired_points(difference))
        if any(differences):
            difference_rows.append([*row.names[:own], row.names[-1], *differences])
            groups_of_differences.append(row.group)
    head = [*first, *headings.values()]
    results = Table("Results", head, result_rows, len(first) - 1, [note], [row.group for row in rows])
    head = [*first[:own], first[-1], *headings.values()]
    title = "Differences, paired over seeds"
    return results, Table(title, head, difference_rows, own, [DIFFERENCES], groups_of_differences)


def score_cell(score: Score) -> Cell:
    """``61.35 ± 0.42 [60.8, 61.9] (64.69, -3.34!)``: accuracies in percent, figures as they are measured.

    ``not run`` where the attack ran with no seed. In parentheses are the published number, and measured minus
    published, which is marked where it is beyond the tolerance.
    """
    if score.not_run and not score.values:
        return Cell(NO_NUMBER)
    as_text = bare_percent if score.is_accuracy else figure
    mean = "" if score.mean is None else as_text(score.mean)
    spread = "" if score.std is None else as_text(score.std)
    beside = []
    if score.interval is not None and score.is_accuracy:
        beside.append(interval(*score.interval))
    elif score.interval is not None:
        beside.append(f"[{', '.join(map(figure, score.interval))}]")
    published = []
    if score.reported is not None:
        published.append(bare_percent(score.reported))
    if score.difference is not None:
        mark = "!" if score.beyond else ""
        published.append(f"{points(score.difference)}{mark}")
    if published:
        beside.append(f"({', '.join(published)})")
    return Cell(mean, spread, tuple(beside), score.is_clear_best, bool(score.beyond))


def meaning(
    headings: Mapping[str, str],
    rows: Sequence[Scored],
    sources: Iterable[str | None],
    tolerance: Mapping[str, float],
    *notes: str,
) -> str:
    """What the numbers of such tables mean, in sentences; ``notes`` come before the one about published numbers."""
    sentences = [INTERVALS]
    headings_of_figures = []
    for metric, heading in headings.items():
        if any(metric in row.scores and not row.scores[metric].is_accuracy for row in rows):
            headings_of_figures.append(heading)
    if headings_of_figures:
        sentences.append(f"Not in percent, but as measured: {', '.join(headings_of_figures)}.")
    if any(metric.endswith(tuple(WORST)) for metric in headings):
        sentences.append(WORST_DEFINED)
    sentences += filter(None, notes)
    published = dict.fromkeys(source for source in sources if source is not None)
    if published:
        reported = f"In parentheses: {'; '.join(published)}, and measured (as counted there, the release's way)"
        reported += " minus reported"
        limits = [f"{headings[metric]} {limit:g}" for metric, limit in tolerance.items() if metric in headings]
        if limits:
            reported += f" (! marks more points than: {', '.join(limits)})"
        sentences.append(f"{reported}.")
    return " ".join(sentences)


def partition_note(recipes: Mapping[str, Mapping[str, Any]]) -> str:
    """Which rows of a table have one partition for all their seeds, in a sentence; empty where none has."""
    fixed = [name for name, recipe in recipes.items() if recipe["calfat"]["partition"].get("seed", 0) is not None]
    if not fixed:
        return ""
    rows = ""
    if len(fixed) < len(recipes):
        rows = f" ({listing(fixed)})"
    return f"One partition, seeds of training alone{rows}: intervals say nothing of other partitions."
