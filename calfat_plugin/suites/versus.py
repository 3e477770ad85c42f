"""Every row of a suite's table compared with one that the user names, such as a baseline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from calfat_plugin.errors import OptionError, did_you_mean
from calfat_plugin.maths.intervals import Difference, paired
from calfat_plugin.report.names import differing, problem_of
from calfat_plugin.suites.schema import Suite
from calfat_plugin.suites.summary import CellSummary, Score, SuiteSummary


@dataclass(frozen=True)
class Compared:
    """A row beside the named one of the same other labels.

    Attributes:
        row: what is compared.
        differences: the row minus the named one, paired over seeds, by metric; None where they share no seed.
        unlike: keys of the recipe that differ although numbers compare only where they agree: data, partition, model,
            clients, threat model, evaluators.
    """

    row: CellSummary
    differences: dict[str, Difference | None]
    unlike: tuple[str, ...]


def check_versus(suite: Suite, label: str) -> None:
    """Whether the suite has rows of this label.

    Raises:
        OptionError: it has none.
    """
    labels = [each for variants in suite.axes.values() for each in variants]
    if label not in labels:
        hint = did_you_mean(label, labels) or f" Labels: {', '.join(dict.fromkeys(labels))}."
        raise OptionError(f"--versus '{label}': no row of {suite.document.file} has this label.{hint}")


def versus(summary: SuiteSummary, label: str) -> Iterator[Compared]:
    """The other rows, each compared with the row that has ``label`` on that axis and its own labels on all others.

    Unlike the comparison with the best row, this also compares rows of different problems: the user asked for it.

    Args:
        summary: what was measured.
        label: of any axis; see :func:`check_versus`.
    """
    axis = next(index for index, variants in enumerate(summary.suite.axes.values()) if label in variants)
    rows = {cell.cell.labels: cell for cell in summary.cells}
    for labels, row in rows.items():
        wanted = (*labels[:axis], label, *labels[axis + 1 :])
        named = rows[wanted]
        if row is not named:
            pairs = {metric: _paired(score, named.scores[metric]) for metric, score in row.scores.items()}
            yield Compared(row, pairs, _unlike(row, named))


def _paired(one: Score, other: Score) -> Difference | None:
    by_seed = [dict(zip(score.seeds, score.values, strict=True)) for score in (one, other)]
    return paired(*by_seed) if one.is_accuracy else None


def _unlike(one: CellSummary, other: CellSummary) -> tuple[str, ...]:
    recipes = [cell.cell.experiment.as_run() for cell in (one, other) if cell.cell.experiment is not None]
    evaluators = "calfat.evaluators"
    return tuple(differing([{**problem_of(recipe), evaluators: recipe["calfat"]["evaluators"]} for recipe in recipes]))
