"""The page of several runs side by side, or of a suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from calfat_plugin.report import parts, words
from calfat_plugin.report.bars import label_distribution, per_class, spread_sentence
from calfat_plugin.report.canvas import Chart, render
from calfat_plugin.report.curves import compared, natural_columns, robust_columns
from calfat_plugin.report.groups import Group, differences
from calfat_plugin.report.markup import Markup, element, facts, joined, section, table
from calfat_plugin.report.reading import NATURAL, RunFiles
from calfat_plugin.report.scatter import tsne_chart
from calfat_plugin.report.words import bare_percent, points

MOST_LINES = 16  # more groups would be a tangle: the table has them all


def comparison_page(title: str, groups: Sequence[Group], figures: Path, *, notes: Sequence[str] = ()) -> str:
    """HTML of a comparison; its figures are also written to ``figures``.

    Args:
        title: of the page.
        groups: what to compare, in order.
        figures: an existing folder.
        notes: sentences about runs that are not shown.
    """

    def drawn(*charts: Chart | None) -> Markup:
        return parts.figures_block(render(chart, figures) for chart in charts if chart is not None)

    runs = [run for group in groups for run in group.runs]
    found = [alarm for group in groups for run in group.runs for alarm in parts.alarms_of(run, _whose(group, run))]
    return parts.page(
        title=title,
        lead=f"{words.counted(len(groups), 'setting')}, {words.counted(len(runs), 'run')}",
        head=[parts.alarms(found)],
        parts=[
            section("results", "Results", _results(groups), *(element("p", note, class_="note") for note in notes)),
            section("rounds", "Round by round", drawn(*_curves(groups))),
            section("classes", "Class by class", drawn(*_classes(groups))),
            section("labels", "Labels", drawn(*_distributions(groups))),
            section("features", "Features", drawn(*_features(groups))),
            section("settings", "What differs", _differences(groups)),
            section("recipe", "What is common", facts(_common(runs))),
            parts.environment(runs[-1]),
            parts.citations(runs),
        ],
        figures=figures.name,
    )


def _whose(group: Group, run: RunFiles) -> str:
    return group.name if len(group.runs) == 1 else f"{group.name}, seed {run.seed}"


# --- results ----------------------------------------------------------------------------------------------------------


def _results(groups: Sequence[Group]) -> Markup:
    """A row a group: mean and standard deviation over seeds, and below it what was reported."""
    labels = list(dict.fromkeys(str(e["label"]) for group in groups for run in group.runs for e in run.evaluations))
    if not labels:
        return element("p", "None of these runs is finished yet.")
    best = {label: _best(groups, label) for label in labels}
    rows = [
        [
            group.name,
            _seeds(group),
            *(_score(group, label, bold=group.name in best[label]) for label in labels),
        ]
        for group in groups
    ]
    sources = dict.fromkeys(group.source for group in groups if group.reported and group.source)
    note = (
        "Final global models on the full test split, in percent; ± is the sample standard deviation over seeds. Bold: "
        "the best mean among settings that share data, partition, model, number of clients and threat."
    )
    if any(group.reported for group in groups):
        where = words.listing(list(sources)) or "as the recipe says"
        note += f" Below each: reported ({where}) and the difference in points"
        note += ", marked where it is beyond the suite's tolerance." if any(g.tolerable for g in groups) else "."
    return joined(
        [
            table(["setting", "seeds", *labels], rows, caption="Results"),
            element("p", note, class_="note"),
        ]
    )


def _seeds(group: Group) -> str:
    """How many seeds are finished, of how many that were started."""
    finished = sum(run.finished for run in group.runs)
    return str(finished) if finished == len(group.runs) else f"{finished} of {len(group.runs)}"


def _score(group: Group, label: str, *, bold: bool) -> Markup:
    score, reported = group.score(label), group.reported.get(label)
    if score is None:
        shown: str = words.NOTHING
    else:
        number = bare_percent(score.mean, 2)
        spread = "" if score.std is None else f" ± {100 * score.std:.2f}"
        shown = joined([element("span", number, class_="best") if bold else number, spread])
    if reported is None:
        return joined([shown])
    beside = bare_percent(reported, 2)
    if score is not None:
        beyond = group.tolerable.get(label) is False
        beside = joined(
            [f"{beside}, ", element("span", points(score.mean - reported), class_="beyond" if beyond else None)]
        )
    return joined([shown, element("span", beside, class_="beside")])


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
    runs: dict[str, Sequence[RunFiles]] = {group.name: group.runs for group in groups[:MOST_LINES]}
    robust = robust_columns(runs)
    attacks = words.listing(list(dict.fromkeys(robust.values())))
    return [
        compared("natural", "Natural accuracy", "natural accuracy (%)", natural_columns(runs), runs, percentages=True),
        compared(
            "robust", f"Accuracy under {attacks}", f"accuracy under {attacks} (%)", robust, runs, percentages=True
        ),
        compared(
            "heterogeneity", "Heterogeneity s²", "s²", dict.fromkeys(runs, "heterogeneity"), runs, percentages=False
        ),
    ]


def _classes(groups: Sequence[Group]) -> list[Chart | None]:
    """Natural and robust accuracy per class, for settings with the same classes."""
    chosen = [group for group in groups[:MOST_LINES] if any(run.evaluations for run in group.runs)]
    names = {group.runs[0].class_names for group in chosen}
    if len(names) != 1:
        return []
    classes = names.pop()
    indexes = {group.name: index for index, group in enumerate(groups)}  # as in the curves
    charts: list[Chart | None] = []
    for name, title, label_of in (
        ("classes_natural", "Natural accuracy per class", lambda group: NATURAL),
        ("classes_robust", "Robust accuracy per class", _strongest),
    ):
        labels = {group.name: label_of(group) for group in chosen}
        values = {group.name: group.mean_per_class(labels[group.name]) for group in chosen if labels[group.name]}
        values = {group: fractions for group, fractions in values.items() if len(fractions) == len(classes)}
        if values:
            of = (
                ""
                if name == "classes_natural"
                else f"Under {words.listing(list(dict.fromkeys(filter(None, labels.values()))))}. "
            )
            charts.append(per_class(name, title, f"{of}{spread_sentence(values, classes)}", values, classes, indexes))
    return charts


def _strongest(group: Group) -> str:
    """The evaluator that hurt most, by the mean over seeds; empty without an attack."""
    labels = dict.fromkeys(str(e["label"]) for run in group.runs for e in run.evaluations if e["label"] != NATURAL)
    scores = {label: score.mean for label in reversed(labels) if (score := group.score(label)) is not None}
    return min(scores, key=lambda label: scores[label]) if scores else ""


def _distributions(groups: Sequence[Group]) -> list[Chart | None]:
    """One chart for each different partition."""
    charts: list[Chart | None] = []
    seen: dict[tuple[tuple[int, ...], ...], None] = {}
    for group in groups:
        counts = group.runs[0].class_counts
        if counts and counts not in seen and len(seen) < MOST_LINES:
            seen[counts] = None
            chart = label_distribution(group.runs[0])
            if chart is not None:
                title = f"{chart.title}: {words.plain(group.runs[0].value('data_args', 'dataset'))}"
                title += f", {words.partition(group.runs[0])}"
                charts.append(
                    Chart(f"labels_{len(seen)}", title, chart.caption, chart.height, chart.draw, chart.legend)
                )
    return charts


def _features(groups: Sequence[Group]) -> list[Chart | None]:
    return [
        tsne_chart(next((run.tsne for run in group.runs if run.tsne), {}), f"tsne_{index}", group.name)
        for index, group in enumerate(groups)
    ]


# --- settings ---------------------------------------------------------------------------------------------------------


def _differences(groups: Sequence[Group]) -> Markup:
    """A row a group; the trainer with its options in one column, for most of them are its own."""
    columns = differences(groups)
    if not columns:
        return Markup()
    rows = [
        [group.name, *(element("span", values[index], class_="cell") for _, values in columns)]
        for index, group in enumerate(groups)
    ]
    return table(["setting", *(key for key, _ in columns)], rows, caption="Settings that differ", numbers_from=99)


def _common(runs: Sequence[RunFiles]) -> list[tuple[str, str]]:
    """The highlights that all runs share."""
    every: Sequence[Mapping[str, str]] = [dict(words.highlights(run)) for run in runs]
    return [(term, value) for term, value in every[0].items() if all(other.get(term) == value for other in every)]
