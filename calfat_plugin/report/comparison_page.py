"""The page of several runs side by side, or of a suite."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from calfat_plugin.report import words
from calfat_plugin.report.analyses import tsne_chart
from calfat_plugin.report.bars import label_distribution, per_class, spread_sentence
from calfat_plugin.report.canvas import Chart, Drawing, render
from calfat_plugin.report.comparison_table import results_table
from calfat_plugin.report.curves import compared
from calfat_plugin.report.groups import Group, differences
from calfat_plugin.report.measures import Measure, accuracy_title, monitored, titles, without_curve
from calfat_plugin.report.numbers import counted
from calfat_plugin.report.page import alarms_of, citations, environment, render_page
from calfat_plugin.report.reading import NATURAL, NO_SUITE, RunFiles, SuiteFiles

MOST_LINES = 16  # more groups would be a tangle: the table has them all


def comparison_page(
    title: str, groups: Sequence[Group], figures: Path, *, suite: SuiteFiles = NO_SUITE, notes: Sequence[str] = ()
) -> str:
    """HTML of a comparison; its figures are also written to ``figures``.

    Args:
        title: of the page.
        groups: what to compare, in order.
        figures: an existing folder.
        suite: the suite that the groups are the cells of, for its axes and headings.
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
            "results": {**results_table(groups, suite), "notes": notes},
            "rounds": drawn(_curves(groups[:MOST_LINES], suite.headings)),
            "classes": drawn(_classes(groups[:MOST_LINES], suite.headings)),
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


# --- charts -----------------------------------------------------------------------------------------------------------


def _curves(groups: Sequence[Group], headings: Mapping[str, str]) -> list[Chart | None]:
    """Accuracy during the runs, a chart for each way it was measured; and heterogeneity."""
    runs = {group.name: group.runs for group in groups}
    found = {group.name: [monitored(run, label) for run in group.runs for label in run.monitored] for group in groups}
    charts: list[Chart | None] = []
    for name, measure, title in _each(found, headings):
        column = {group: measure.label if measure in of else None for group, of in found.items()}
        charts.append(compared(name, title, "accuracy (%)", column, runs))
    spread = dict.fromkeys(runs, "heterogeneity")
    return [*charts, compared("heterogeneity", "Heterogeneity s²", "s²", spread, runs, percentages=False)]


def _classes(groups: Sequence[Group], headings: Mapping[str, str]) -> list[Chart | None]:
    """Accuracy per class, clean and under whatever hurt one of the settings most; a chart for each measure."""
    indexes = {group.name: index for index, group in enumerate(groups)}  # as in the curves
    measures = {group.name: group.measures() for group in groups}
    shown = {
        group.name: [of[label] for label in (NATURAL, group.strongest) if label in of]
        for group, of in zip(groups, measures.values(), strict=True)
    }
    charts: list[Chart | None] = []
    for name, measure, title in _each(shown, headings):
        alike = [group for group in groups if measures[group.name].get(measure.label) == measure]
        classes = alike[0].runs[0].class_names
        values = {group.name: group.mean_per_class(measure.label) for group in alike}
        values = {group: fractions for group, fractions in values.items() if len(fractions) == len(classes)}
        if values:
            runs = [run for group in alike for run in group.runs]
            caption = spread_sentence(values, classes) + without_curve(measure, runs, headings)
            charts.append(per_class(f"classes_{name}", f"{title}, per class", caption, values, classes, indexes))
    return charts


def _each(found: Mapping[str, Sequence[Measure]], headings: Mapping[str, str]) -> Iterator[tuple[str, Measure, str]]:
    """(name for files, measure, title) for every measure that a chart is made of, natural accuracy first."""
    measures = sorted(dict.fromkeys(itertools.chain(*found.values())), key=lambda measure: measure.label != NATURAL)
    named = titles(measures, lambda label: accuracy_title(label, headings))
    numbers: Counter[str] = Counter()
    for measure in measures:
        kind = "natural" if measure.label == NATURAL else "robust"
        numbers[kind] += 1
        yield kind if numbers[kind] == 1 else f"{kind}_{numbers[kind]}", measure, named[measure]


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
