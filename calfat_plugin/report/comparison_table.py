"""The table of a comparison: a row a setting, a column for each way that accuracy was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calfat_plugin.maths.intervals import Rival, rivals
from calfat_plugin.report import words
from calfat_plugin.report.groups import Group
from calfat_plugin.report.measures import Measure, final, on_examples, titles, with_examples
from calfat_plugin.report.names import MORE, problem_names, problem_of
from calfat_plugin.report.numbers import bare_percent, interval, page_points, page_points_interval
from calfat_plugin.report.reading import RunFiles, SuiteFiles


def results_table(groups: Sequence[Group], suite: SuiteFiles) -> dict[str, Any]:
    """A block of rows for each problem, in which means that are clearly the best are bold; below a mean its interval,
    and what was reported.

    Args:
        groups: the settings.
        suite: gives the columns' headings and order, and a name for the rows.
    """
    measured = {group.name: {label: m.on_any_data() for label, m in group.measures().items()} for group in groups}
    columns = _columns(list(measured.values()), suite.headings)
    blocks = {problem: _rows(block, list(columns), measured) for problem, block in _blocks(groups).items()}
    sources = list(dict.fromkeys(group.source for group in groups if group.reported and group.source))
    reported = any(group.reported for group in groups)
    return {
        "head": ["/".join(suite.axes) or "setting", "seeds", *columns.values()],
        "blocks": [{"problem": problem, "rows": rows} for problem, rows in blocks.items()],
        "several": len(blocks) > 1,
        "paired": any(score["rival"] for of in blocks.values() for row in of for score in row["scores"]),
        "examples": on_examples((heading, _measured_as(column, groups)) for column, heading in columns.items()),
        "abridged": any(group.name.endswith(MORE) for group in groups),
        "reported": (words.listing(sources) or "as the recipe says") if reported else "",
        "judged": any(group.tolerable for group in groups),
    }


def _columns(measured: Sequence[Mapping[str, Measure]], headings: Mapping[str, str]) -> dict[Measure, str]:
    """Every measure with its heading: those that a suite has headings for first, in its order."""
    labels = dict.fromkeys((*headings, *(label for of in measured for label in of)))
    found = [of[label] for label in labels for of in measured if label in of]
    return with_examples(titles(found, lambda label: headings.get(label, label)))


def _blocks(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups by the problem that they solve, under what sets it apart from the other problems."""
    problems = [problem_of(group.runs[0].recipe) for group in groups]
    blocks: dict[str, list[Group]] = {}
    for name, group in zip(problem_names(problems), groups, strict=True):
        blocks.setdefault(name, []).append(group)
    return blocks


def _rows(
    block: Sequence[Group], columns: Sequence[Measure], measured: Mapping[str, Mapping[str, Measure]]
) -> list[dict[str, Any]]:
    """A row a setting, its scores compared with those of the others."""
    found = {}
    for column in columns:
        own = [group for group in block if _is_in(column, columns, measured[group.name])]
        found[column] = rivals({group.name: group.by_seed(column.label) for group in own})
    return [
        {
            "name": group.name,
            "seeds": _seeds(group),
            "scores": [
                _score(group, column, columns, measured[group.name], found[column].get(group.name))
                for column in columns
            ],
        }
        for group in block
    ]


def _seeds(group: Group) -> str:
    """How many seeds are finished, of how many that were started."""
    finished = sum(run.finished for run in group.runs)
    return str(finished) if finished == len(group.runs) else f"{finished} of {len(group.runs)}"


def _score(
    group: Group,
    column: Measure,
    columns: Sequence[Measure],
    measured: Mapping[str, Measure],
    rival: Rival | None,
) -> dict[str, Any]:
    """A cell of the table: the mean, its spread and interval, what was reported, and the difference to its rival."""
    own = _is_in(column, columns, measured)
    score, found = (group.score(column.label), group.interval(column.label)) if own else (None, None)
    reported = group.reported.get(column.label) if own else None
    release = group.release(column.label)
    return {
        "mean": bare_percent(None if score is None else score.mean),
        "best": rival is not None and rival.is_clear_best,
        "spread": "" if score is None or score.std is None else f" ± {bare_percent(score.std)}",
        "interval": "" if found is None else interval(*found),
        "rival": _difference(rival),
        "reported": "" if reported is None else bare_percent(reported),
        "difference": "" if release is None or reported is None else page_points(release - reported),
        "beyond": group.tolerable.get(column.label) is False,
    }


def _is_in(column: Measure, columns: Sequence[Measure], measured: Mapping[str, Measure]) -> bool:
    """Whether a setting belongs in a column; without a measurement, in the first one of its label."""
    return column == (measured.get(column.label) or next(other for other in columns if other.label == column.label))


def _difference(rival: Rival | None) -> str:
    """In points, with its interval; empty where nothing is paired."""
    if rival is None or rival.difference is None or rival.difference.interval is None:
        return ""
    return f"{page_points(rival.difference.mean)} {page_points_interval(*rival.difference.interval)}"


def _measured_as(column: Measure, groups: Sequence[Group]) -> list[tuple[RunFiles, Mapping[str, Any]]]:
    """(run, entry of its final evaluation) of all that a column is about."""
    found = [(run, evaluation) for group in groups for run in group.runs for evaluation in run.evaluations]
    return [one for one in found if final(*one).on_any_data() == column]
