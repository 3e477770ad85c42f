"""Tables of what evaluations measured, for pages and for the console."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from calfat_plugin.report.labels import budget
from calfat_plugin.report.numbers import NO_NUMBER, bare_percent, figure, interval, listed_ids, points
from calfat_plugin.report.table import Cell, Row, Table
from calfat_plugin.results import FREQUENCY, EvaluationResult
from calfat_plugin.run_files import TrustResults, TrustRow

#: What the cells of :func:`evaluation_row` are, where nothing stands beside the accuracies.
EVALUATION_HEAD = ("evaluator", "accuracy %", "95 % interval", "examples", "seconds")
_ACCURACIES = 3  # of these cells; what stands beside them comes next


def evaluations_table(
    name: str,
    evaluations: Sequence[EvaluationResult],
    reported: Mapping[str, float] | None = None,
    *,
    notes: Sequence[str] = (),
) -> Table:
    """Accuracies, and beside them what a paper reports, by label, in percent.

    The accuracies as the release counts are there where some of them are others than ours.
    """
    release_shown = shows_release(evaluations)
    rows, why = [], []
    for evaluation in evaluations:
        beside = [bare_percent(evaluation.accuracy_release)] if release_shown else []
        if reported:
            beside += _beside_reported(evaluation, reported.get(evaluation.label))
        rows.append(evaluation_row(evaluation, beside))
        if evaluation.not_run:
            why.append(f"{evaluation.label} did not run: {evaluation.not_run}.")
    head = [*EVALUATION_HEAD[:_ACCURACIES]]
    if release_shown:
        head.append("release %")
    if reported:
        head += ["reported %", "difference"]
    return Table(name, [*head, *EVALUATION_HEAD[_ACCURACIES:]], rows, notes=[*notes, *dict.fromkeys(why)])


def shows_release(evaluations: Iterable[EvaluationResult]) -> bool:
    """Whether the accuracy as the release counts is another one than ours in some evaluation."""
    return any(evaluation.accuracy_release != evaluation.accuracy for evaluation in evaluations)


def _beside_reported(evaluation: EvaluationResult, reported: float | None) -> list[str]:
    """What a paper reports in percent, and how far the accuracy, as its tables count, is from it."""
    if reported is None:
        return ["", ""]
    if evaluation.accuracy_release is None:
        return [f"{reported:.2f}", ""]
    return [f"{reported:.2f}", points(evaluation.accuracy_release - reported / 100)]


def evaluation_row(evaluation: EvaluationResult, beside: Iterable[str] = (), *, picked: bool = False) -> Row:
    """A row of a table of evaluations, without a number where the attack did not run.

    Args:
        evaluation: of a model.
        beside: further numbers, behind accuracy and interval.
        picked: whether the images are not any images, so that there is no interval.
    """
    accuracy, ends = NO_NUMBER, ""
    if evaluation.accuracy is not None:
        accuracy = bare_percent(evaluation.accuracy)
    if evaluation.interval is not None and not picked:
        ends = interval(*evaluation.interval)
    examples, seconds = f"{evaluation.num_examples:,}", f"{evaluation.seconds:.1f}"
    return [with_budget(evaluation), accuracy, ends, *beside, examples, seconds]


def with_budget(evaluation: EvaluationResult) -> Cell:
    """The label; below it the ball, and the attacks that have no part in the number because they did not run."""
    beside = [budget(evaluation.settings)]
    left_out = left_out_of(evaluation)
    if evaluation.accuracy is not None and left_out:
        beside.append(f"without {', '.join(left_out)}")
    return Cell(evaluation.label, beside=[text for text in beside if text])


def left_out_of(evaluation: EvaluationResult) -> list[str]:
    """The sub-attacks of AutoAttack, or the attacks of a worst case, that did not run."""
    not_run = evaluation.details.get("not_run")
    return [str(name) for name in not_run] if isinstance(not_run, Mapping) else []


def worst_table(
    evaluations: Iterable[EvaluationResult],
    class_names: Sequence[str] = (),
    clients: Sequence[str] = (),
    attackers: str = "",
) -> Table:
    """Worst classes and clients: a row an evaluator; none where nothing is known of classes."""
    rows: list[Row] = []
    for evaluation in evaluations:
        row = [evaluation.label, bare_percent(evaluation.accuracy)]
        for worst, names in ((evaluation.worst_class, class_names), (evaluation.worst_clients, clients)):
            row += ["", ""] if worst is None else [bare_percent(worst.accuracy), listed_ids(worst.ids, names)]
        if evaluation.worst_class is not None or evaluation.worst_clients is not None:
            rows.append(row)
    head = ["evaluator", "accuracy %", "worst class %", "class", "worst clients %", "clients"]
    note = (
        "The worst class, and the mean of the worst 10 % of clients. A client's accuracy is that "
        "of the test split, its classes weighted as in the client's training examples. The lowest of several is low by "
        "chance, too, and has no interval."
    )
    if attackers:
        note += f" Attackers (clients {attackers}) are left out."
    return Table("Worst classes and clients", head, rows, notes=[note])


def tails_table(evaluations: Iterable[EvaluationResult], class_names: Sequence[str] = ()) -> Table:
    """Accuracies of head, middle and tail, a row an evaluator; none without a long tail."""
    rows: list[Row] = []
    for evaluation in evaluations:
        groups = (evaluation.head, evaluation.middle, evaluation.tail)
        cells: list[str | Cell] = [evaluation.label]
        for group in groups:
            if group is None:
                cells.append("")
            else:
                cells.append(Cell(bare_percent(group.accuracy), beside=[listed_ids(group.ids, class_names)]))
        if any(group is not None for group in groups):
            rows.append(cells)
    note = (
        "The classes by their training examples over all clients, most first, in three groups; each number is the mean "
        "over the classes of a group."
    )
    return Table("Head, middle and tail", ["evaluator", *(f"{part} %" for part in FREQUENCY)], rows, notes=[note])


def figures_of(evaluation: EvaluationResult) -> str:
    """What it measured beside accuracy: ``ece 0.125, margin mean 2``."""
    texts = []
    for name, value in evaluation.metrics.items():
        if math.isfinite(value):
            texts.append(f"{name.replace('_', ' ')} {figure(value)}")
    return ", ".join(texts)


def trust_table(results: TrustResults) -> Table:
    """The attacks of ``trust.json``."""
    rows = []
    for check in results.checks:
        for row in check.rows:
            # Images that were picked for being near to an error are like no others.
            picked = row.of not in (None, row.examples)
            evaluation = evaluation_of(row, f"{check.check}: {row.attack}", results.threat.norm)
            rows.append(evaluation_row(evaluation, [bare_percent(row.left)], picked=picked))
    head = ["check, attack", "accuracy %", "95 % interval", "left %", "examples", "seconds"]
    note = (
        "Accuracy: right clean and under this attack; left: right under everything before it at the budget, too. The "
        "interval (Wilson's) is over the test examples."
    )
    return Table("Attacks of the battery", head, rows, notes=[note])


def evaluation_of(row: TrustRow, label: str, norm: str) -> EvaluationResult:
    """An attack of the battery as tables and charts take it."""
    settings = {"norm": norm, "eps": row.eps}
    return EvaluationResult(
        label, row.examples, row.accuracy, row.accuracy, (), (), settings, "calfat trust", row.seconds
    )
