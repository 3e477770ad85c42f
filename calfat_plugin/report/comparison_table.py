"""The table of a comparison: a row a setting, a column for each way that accuracy was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calfat_plugin.report import words
from calfat_plugin.report.groups import Group
from calfat_plugin.report.measures import Measure, final, on_examples, titles
from calfat_plugin.report.names import MORE, problem_names, problem_of
from calfat_plugin.report.numbers import bare_percent, page_points
from calfat_plugin.report.reading import RunFiles, SuiteFiles


def results_table(groups: Sequence[Group], suite: SuiteFiles) -> dict[str, Any]:
    """A block of rows for each problem, in which the best means are bold; below a mean what was reported.

    Args:
        groups: the settings.
        suite: gives the columns' headings and order, and a name for the rows.
    """
    measured = {group.name: {label: m.on_any_data() for label, m in group.measures().items()} for group in groups}
    columns = _columns(list(measured.values()), suite.headings)
    blocks = _blocks(groups)
    sources = list(dict.fromkeys(group.source for group in groups if group.reported and group.source))
    reported = any(group.reported for group in groups)
    return {
        "head": ["/".join(suite.axes) or "setting", "seeds", *columns.values()],
        "blocks": [
            {"problem": problem, "rows": _rows(block, list(columns), measured)} for problem, block in blocks.items()
        ],
        "several": len(blocks) > 1,
        "examples": on_examples((heading, _measured_as(column, groups)) for column, heading in columns.items()),
        "abridged": any(group.name.endswith(MORE) for group in groups),
        "reported": (words.listing(sources) or "as the recipe says") if reported else "",
        "judged": any(group.tolerable for group in groups),
    }


def _columns(measured: Sequence[Mapping[str, Measure]], headings: Mapping[str, str]) -> dict[Measure, str]:
    """Every measure with its heading: those that a suite has headings for first, in its order."""
    labels = dict.fromkeys((*headings, *(label for of in measured for label in of)))
    found = [of[label] for label in labels for of in measured if label in of]
    return titles(found, lambda label: headings.get(label, label))


def _blocks(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups by the problem that they solve, under what sets it apart from the other problems."""
    problems = [problem_of(group.runs[0]) for group in groups]
    blocks: dict[str, list[Group]] = {}
    for name, group in zip(problem_names(problems), groups, strict=True):
        blocks.setdefault(name, []).append(group)
    return blocks


def _rows(
    block: Sequence[Group], columns: Sequence[Measure], measured: Mapping[str, Mapping[str, Measure]]
) -> list[dict[str, Any]]:
    """The best of several means is bold, and so is one that looks like it."""
    cells = [[_score(group, column, columns, measured[group.name]) for column in columns] for group in block]
    for column in zip(*cells, strict=True):
        known = [cell for cell in column if cell["value"] is not None]
        best = max((cell["value"] for cell in known), default=0.0)
        for cell in known:
            cell["best"] = len(known) > 1 and cell["mean"] == bare_percent(best)
    return [
        {"name": group.name, "seeds": _seeds(group), "scores": scores}
        for group, scores in zip(block, cells, strict=True)
    ]


def _seeds(group: Group) -> str:
    """How many seeds are finished, of how many that were started."""
    finished = sum(run.finished for run in group.runs)
    return str(finished) if finished == len(group.runs) else f"{finished} of {len(group.runs)}"


def _score(
    group: Group, column: Measure, columns: Sequence[Measure], measured: Mapping[str, Measure]
) -> dict[str, Any]:
    """A cell of the table: the mean, its spread, and what was reported with the difference."""
    # Without a measurement, what was reported is in the first column of its label.
    own = measured.get(column.label) or next(other for other in columns if other.label == column.label)
    score = group.score(column.label) if own == column else None
    reported = group.reported.get(column.label) if own == column else None
    return {
        "value": None if score is None else score.mean,
        "mean": bare_percent(None if score is None else score.mean),
        "best": False,
        "spread": "" if score is None or score.std is None else f" ± {bare_percent(score.std)}",
        "reported": "" if reported is None else bare_percent(reported),
        "difference": "" if score is None or reported is None else page_points(score.mean - reported),
        "beyond": group.tolerable.get(column.label) is False,
    }


def _measured_as(column: Measure, groups: Sequence[Group]) -> list[tuple[RunFiles, Mapping[str, Any]]]:
    """(run, entry of its final evaluation) of all that a column is about."""
    found = [(run, evaluation) for group in groups for run in group.runs for evaluation in run.evaluations]
    return [one for one in found if final(*one).on_any_data() == column]
