"""Tables of scores, for suites and comparisons: means over seeds, their paired differences, what the numbers mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from calfat_plugin.maths.intervals import Score
from calfat_plugin.report.labels import listing
from calfat_plugin.report.numbers import NO_NUMBER, bare_percent, figure, interval, paired_points, points
from calfat_plugin.report.table import Cell, Row, Table
from calfat_plugin.results import WORST

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
    group: str = ""  # what it stands under


def score_tables(
    first: Sequence[str], headings: Mapping[str, str], rows: Sequence[Scored], note: str = "", *, own: int = 1
) -> tuple[Table, Table]:
    """Results, and differences of the rows that have a rival, which are named by their first ``own`` columns alone."""
    result_rows: list[Row] = []
    difference_rows: list[Row] = []
    groups = []  # of the second table's rows
    for row in rows:
        scores = [row.scores[metric] for metric in headings]
        if headings:
            result_rows.append([*row.names, *map(score_cell, scores)])
        differences = []
        for score in scores:
            differences.append("" if score.rival is None else paired_points(score.rival.difference))
        if any(differences):
            difference_rows.append([*row.names[:own], row.names[-1], *differences])
            groups.append(row.group)
    head, of_rows = [*first, *headings.values()], [row.group for row in rows]
    results = Table("Results", head, result_rows, len(first) - 1, [note], of_rows)
    head = [*first[:own], first[-1], *headings.values()]
    return results, Table("Differences, paired over seeds", head, difference_rows, own, [DIFFERENCES], groups)


def score_cell(score: Score) -> Cell:
    """``61.35 ± 0.42 [60.8, 61.9] (64.69, -3.34!)``: accuracies in percent, figures as they are measured.

    ``not run`` where the attack ran with no seed. In parentheses is what is published, and measured minus published,
    marked where it is beyond the tolerance.
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
    *said: str,
) -> str:
    """What the numbers of such tables mean, in sentences; ``said``: some of its own, before published numbers."""
    sentences = [INTERVALS]
    figures = {metric for row in rows for metric, score in row.scores.items() if not score.is_accuracy}
    of_figures = [heading for metric, heading in headings.items() if metric in figures]
    if of_figures:
        sentences.append(f"Not in percent, but as measured: {', '.join(of_figures)}.")
    if any(metric.endswith(tuple(WORST)) for metric in headings):
        sentences.append(WORST_DEFINED)
    sentences += [sentence for sentence in said if sentence]
    published = list(dict.fromkeys(source for source in sources if source is not None))
    if published:
        reported = f"In parentheses: {'; '.join(published)}, and measured (as counted there, the release's way)"
        limits = [f"{headings[metric]} {limit:g}" for metric, limit in tolerance.items() if metric in headings]
        marked = f" (! marks more points than: {', '.join(limits)})" if limits else ""
        sentences.append(f"{reported} minus reported{marked}.")
    return " ".join(sentences)


def partition_note(recipes: Mapping[str, Mapping[str, Any]]) -> str:
    """Which rows of a table have one partition for all their seeds, in a sentence; empty where none has."""
    fixed = [name for name, recipe in recipes.items() if recipe["calfat"]["partition"].get("seed", 0) is not None]
    if not fixed:
        return ""
    whose = f" ({listing(fixed)})" if len(fixed) < len(recipes) else ""
    return f"One partition, seeds of training alone{whose}: intervals say nothing of other partitions."
