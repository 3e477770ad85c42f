"""Tables of what evaluations measured, for pages and for the console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calfat_plugin.maths.intervals import of_accuracy
from calfat_plugin.report.labels import budget
from calfat_plugin.report.numbers import NO_NUMBER, bare_percent, figure, interval, listed_ids, points
from calfat_plugin.report.table import Cell, Row, Table
from calfat_plugin.results import FREQUENCY, WORST

Evaluation = Mapping[str, Any]  # as in ``results.json``
#: What the cells of :func:`evaluation_row` are, where nothing stands beside the accuracies.
EVALUATION_HEAD = ("evaluator", "accuracy %", "95 % interval", "examples", "seconds")
_ACCURACIES = 3  # of these cells; what stands beside them comes next


def evaluations_table(
    name: str,
    evaluations: Iterable[Evaluation],
    reported: Mapping[str, float] | None = None,
    *,
    notes: Sequence[str] = (),
) -> Table:
    """Accuracies, and beside them what a paper reports, by label, in percent.

    The accuracies as the release counts are there where some of them are others than ours.
    """
    rows_of = list(evaluations)
    release_shown = shows_release(rows_of)
    rows = []
    for evaluation in rows_of:
        beside = [bare_percent(evaluation.get("accuracy_release"))] if release_shown else []
        if reported:
            beside += _beside_reported(evaluation, reported.get(evaluation["label"]))
        rows.append(evaluation_row(evaluation, beside))
    head = [*EVALUATION_HEAD[:_ACCURACIES]]
    head += ["release %"] if release_shown else []
    head += ["reported %", "difference"] if reported else []
    why = [
        f"{evaluation['label']} did not run: {evaluation['not_run']}."
        for evaluation in rows_of
        if evaluation.get("not_run")
    ]
    return Table(name, [*head, *EVALUATION_HEAD[_ACCURACIES:]], rows, notes=[*notes, *dict.fromkeys(why)])


def shows_release(evaluations: Iterable[Evaluation]) -> bool:
    """Whether the accuracy as the release counts is another one than ours in some evaluation."""
    return any(evaluation.get("accuracy_release") not in (None, evaluation["accuracy"]) for evaluation in evaluations)


def _beside_reported(evaluation: Evaluation, reported: float | None) -> list[str]:
    """What a paper reports in percent, and how far the accuracy, as its tables count, is from it."""
    if reported is None:
        return ["", ""]
    release = evaluation.get("accuracy_release", evaluation["accuracy"])
    return [f"{reported:.2f}", "" if release is None else points(release - reported / 100)]


def evaluation_row(evaluation: Evaluation, beside: Iterable[str] = (), *, picked: bool = False) -> Row:
    """A row of a table of evaluations, without a number where the attack did not run.

    Args:
        evaluation: as in ``results.json``.
        beside: further numbers, behind accuracy and interval.
        picked: whether the images are not any images, so that there is no interval.
    """
    number, accuracy = evaluation.get("num_examples") or 0, evaluation["accuracy"]
    ends = None if picked or accuracy is None else of_accuracy((float(accuracy),), number)
    return [
        with_budget(evaluation),
        NO_NUMBER if accuracy is None else bare_percent(float(accuracy)),
        "" if ends is None else interval(*ends),
        *beside,
        f"{number:,}",
        f"{float(evaluation.get('seconds') or 0):.1f}",
    ]


def with_budget(evaluation: Evaluation) -> Cell:
    """The label; below it the ball, and the attacks that have no part in the number because they did not run."""
    beside = [budget(evaluation.get("settings") or {})]
    if evaluation["accuracy"] is not None and (left_out := left_out_of(evaluation)):
        beside.append(f"without {', '.join(left_out)}")
    return Cell(str(evaluation["label"]), beside=[text for text in beside if text])


def left_out_of(evaluation: Evaluation) -> list[str]:
    """The sub-attacks of AutoAttack, or the attacks of a worst case, that did not run."""
    found = (evaluation.get("details") or {}).get("not_run")
    return [str(name) for name in found] if isinstance(found, Mapping) else []


def worst_table(
    evaluations: Iterable[Evaluation], class_names: Sequence[str] = (), clients: Sequence[str] = (), attackers: str = ""
) -> Table:
    """Worst classes and clients: a row an evaluator; none where nothing is known of classes."""
    named = {"worst_class": class_names, "worst_clients": clients}
    rows: list[Row] = []
    for each in evaluations:
        found = {key: each.get(key) for key in WORST.values()}
        numbers = [bare_percent(each["accuracy"])]
        for key, worst in found.items():
            names = named.get(key, ())
            numbers += [bare_percent(worst["accuracy"]), listed_ids(worst["ids"], names)] if worst else ["", ""]
        if any(found.values()):
            rows.append([str(each["label"]), *numbers])
    head = ["evaluator", "accuracy %"]
    for name, key in WORST.items():
        head += [f"{name.replace('-', ' ')} %", key.removeprefix("worst_")]
    note = (
        "The worst class, and the mean of the worst 10 % of clients. A client's accuracy is that "
        "of the test split, its classes weighted as in the client's training examples. The lowest of several is low by "
        "chance, too, and has no interval."
    )
    note += f" Attackers (clients {attackers}) are left out." if attackers else ""
    return Table("Worst classes and clients", head, rows, notes=[note])


def tails_table(evaluations: Iterable[Evaluation], class_names: Sequence[str] = ()) -> Table:
    """Accuracies of head, middle and tail, a row an evaluator; none without a long tail."""
    rows: list[Row] = []
    for each in evaluations:
        found = [each.get(part) for part in FREQUENCY]
        numbers = [
            Cell(bare_percent(part["accuracy"]), beside=[listed_ids(part["ids"], class_names)]) if part else ""
            for part in found
        ]
        if any(found):
            rows.append([str(each["label"]), *numbers])
    note = (
        "The classes by their training examples over all clients, most first, in three groups; each number is the mean "
        "over the classes of a group."
    )
    return Table("Head, middle and tail", ["evaluator", *(f"{part} %" for part in FREQUENCY)], rows, notes=[note])


def figures_of(evaluation: Evaluation) -> str:
    """What it measured beside accuracy: ``ece 0.125, margin mean 2``."""
    found = (evaluation.get("metrics") or {}).items()
    return ", ".join(f"{name.replace('_', ' ')} {figure(value)}" for name, value in found if value is not None)


def trust_table(content: Mapping[str, Any]) -> Table:
    """The attacks of ``trust.json``."""
    rows = []
    for check in content["checks"]:
        for row in check["rows"]:
            evaluation = {
                "label": f"{check['check']}: {row['attack']}",
                "accuracy": row["accuracy"],
                "num_examples": row["examples"],
                "seconds": row["seconds"],
                "settings": {"norm": content["threat"]["norm"], "eps": row["eps"]},
            }
            # Images that were picked for being near to an error are like no others.
            picked = row.get("of") not in (None, row["examples"])
            rows.append(evaluation_row(evaluation, [bare_percent(row.get("left"))], picked=picked))
    head = ["check, attack", "accuracy %", "95 % interval", "left %", "examples", "seconds"]
    note = (
        "Accuracy: right clean and under this attack; left: right under everything before it at the budget, too. The "
        "interval (Wilson's) is over the test examples."
    )
    return Table("Attacks of the battery", head, rows, notes=[note])
