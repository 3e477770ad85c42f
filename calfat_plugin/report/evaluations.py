"""Tables of what evaluations measured, for pages and for the console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calfat_plugin.maths.intervals import of_accuracy
from calfat_plugin.report.labels import budget
from calfat_plugin.report.numbers import bare_percent, figure, interval, listed_ids, points
from calfat_plugin.report.table import Cell, Row, Table
from calfat_plugin.results import FREQUENCY, WORST

Evaluation = Mapping[str, Any]  # as in ``results.json``
#: What the cells of :func:`evaluation_row` are.
EVALUATION_HEAD = ("evaluator", "accuracy %", "95 % interval", "release %", "examples", "seconds")
_BESIDE = 4  # where cells that stand beside the accuracies are put in


def evaluations_table(
    name: str,
    evaluations: Iterable[Evaluation],
    reported: Mapping[str, float] | None = None,
    *,
    notes: Sequence[str] = (),
) -> Table:
    """Accuracies in both conventions, and beside them what a paper reports, by label, in percent."""
    compared = ["reported %", "difference"] if reported else []
    rows = []
    for each in evaluations:
        known = (reported or {}).get(each["label"])
        release = each.get("accuracy_release", each["accuracy"])  # as the paper's tables count
        beside = ["" if known is None else f"{known:.2f}", "" if known is None else points(release - known / 100)]
        rows.append(evaluation_row(each, beside if compared else []))
    numbers, costs = EVALUATION_HEAD[:_BESIDE], EVALUATION_HEAD[_BESIDE:]
    head = [*numbers, *compared, *costs]
    return Table(name, head, rows, notes=notes)


def evaluation_row(evaluation: Evaluation, beside: Iterable[str] = (), *, picked: bool = False) -> Row:
    """A row of a table of evaluations; ``picked``: not of any images, so that there is no interval."""
    number = evaluation.get("num_examples") or 0
    found = None if picked else of_accuracy((float(evaluation["accuracy"]),), number)
    return [
        with_budget(evaluation),
        bare_percent(float(evaluation["accuracy"])),
        "" if found is None else interval(*found),
        bare_percent(evaluation.get("accuracy_release")),
        *beside,
        f"{number:,}",
        f"{float(evaluation.get('seconds') or 0):.1f}",
    ]


def with_budget(evaluation: Evaluation) -> Cell:
    ball = budget(evaluation.get("settings") or {})
    return Cell(str(evaluation["label"]), beside=[ball] if ball else [])


def worst_table(
    evaluations: Iterable[Evaluation], class_names: Sequence[str] = (), clients: Sequence[str] = (), attackers: str = ""
) -> Table:
    """Worst classes and clients: a row an evaluator; none where nothing is known of classes."""
    named = {"worst_class": class_names, "worst_clients": clients}
    rows: list[Row] = []
    for each in evaluations:
        found = {key: each.get(key) for key in WORST.values()}
        numbers = [bare_percent(float(each["accuracy"]))]
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
                "accuracy_release": row.get("left"),  # this table has it in the place of that one
                "num_examples": row["examples"],
                "seconds": row["seconds"],
                "settings": {"norm": content["threat"]["norm"], "eps": row["eps"]},
            }
            # Images that were picked for being near to an error are like no others.
            rows.append(evaluation_row(evaluation, picked=row.get("of") not in (None, row["examples"])))
    head = ["check, attack", "accuracy %", "95 % interval", "left %", "examples", "seconds"]
    note = (
        "Accuracy: right clean and under this attack; left: right under everything before it at the budget, too. The "
        "interval (Wilson's) is over the test examples."
    )
    return Table("Attacks of the battery", head, rows, notes=[note])
