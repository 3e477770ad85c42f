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
    shown: list[Row] = [[*row.names, *(score_cell(row.scores[each]) for each in headings)] for row in rows]
    results = Table(
        "Results",
        [*first, *headings.values()],
        shown if headings else [],
        len(first) - 1,
        [note],
        [row.group for row in rows],
    )
    differ: list[Row] = []
    groups = []
    for row in rows:
        rivals = (row.scores[metric].rival for metric in headings)
        numbers = [paired_points(rival and rival.difference) for rival in rivals]
        if any(numbers):
            differ.append([*row.names[:own], row.names[-1], *numbers])
            groups.append(row.group)
    head = [*first[:own], first[-1], *headings.values()]
    return results, Table("Differences, paired over seeds", head, differ, own, [DIFFERENCES], groups)


def score_cell(score: Score) -> Cell:
    """``61.35 ± 0.42 [60.8, 61.9] (64.69, -3.34!)``: accuracies in percent, figures as they are measured.

    ``not run`` where the attack ran with no seed. In parentheses is what is published, and measured minus published,
    marked where it is beyond the tolerance.
    """

    def text(number: float | None) -> str:
        return "" if number is None else bare_percent(number) if score.is_accuracy else figure(number)

    if score.not_run and not score.values:
        return Cell(NO_NUMBER)
    ends = ""
    if score.interval is not None:
        ends = interval(*score.interval) if score.is_accuracy else f"[{', '.join(map(figure, score.interval))}]"
    known = [] if score.reported is None else [bare_percent(score.reported)]
    known += [] if score.difference is None else [points(score.difference) + "!" * bool(score.beyond)]
    beside = filter(None, (ends, f"({', '.join(known)})" if known else ""))
    return Cell(text(score.mean), text(score.std), tuple(beside), score.is_clear_best, bool(score.beyond))


def meaning(
    headings: Mapping[str, str],
    rows: Sequence[Scored],
    sources: Iterable[str | None],
    tolerance: Mapping[str, float],
    *said: str,
) -> str:
    """What the numbers of such tables mean, in sentences; ``said``: some of its own, before published numbers."""
    figures = {metric for row in rows for metric, score in row.scores.items() if not score.is_accuracy}
    shown = ", ".join(heading for metric, heading in headings.items() if metric in figures)
    published = list(dict.fromkeys(source for source in sources if source is not None))
    limits = ", ".join(f"{headings[metric]} {limit:g}" for metric, limit in tolerance.items() if metric in headings)
    parts = (
        INTERVALS,
        f"Not in percent, but as measured: {shown}." if shown else "",
        WORST_DEFINED if any(metric.endswith(tuple(WORST)) for metric in headings) else "",
        *said,
        f"In parentheses: {'; '.join(published)}, and measured (as counted there, the release's way) minus reported"
        f"{f' (! marks more points than: {limits})' * bool(limits)}."
        if published
        else "",
    )
    return " ".join(filter(None, parts))


def partition_note(recipes: Mapping[str, Mapping[str, Any]]) -> str:
    """Which rows of a table have one partition for all their seeds, in a sentence; empty where none has."""
    fixed = [name for name, recipe in recipes.items() if recipe["calfat"]["partition"].get("seed", 0) is not None]
    whose = f" ({listing(fixed)})" if len(fixed) < len(recipes) else ""
    return f"One partition, seeds of training alone{whose}: intervals say nothing of other partitions." if fixed else ""
