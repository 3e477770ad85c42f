"""Tables of one run, for its page and the console: what evaluations measured, groups of clients, and time spent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from calfat_plugin.recipe.clients import GROUPED, OTHERS
from calfat_plugin.report.labels import budget, difference
from calfat_plugin.report.numbers import (
    NO_NUMBER,
    bare_percent,
    counted,
    figure,
    interval,
    listed_ids,
    percent,
    points,
)
from calfat_plugin.report.table import Cell, Row, Table, markdown, print_table
from calfat_plugin.results import FREQUENCY, EarlyStop, EvaluationResult
from calfat_plugin.run_files import Part, Spending, TrustResults, TrustRow
from calfat_plugin.stored_run import Run

if TYPE_CHECKING:
    from rich.console import Console

    from calfat_plugin.evaluators.alarms import Alarm

#: The head of a table of :func:`evaluation_row`, without further numbers.
EVALUATION_HEAD = ("evaluator", "accuracy %", "95 % interval", "examples", "seconds")
_FURTHER = 3  # the column in front of which further numbers are


def evaluations_table(
    name: str,
    evaluations: Sequence[EvaluationResult],
    reported: Mapping[str, float] | None = None,
    *,
    notes: Sequence[str] = (),
) -> Table:
    """Accuracies in percent; ``reported``: what a paper reports, by label, in percent.

    There is a column for the accuracies by the release's convention if any of them differs from ours.
    """
    release_differs = shows_release(evaluations)
    rows = []
    not_run: dict[str, None] = {}
    for evaluation in evaluations:
        further = []
        if release_differs:
            further.append(bare_percent(evaluation.accuracy_release))
        if reported:
            published = reported.get(evaluation.label)
            gap = None
            if published is not None and evaluation.accuracy_release is not None:
                gap = evaluation.accuracy_release - published / 100
            further.append("" if published is None else f"{published:.2f}")
            further.append("" if gap is None else points(gap))
        rows.append(evaluation_row(evaluation, further))
        if evaluation.not_run:
            not_run[f"{evaluation.label} did not run: {evaluation.not_run}."] = None
    head = list(EVALUATION_HEAD[:_FURTHER])
    if release_differs:
        head.append("release %")
    if reported:
        head += ["reported %", "difference"]
    head += EVALUATION_HEAD[_FURTHER:]
    return Table(name, head, rows, notes=[*notes, *not_run])


def shows_release(evaluations: Iterable[EvaluationResult]) -> bool:
    """Whether an accuracy by the release's convention differs from ours in any evaluation."""
    return any(evaluation.accuracy_release != evaluation.accuracy for evaluation in evaluations)


def evaluation_row(evaluation: EvaluationResult, further: Iterable[str] = (), *, picked: bool = False) -> Row:
    """A row of a table of evaluations, without a number where the attack did not run.

    Args:
        evaluation: of a model.
        further: numbers behind accuracy and interval.
        picked: whether the images were picked, so that an interval would say nothing of others.
    """
    below_label = []  # the ball, and the attacks that have no part in the number because they did not run
    ball = budget(evaluation.settings)
    if ball:
        below_label.append(ball)
    left_out = left_out_of(evaluation)
    if evaluation.accuracy is not None and left_out:
        below_label.append(f"without {', '.join(left_out)}")
    label = Cell(evaluation.label, beside=below_label)
    accuracy, ends = NO_NUMBER, ""
    if evaluation.accuracy is not None:
        accuracy = bare_percent(evaluation.accuracy)
    if evaluation.interval is not None and not picked:
        ends = interval(*evaluation.interval)
    return [label, accuracy, ends, *further, f"{evaluation.num_examples:,}", f"{evaluation.seconds:.1f}"]


def left_out_of(evaluation: EvaluationResult) -> list[str]:
    """The sub-attacks of AutoAttack, or the attacks of a worst case, that did not run."""
    not_run = evaluation.details.get("not_run")
    if not isinstance(not_run, Mapping):
        return []
    return [str(name) for name in not_run]


def worst_table(
    evaluations: Iterable[EvaluationResult],
    class_names: Sequence[str] = (),
    clients: Sequence[str] = (),
    attackers: str = "",
) -> Table:
    """Worst classes and clients, a row for each evaluator of which they are known.

    Args:
        evaluations: of one model.
        class_names: by class; without names, numbers are shown.
        clients: likewise, by client.
        attackers: the ids of attackers as a text, for the note.
    """
    rows: list[Row] = []
    for evaluation in evaluations:
        row = [evaluation.label, bare_percent(evaluation.accuracy)]
        for worst, names in ((evaluation.worst_class, class_names), (evaluation.worst_clients, clients)):
            if worst is None:
                row += ["", ""]
            else:
                row += [bare_percent(worst.accuracy), listed_ids(worst.ids, names)]
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
    """Accuracies of head, middle and tail, a row for each evaluator; empty without a long tail."""
    rows: list[Row] = []
    for evaluation in evaluations:
        groups = (evaluation.head, evaluation.middle, evaluation.tail)
        if groups == (None, None, None):
            continue
        row: list[str | Cell] = [evaluation.label]
        for group in groups:
            if group is None:
                row.append("")
            else:
                row.append(Cell(bare_percent(group.accuracy), beside=[listed_ids(group.ids, class_names)]))
        rows.append(row)
    note = (
        "The classes by their training examples over all clients, most first, in three groups; each number is the mean "
        "over the classes of a group."
    )
    head = ["evaluator", *(f"{part} %" for part in FREQUENCY)]
    return Table("Head, middle and tail", head, rows, notes=[note])


def figures_of(evaluation: EvaluationResult) -> str:
    """What an evaluation measured beside accuracy: ``ece 0.125, margin mean 2``."""
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
            # A check that asks some of its images alone picks those that are nearest to an error.
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
    """An attack of ``trust.json`` as an evaluation, for tables and charts."""
    settings = {"norm": norm, "eps": row.eps}
    return EvaluationResult(
        label, row.examples, row.accuracy, row.accuracy, (), (), settings, "calfat trust", row.seconds
    )


# --- groups of clients ------------------------------------------------------------------------------------------------


def members(run: Run) -> dict[str, list[int]]:
    """Group to client ids, those of no group last; empty without groups, or where the run has no file of them."""
    groups: dict[str, list[int]] = {}
    others = set(range(run.experiment.num_clients))
    for name, ids in run.partition.groups.items():
        groups[name] = list(ids)
        others.difference_update(ids)
    if groups and others:
        groups[OTHERS] = sorted(others)
    return groups


def with_groups(run: Run) -> tuple[str, ...]:
    """What the page calls each client: ``3``, or ``3 (weak)`` in a group; empty without groups."""
    if not run.experiment.clients:
        return ()
    names = [str(client) for client in range(run.experiment.num_clients)]
    for group, ids in run.partition.groups.items():
        for client in ids:
            names[client] = f"{client} ({group})"
    return tuple(names)


def groups_table(run: Run) -> Table:
    """What differs in each group, its clients, and its means in the last round that has them; empty without groups."""
    ids_of_groups = members(run)
    groups = {group.name: group for group in run.experiment.clients}
    rows: list[Row] = []
    for name in run.experiment.group_names:
        if name == OTHERS and ids_of_groups and name not in ids_of_groups:
            continue
        heading, text = name, "as the recipe says"
        if name in groups:
            text = difference(groups[name], run.experiment)
            if groups[name].attacker is not None:
                heading = f"{name}, attackers"
        row: list[str | Cell] = [Cell(heading, beside=[text]), ranges(ids_of_groups.get(name, ()))]
        for quantity in GROUPED:
            curve = run.curve(f"group/{name}/{quantity}")
            row.append(figure(curve[-1][1]) if curve else "")
        rows.append(row)
    head = ["group", "clients", "loss", "update length", "cosine"]
    note = (
        "Means over a group's clients, of the last round in which any of them took part. Cosine: between a client's "
        "update and the coordinate-wise median of the round's."
    )
    return Table("Groups of clients", head, rows, notes=[note])


def ranges(ids: Sequence[int]) -> str:
    """Ascending ids as recipes write them: ``0-4, 7``."""
    texts: list[str] = []
    first = last = -1  # of the range that ends with the last id
    for client in ids:
        if texts and client == last + 1:
            texts[-1] = f"{first}-{client}"
        else:
            first = client
            texts.append(str(client))
        last = client
    return ", ".join(texts)


# --- where the time went ----------------------------------------------------------------------------------------------


ELSE = "everything else: host, messages, waiting"


def spending(profile: Spending) -> list[Table]:
    """A table of the rounds together, and one of the final evaluation, if the run reached it.

    A row is a span, named after the spans around it; its seconds and calls are those of one round on average.
    """
    tables = []
    rounds = [part for part in profile.parts if part.name.startswith("round ")]
    if rounds:
        title = f"a round of {profile.method}, mean of {counted(len(rounds), 'round')}"
        tables.append(_time_table(title, rounds))
    for part in profile.parts:
        if part not in rounds:
            tables.append(_time_table(part.name, [part]))
    return tables


def spending_text(profile: Spending) -> str:
    """The same for a terminal and a log."""
    return "\n".join(map(markdown, spending(profile)))


def _time_table(title: str, parts: Sequence[Part]) -> Table:
    """Where the time of some parts of a run went, on average over these parts."""
    total = sum(part.seconds for part in parts) or 1.0
    seconds: dict[tuple[str, ...], float] = {}
    calls: dict[tuple[str, ...], float] = {}
    for part in parts:
        for span in part.spans:
            seconds[span.path] = seconds.get(span.path, 0.0) + span.seconds
            calls[span.path] = calls.get(span.path, 0) + span.calls

    def row(path: tuple[str, ...], spent: float) -> list[str]:
        mean_calls = f"{calls[path] / len(parts):,.4g}" if path in calls else ""
        return [" / ".join(path), f"{spent / len(parts):.4f}", percent(spent / total), mean_calls]

    def rows_below(outer: tuple[str, ...], spent: float) -> Iterator[list[str]]:
        inner = [path for path in seconds if path and path[:-1] == outer]
        for path in inner:
            yield row(path, seconds[path])
            yield from rows_below(path, seconds[path])
        left = spent - sum(seconds[path] for path in inner)
        if not outer:
            yield row((ELSE,), left)
        elif inner:
            yield row((*outer, "other"), left)

    rows = [*rows_below((), total), row(("in all",), total)]
    return Table(title, [title, "seconds", "share", "calls"], rows)


# --- on the console ---------------------------------------------------------------------------------------------------


def show_final(
    console: Console,
    results: Sequence[EvaluationResult],
    alarms: Sequence[Alarm],
    class_names: Sequence[str] = (),
    stop: EarlyStop | None = None,
) -> None:
    """Print the final evaluation of a run, its tables and findings; ``stop``: why training ended early, if it did."""
    if not results:
        console.print("no final evaluation: calfat.evaluators is empty", soft_wrap=True)
        return
    after = "the final round"
    if stop is not None:
        after = f"round {stop.round}, where training stopped early"
    show_evaluations(console, results, f"model after {after}, test split")
    for table in (worst_table(results, class_names), tails_table(results, class_names)):
        if table:
            print_table(console, table)
    show_alarms(console, alarms)


def show_evaluations(console: Console, results: Sequence[EvaluationResult], title: str = "") -> None:
    """Print a table, and a line for what an evaluation measured beside accuracy."""
    print_table(console, evaluations_table(title, results))
    for result in results:
        figures = figures_of(result)
        if figures:
            name = f"{result.label} {budget(result.settings)}".rstrip()
            console.print(f"{name}: {figures}", soft_wrap=True)


def show_alarms(console: Console, alarms: Sequence[Alarm]) -> None:
    """Print each finding with its code; nothing when there is none."""
    from rich.text import Text

    if alarms:
        console.print(Text(f"{counted(len(alarms), 'finding')} about these numbers:", style="yellow"))
    for alarm in alarms:
        console.print(Text.assemble("  ", (alarm.code, "bold"), f": {alarm.text}"), soft_wrap=True)
