"""The page of several runs: runs of one recipe together, their table, and their curves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calfat_plugin.maths.intervals import Score, mcnemar
from calfat_plugin.options import yaml_text
from calfat_plugin.report.charts import Chart, bar_chart, compared, drawn, short
from calfat_plugin.report.comparability import compared_alike, measured_with, problem_of, score_of, settings_of
from calfat_plugin.report.images import evidence_of, read_strips
from calfat_plugin.report.labels import MORE, differing, highlights, on_examples, problem_names, setting_names
from calfat_plugin.report.numbers import NOTHING, counted, points
from calfat_plugin.report.page import alarms_of, citations, environment, render_page, some
from calfat_plugin.report.reading import NO_SUITE, RunFiles, SuiteFiles, listed_run, read_suite
from calfat_plugin.report.scores import Scored, meaning, partition_note, score_tables
from calfat_plugin.report.table import Cell, Row, Table
from calfat_plugin.results import NATURAL, WORST_CASE


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, one a seed."""

    name: str  # unlike that of any other group of the page
    runs: tuple[RunFiles, ...]  # ascending seeds
    reported: Mapping[str, float]  # evaluator label to accuracy that a paper reports, in percent
    source: str  # the paper, table or figure that reports it
    tolerance: Mapping[str, float]  # evaluator label to the difference from it that passes unmarked, in points

    @property
    def finished(self) -> int:
        return sum(run.finished for run in self.runs)

    def score(self, metric: str) -> Score:
        """What the finished runs measured: an evaluator's accuracy, or another metric of a suite."""
        by_seed = {run.recipe.seed: run for run in self.runs}
        is_accuracy = metric not in self.runs[0].recipe.final_metrics
        return score_of(by_seed, metric, is_accuracy, self.reported.get(metric), self.tolerance.get(metric))

    @property
    def labels(self) -> list[str]:
        """Of the evaluators that measured the final models; empty where nothing is finished."""
        found = (str(evaluation["label"]) for run in reversed(self.runs) for evaluation in run.evaluations)
        return list(dict.fromkeys(found))

    @property
    def strongest(self) -> str:
        """The evaluator that hurt most, by the mean over seeds, of equals the last; empty without an attack."""
        means = {label: mean for label in self.labels if (mean := self.score(label).mean) is not None}
        return min((label for label in reversed(means) if label != NATURAL), key=lambda label: means[label], default="")

    def mean_per_class(self, label: str) -> list[float | None]:
        """Per-class accuracy, the mean over seeds; None for a class without examples."""
        found = [
            evaluation["per_class"]
            for run in self.runs
            for evaluation in run.evaluations
            if evaluation["label"] == label and evaluation.get("per_class")
        ]
        columns = zip(*found, strict=True) if found else ()
        return [None if None in column else sum(column) / len(column) for column in columns]


def group_runs(runs: Sequence[RunFiles], root: Path | None = None) -> list[Group]:
    """Sort runs into groups, in the order in which they first appear (a suite's order where there is one).

    Of several runs with one recipe and seed the last one counts, and a finished one before one that is not.
    """
    cells = {} if root is None else _suite_cells(root)
    order = list(dict.fromkeys(cell.name for cell in cells.values()))
    together: dict[str, dict[int, RunFiles]] = {}
    for run in runs:
        cell = cells.get(run.path.resolve())
        key = f"cell {order.index(cell.name)}" if cell else repr(sorted(settings_of(run.settings).items()))
        seeds = together.setdefault(key, {})
        seed = run.recipe.seed
        if seed not in seeds or run.finished or not seeds[seed].finished:
            seeds[seed] = run
    members = [tuple(found[seed] for seed in sorted(found)) for found in together.values()]
    names = setting_names([group[0] for group in members])
    groups = []
    for name, group in zip(names, members, strict=True):
        of_paper = group[0].recipe.reported
        alone = Group(name, (), of_paper.percent, of_paper.source, {})
        cell = cells.get(group[0].path.resolve(), alone)
        groups.append(replace(cell, runs=group))
    return sorted(groups, key=lambda group: order.index(group.name) if group.name in order else len(order))


def differences(groups: Sequence[Group]) -> list[list[str]]:
    """A row for every setting in which the groups differ: dotted key, and the value of each or a dash."""
    settings = [settings_of(group.runs[0].settings) for group in groups]
    return [
        [key, *(yaml_text(values[key]) if key in values else NOTHING for values in settings)]
        for key in differing(settings)
    ]


def _suite_cells(root: Path) -> dict[Path, Group]:
    """Resolved run directory to the cell of ``suite.json`` that it belongs to, without its runs; empty without one."""
    found: dict[Path, Group] = {}
    suite = read_suite(root)
    for cell in suite.cells:
        scores: Mapping[str, Mapping[str, Any]] = cell.get("scores", {})
        reported = {label: 100 * known for label, of in scores.items() if (known := of.get("reported")) is not None}
        group = Group(str(cell["name"]), (), reported, str(cell.get("source") or ""), suite.tolerance)
        places = (listed_run(root, Path(run["directory"])) for run in cell.get("runs", ()))
        found |= {place.resolve(): group for place in places if place is not None}
    return found


# --- the table --------------------------------------------------------------------------------------------------------


def results_tables(groups: Sequence[Group], suite: SuiteFiles) -> tuple[Table, Table]:
    """Means and their differences, under the problems that the settings solve; empty where nothing is finished."""
    labels = dict.fromkeys((*suite.headings, *(label for group in groups for label in group.labels)))
    found = {group.name: {label: group.score(label) for label in labels} for group in groups}
    ended = {label for group in groups for label in group.labels}  # also of attacks that did not run
    known = [label for label in labels if label in ended or any(scores[label].values for scores in found.values())]
    headings = {label: suite.headings.get(label, label) for label in known}
    found = compared_alike({group.name: (group.runs[0].settings, found[group.name]) for group in groups})
    rows = []
    for problem, group in zip(
        problem_names([problem_of(each.runs[0].settings) for each in groups]), groups, strict=True
    ):
        seeds = str(done) if (done := group.finished) == len(group.runs) else f"{done} of {len(group.runs)}"
        rows.append(Scored([group.name, seeds], found[group.name], problem))
    evaluations = [(run, one) for group in groups for run in group.runs for one in run.evaluations]
    examples = on_examples(
        (heading, [each for each in evaluations if each[1]["label"] == label])
        for label, heading in headings.items()
        if any(one["label"] == label for _, one in evaluations)
    )
    sources = [group.source or "as the recipe says" if group.reported else None for group in groups]
    note = f"Accuracy of the final models in percent: {examples}. ± is the sample standard deviation over seeds."
    one_partition = partition_note({group.name: group.runs[0].settings for group in groups if len(group.runs) > 1})
    note += f" {meaning(headings, rows, sources, suite.tolerance, one_partition)}"
    for group in groups:
        note += _without_number(group)
    if any(group.name.endswith(MORE) for group in groups):
        note += f" Settings whose names end in {MORE} differ in more than their names say; see What differs."
    return score_tables(["/".join(suite.axes) or "setting", "seeds"], headings, rows, note)


def _without_number(group: Group) -> str:
    """Which attacks did not run in runs of a group, a sentence each."""
    seeds: dict[tuple[str, str], list[int]] = {}  # label and why, to the seeds
    for label in group.labels:
        for seed, why in group.score(label).not_run.items():
            seeds.setdefault((label, why), []).append(seed)
    sentences = ""
    for (label, why), of_seeds in seeds.items():
        listed = f"{'seeds' if len(of_seeds) > 1 else 'seed'} {', '.join(map(str, of_seeds))}"
        sentences += f" {group.name}, {listed}: {label} did not run ({why}), so it has no number."
    return sentences


# --- the page ---------------------------------------------------------------------------------------------------------


_SIDE_BY_SIDE = 2  # settings whose adversarial images are shown
MOST_LINES = 16  # more groups would be a tangle: the table has them all


def comparison_page(
    title: str, groups: Sequence[Group], figures: Path, *, suite: SuiteFiles = NO_SUITE, notes: Sequence[str] = ()
) -> str:
    """HTML of a comparison; its figures are also written to ``figures``."""
    runs = [run for group in groups for run in group.runs]
    whose = {
        run.path: f"{group.name}, seed {run.recipe.seed}" if len(group.runs) > 1 else group.name
        for group in groups
        for run in group.runs
    }
    differ, every, shown = differences(groups), list(map(highlights, runs)), groups[:_SIDE_BY_SIDE]
    strips = read_strips([group.runs[0].path for group in shown], runs[0].class_names)
    images = some(table=_image_by_image(groups), strips=strips)
    table, rivals = results_tables(groups, suite)
    notes = notes if table else ["None of these runs is finished yet.", *notes]
    return render_page(
        "comparison.html",
        title=title,
        lead=f"{counted(len(groups), 'setting')}, {counted(len(runs), 'run')}",
        alarms=[alarm for run in runs for alarm in alarms_of(run, whose[run.path])],
        figures=figures.name,
        sections={
            "results": {"table": table, "rivals": rivals, "notes": notes},
            "rounds": drawn(_curves(groups[:MOST_LINES], suite.headings), figures),
            "classes": drawn(_classes(groups[:MOST_LINES], suite.headings), figures),
            "images": images and {**images, "names": [group.name for group in shown]},
            "settings": Table(
                "Settings that differ", ["key", *(group.name for group in groups)], differ, len(groups) + 1
            ),
            "recipe": {term: value for term, value in every[0].items() if all(value == of.get(term) for of in every)},
            "versions": environment(runs[-1]),
            "citations": citations(runs),
        },
    )


def _image_by_image(groups: Sequence[Group]) -> Table:
    """Of two settings, a row an evaluator and seed: what the same test images say of the two models."""
    rows: list[Row] = []
    runs = [{run.recipe.seed: run for run in group.runs} for group in groups]
    for seed in sorted(runs[0].keys() & runs[1].keys()) if len(groups) == 2 else ():
        kept = [found for each in runs if (found := evidence_of(each[seed].path)) is not None]
        if len(kept) < 2 or kept[0].facts["data"] != kept[1].facts["data"]:
            continue
        attacks = [name for name in kept[0].tried if name in kept[1].tried and _alike(name, *(of[seed] for of in runs))]
        together = {WORST_CASE: attacks} if len(attacks) > 1 else {}  # of these alone: each run may have had others
        for name, of in {NATURAL: [], **{name: [name] for name in attacks}, **together}.items():
            tried, right = zip(*(each.withstand(of) if of else each.verdicts(name) for each in kept), strict=True)
            both, (one, other) = tried[0] & tried[1], right
            only = int((both & one & ~other).sum()), int((both & other & ~one).sum())
            number, p = int(both.sum()), mcnemar(*only)
            whose = Cell(name, beside=[f"seed {seed}"] if len(runs[0]) > 1 else [])
            difference = points((only[0] - only[1]) / number)
            rows.append([whose, f"{number:,}", *map(str, only), difference, f"{p:.2g}" if p >= 0.001 else "< 0.001"])
    note = (
        "Of the same test images, attacked in the same way: those that the first setting alone has right, those that "
        "the second alone has right, first minus second in points, and the exact McNemar test of it. It says what "
        "these images show of two models; what another seed gives is another question, which the intervals over seeds "
        "answer."
    )
    head = ["evaluator", "images", "first alone", "second alone", "difference", "p"]
    return Table("Image by image", head, rows, notes=[note])


def _alike(label: str, one: RunFiles, other: RunFiles) -> bool:
    """Whether two runs measured with the same evaluator under a label, in the same ball and with the same step."""

    def how(run: RunFiles) -> tuple[object, ...]:
        settings = settings_of(run.settings)
        return measured_with(run.settings, label), *(
            settings.get(f"calfat.threat.{key}") for key in ("norm", "eps", "step_size")
        )

    return how(one) == how(other)


# --- charts -----------------------------------------------------------------------------------------------------------


def _curves(groups: Sequence[Group], headings: Mapping[str, str]) -> list[Chart | None]:
    """Accuracy during the runs, a chart for each evaluator; and heterogeneity."""
    runs = {group.name: group.runs for group in groups}
    labels = (label for group in groups for run in group.runs for label in run.monitored)
    charts = [compared(name, title, "accuracy (%)", label, runs) for name, label, title in _titled(labels, headings)]
    return [*charts, compared("heterogeneity", "Heterogeneity s²", "s²", "heterogeneity", runs, percentages=False)]


def _classes(groups: Sequence[Group], headings: Mapping[str, str]) -> list[Chart | None]:
    """Accuracy per class, clean and under whatever hurt one of the settings most."""
    indexes = {group.name: index for index, group in enumerate(groups)}  # as in the curves
    labels = (label for group in groups for label in (NATURAL, group.strongest) if label in group.labels)
    charts: list[Chart | None] = []
    for name, label, title in _titled(labels, headings):
        classes = next(group.runs[0].class_names for group in groups if label in group.labels)
        values = {group.name: group.mean_per_class(label) for group in groups}
        values = {group: fractions for group, fractions in values.items() if len(fractions) == len(classes) > 0}
        if values:
            caption = "Mean over seeds; a dash: the class has no test examples."
            names, shown_as = list(map(short, classes)), f"{title}, per class"
            charts.append(
                bar_chart(
                    f"classes_{name}", shown_as, caption, values, names, "class", indexes=indexes, percentages=True
                )
            )
    return charts


def _titled(labels: Iterable[str], headings: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(name for files, evaluator, title) of a chart for each evaluator, natural accuracy first."""
    ordered = sorted(dict.fromkeys(labels), key=lambda label: label != NATURAL)
    attacks = [label for label in ordered if label != NATURAL]
    for label in ordered:
        heading = headings.get(label, label)
        if label == NATURAL:
            yield "natural", label, f"{heading[:1].upper()}{heading[1:]} accuracy"
        else:
            place = attacks.index(label)
            yield f"robust_{place + 1}" if place else "robust", label, f"Accuracy under {heading}"
