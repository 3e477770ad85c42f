"""The page of several runs side by side, or of a suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calfat_plugin.report import words
from calfat_plugin.report.analyses import tsne_chart
from calfat_plugin.report.bars import label_distribution, per_class, spread_sentence
from calfat_plugin.report.canvas import Chart, Drawing, render
from calfat_plugin.report.curves import compared
from calfat_plugin.report.groups import Group, differences
from calfat_plugin.report.numbers import NOTHING, bare_percent, counted, page_points
from calfat_plugin.report.page import alarms_of, citations, environment, render_page
from calfat_plugin.report.reading import NATURAL, RunFiles

MOST_LINES = 16  # more groups would be a tangle: the table has them all


def comparison_page(title: str, groups: Sequence[Group], figures: Path, *, notes: Sequence[str] = ()) -> str:
    """HTML of a comparison; its figures are also written to ``figures``.

    Args:
        title: of the page.
        groups: what to compare, in order.
        figures: an existing folder.
        notes: sentences about runs that are not shown.
    """

    def drawn(charts: Sequence[Chart | None]) -> list[Drawing]:
        return [render(chart, figures) for chart in charts if chart is not None]

    runs = [run for group in groups for run in group.runs]
    whose = {run.path: f"{g.name}, seed {run.seed}" if len(g.runs) > 1 else g.name for g in groups for run in g.runs}
    columns = differences(groups)
    return render_page(
        "comparison.html",
        title=title,
        lead=f"{counted(len(groups), 'setting')}, {counted(len(runs), 'run')}",
        alarms=[alarm for run in runs for alarm in alarms_of(run, whose[run.path])],
        figures=figures.name,
        sections={
            "results": {**_results(groups), "notes": notes},
            "rounds": drawn(_curves(groups)),
            "classes": drawn(_classes(groups)),
            "labels": drawn(_distributions(groups)),
            "features": drawn(
                [
                    tsne_chart(next((run.tsne for run in group.runs if run.tsne), {}), f"tsne_{index}", group.name)
                    for index, group in enumerate(groups)
                ]
            ),
            "settings": columns and {"names": [group.name for group in groups], "columns": columns},
            "recipe": _common(runs),
            "versions": environment(runs[-1]),
            "citations": citations(runs),
        },
    )


# --- results ----------------------------------------------------------------------------------------------------------


def _results(groups: Sequence[Group]) -> dict[str, Any]:
    """A row a group: mean and standard deviation over seeds, and below it what was reported."""
    labels = list(dict.fromkeys(str(e["label"]) for group in groups for run in group.runs for e in run.evaluations))
    best = {label: _best(groups, label) for label in labels}
    rows = [
        {
            "name": group.name,
            "seeds": _seeds(group),
            "scores": [_score(group, label, best=group.name in best[label]) for label in labels],
        }
        for group in groups
    ]
    sources = list(dict.fromkeys(group.source for group in groups if group.reported and group.source))
    reported = any(group.reported for group in groups)
    return {
        "labels": labels,
        "rows": rows,
        "reported": (words.listing(sources) or "as the recipe says") if reported else "",
        "judged": any(group.tolerable for group in groups),
    }


def _seeds(group: Group) -> str:
    """How many seeds are finished, of how many that were started."""
    finished = sum(run.finished for run in group.runs)
    return str(finished) if finished == len(group.runs) else f"{finished} of {len(group.runs)}"


def _score(group: Group, label: str, *, best: bool) -> dict[str, Any]:
    """A cell of the table: the mean, its spread, and what was reported with the difference."""
    score, reported = group.score(label), group.reported.get(label)
    difference = "" if score is None or reported is None else page_points(score.mean - reported)
    return {
        "mean": NOTHING if score is None else bare_percent(score.mean),
        "best": best,
        "spread": "" if score is None or score.std is None else f" ± {bare_percent(score.std)}",
        "reported": "" if reported is None else bare_percent(reported),
        "difference": difference,
        "beyond": group.tolerable.get(label) is False,
    }


def _best(groups: Sequence[Group], label: str) -> set[str]:
    """Names of the groups with the best mean of their problem, where there is something to compare."""
    problems: dict[str, list[tuple[float, str]]] = {}
    for group in groups:
        score = group.score(label)
        if score is not None:
            problems.setdefault(group.problem, []).append((score.mean, group.name))
    return {name for found in problems.values() if len(found) > 1 for mean, name in found if mean == max(found)[0]}


# --- charts -----------------------------------------------------------------------------------------------------------


def _curves(groups: Sequence[Group]) -> list[Chart | None]:
    runs = {group.name: group.runs for group in groups[:MOST_LINES]}
    robust = {name: next((run.robust_label for run in of if run.robust_label), None) for name, of in runs.items()}
    under = f"under {words.listing(list(dict.fromkeys(filter(None, robust.values()))))}"
    spread = dict.fromkeys(runs, "heterogeneity")
    return [
        compared("natural", "Natural accuracy", "natural accuracy (%)", dict.fromkeys(runs, NATURAL), runs),
        compared("robust", f"Accuracy {under}", f"accuracy {under} (%)", robust, runs),
        compared("heterogeneity", "Heterogeneity s²", "s²", spread, runs, percentages=False),
    ]


def _classes(groups: Sequence[Group]) -> list[Chart | None]:
    """Natural and robust accuracy per class, for settings with the same classes."""
    chosen = [group for group in groups[:MOST_LINES] if any(run.evaluations for run in group.runs)]
    names = {group.runs[0].class_names for group in chosen}
    if len(names) != 1:
        return []
    classes = names.pop()
    indexes = {group.name: index for index, group in enumerate(groups)}  # as in the curves
    strongest = {group.name: _strongest(group) for group in chosen}
    under = f"Under {words.listing(list(dict.fromkeys(filter(None, strongest.values()))))}. "
    charts: list[Chart | None] = []
    for name, title, labels, before in (
        ("classes_natural", "Natural accuracy per class", dict.fromkeys(strongest, NATURAL), ""),
        ("classes_robust", "Robust accuracy per class", strongest, under),
    ):
        values = {group.name: group.mean_per_class(labels[group.name]) for group in chosen}
        values = {group: fractions for group, fractions in values.items() if len(fractions) == len(classes)}
        if values:
            caption = before + spread_sentence(values, classes)
            charts.append(per_class(name, title, caption, values, classes, indexes))
    return charts


def _strongest(group: Group) -> str:
    """The evaluator that hurt most, by the mean over seeds; empty without an attack."""
    labels = dict.fromkeys(str(e["label"]) for run in group.runs for e in run.evaluations if e["label"] != NATURAL)
    scores = {label: score.mean for label in reversed(labels) if (score := group.score(label)) is not None}
    return min(scores, key=lambda label: scores[label]) if scores else ""


def _distributions(groups: Sequence[Group]) -> list[Chart | None]:
    """One chart for each different partition."""
    seen: dict[tuple[tuple[int, ...], ...], RunFiles] = {}
    for run in (group.runs[0] for group in groups):
        if run.class_counts and len(seen) < MOST_LINES:
            seen.setdefault(run.class_counts, run)
    return [
        label_distribution(
            run, f"labels_{number}", f"{words.plain(run.value('data_args', 'dataset'))}, {words.partition(run)}"
        )
        for number, run in enumerate(seen.values(), start=1)
    ]


def _common(runs: Sequence[RunFiles]) -> dict[str, str]:
    """The highlights that all runs share."""
    every = list(map(words.highlights, runs))
    return {term: value for term, value in every[0].items() if all(other.get(term) == value for other in every)}
