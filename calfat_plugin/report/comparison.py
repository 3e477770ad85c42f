"""The page of several runs: runs of one recipe together, their table, and their curves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calfat_plugin.maths.intervals import Score, mcnemar
from calfat_plugin.options import yaml_text
from calfat_plugin.report.charts import Chart, bar_chart, compared, drawn, short
from calfat_plugin.report.comparability import compared_alike, measured_with, problem_of, score_of, settings_of
from calfat_plugin.report.images import evidence_of, read_strips
from calfat_plugin.report.labels import MORE, differing, highlights, on_examples, problem_names, setting_names
from calfat_plugin.report.numbers import NOTHING, counted, points
from calfat_plugin.report.page import alarms_of, citations, environment, render_page, some
from calfat_plugin.report.reading import listed_run
from calfat_plugin.report.scores import Scored, meaning, partition_note, score_tables
from calfat_plugin.report.table import Cell, Row, Table
from calfat_plugin.results import NATURAL, WORST_CASE
from calfat_plugin.run_files import SuiteFile, read_suite
from calfat_plugin.stored_run import Run


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, one a seed."""

    name: str  # unlike that of any other group of the page
    runs: tuple[Run, ...]  # ascending seeds
    reported: Mapping[str, float]  # evaluator label to accuracy that a paper reports, in percent
    source: str  # the paper, table or figure that reports it
    tolerance: Mapping[str, float]  # evaluator label to the difference from it that passes unmarked, in points

    @property
    def finished(self) -> int:
        return sum(run.finished for run in self.runs)

    def score(self, metric: str) -> Score:
        """What the finished runs measured: an evaluator's accuracy, or another metric of a suite."""
        by_seed = {run.experiment.seed: run for run in self.runs}
        is_accuracy = metric not in self.runs[0].experiment.final_metrics
        return score_of(by_seed, metric, is_accuracy, self.reported.get(metric), self.tolerance.get(metric))

    @property
    def labels(self) -> list[str]:
        """Of the evaluators that measured the final models; empty where nothing is finished."""
        labels: dict[str, None] = {}
        for run in reversed(self.runs):
            labels.update(dict.fromkeys(run.results))
        return list(labels)

    @property
    def strongest(self) -> str:
        """The evaluator that hurt most, by the mean over seeds, of equals the last; empty without an attack."""
        strongest, lowest = "", 2.0
        for label in self.labels:
            mean = self.score(label).mean
            if label != NATURAL and mean is not None and mean <= lowest:
                strongest, lowest = label, mean
        return strongest

    def mean_per_class(self, label: str) -> list[float | None]:
        """Per-class accuracy, the mean over seeds; None for a class without examples."""
        of_runs = []
        for run in self.runs:
            evaluation = run.results.get(label)
            if evaluation is not None and evaluation.per_class:
                of_runs.append(evaluation.per_class)
        means: list[float | None] = []
        for of_class in zip(*of_runs, strict=True):
            known = [accuracy for accuracy in of_class if accuracy is not None]
            means.append(sum(known) / len(known) if len(known) == len(of_runs) else None)
        return means


def group_runs(runs: Sequence[Run], root: Path | None = None) -> list[Group]:
    """Sort runs into groups, in the order in which they first appear (a suite's order where there is one).

    Of several runs with one recipe and seed the last one counts, and a finished one before one that is not.
    """
    cells = {} if root is None else _suite_cells(root)
    members: dict[str, dict[int, Run]] = {}  # what makes a group, to seed to run
    for run in runs:
        cell = cells.get(run.directory.resolve())
        key = repr(sorted(settings_of(run.settings).items()))
        if cell is not None:
            key = f"cell {cell.name}"
        seeds = members.setdefault(key, {})
        seed = run.experiment.seed
        if seed not in seeds or run.finished or not seeds[seed].finished:
            seeds[seed] = run
    firsts = [seeds[min(seeds)] for seeds in members.values()]
    groups = []
    for name, first, seeds in zip(setting_names(firsts), firsts, members.values(), strict=True):
        reported = first.experiment.reported
        alone = Group(name, (), reported.percent, reported.source, {})
        group = cells.get(first.directory.resolve(), alone)
        groups.append(replace(group, runs=tuple(seeds[seed] for seed in sorted(seeds))))
    order = list(dict.fromkeys(cell.name for cell in cells.values()))
    in_suite = [group for group in groups if group.name in order]
    others = [group for group in groups if group.name not in order]
    return [*sorted(in_suite, key=lambda group: order.index(group.name)), *others]


def differences(groups: Sequence[Group]) -> list[list[str]]:
    """A row for every setting in which the groups differ: dotted key, and the value of each or a dash."""
    settings = [settings_of(group.runs[0].settings) for group in groups]
    rows = []
    for key in differing(settings):
        row = [key]
        for values in settings:
            row.append(yaml_text(values[key]) if key in values else NOTHING)
        rows.append(row)
    return rows


def _suite_cells(root: Path) -> dict[Path, Group]:
    """Resolved run directory to the cell of ``suite.json`` that it belongs to, without its runs; empty without one."""
    cells: dict[Path, Group] = {}
    suite = read_suite(root)
    for cell in suite.cells:
        reported = {}
        for label, score in cell.scores.items():
            if score.reported is not None:
                reported[label] = 100 * score.reported
        group = Group(cell.name, (), reported, cell.source, suite.tolerance_points)
        for run in cell.runs:
            place = listed_run(root, Path(run.directory))
            if place is not None:
                cells[place.resolve()] = group
    return cells


# --- the table --------------------------------------------------------------------------------------------------------


def results_tables(groups: Sequence[Group], suite: SuiteFile) -> tuple[Table, Table]:
    """Means and their differences, under the problems that the settings solve; empty where nothing is finished."""
    headings = _headings(groups, suite)
    scores = {}
    for group in groups:
        scores[group.name] = group.runs[0].settings, {label: group.score(label) for label in headings}
    compared_scores = compared_alike(scores)
    problems = problem_names([problem_of(group.runs[0].settings) for group in groups])
    rows = []
    for group, problem in zip(groups, problems, strict=True):
        seeds = str(group.finished)
        if group.finished < len(group.runs):
            seeds += f" of {len(group.runs)}"
        rows.append(Scored([group.name, seeds], compared_scores[group.name], problem))
    axes = "/".join(axis.name for axis in suite.axes)
    return score_tables([axes or "setting", "seeds"], headings, rows, _note(groups, suite, headings, rows))


def _headings(groups: Sequence[Group], suite: SuiteFile) -> dict[str, str]:
    """Metric to the heading of its column: the suite's metrics first, without those that no run has."""
    measured = {label for group in groups for label in group.labels}  # also attacks that did not run
    headings = {}
    for label, heading in suite.headings.items():
        if label in measured or any(group.score(label).values for group in groups):
            headings[label] = heading
    for group in groups:
        for label in group.labels:
            headings.setdefault(label, label)
    return headings


def _note(groups: Sequence[Group], suite: SuiteFile, headings: Mapping[str, str], rows: Sequence[Scored]) -> str:
    """What the numbers of the table mean."""
    of_labels = []
    for label, heading in headings.items():
        of_label = []
        for group in groups:
            of_label += [(run, run.results[label]) for run in group.runs if label in run.results]
        if of_label:
            of_labels.append((heading, of_label))
    sources = [group.source or "as the recipe says" for group in groups if group.reported]
    one_partition = partition_note({group.name: group.runs[0].settings for group in groups if len(group.runs) > 1})
    parts = [
        f"Accuracy of the final models in percent: {on_examples(of_labels)}. ± is the sample standard deviation over "
        "seeds.",
        meaning(headings, rows, sources, suite.tolerance_points, one_partition),
    ]
    for group in groups:
        parts += _without_number(group)
    if any(group.name.endswith(MORE) for group in groups):
        parts.append(f"Settings whose names end in {MORE} differ in more than their names say; see What differs.")
    return " ".join(parts)


def _without_number(group: Group) -> list[str]:
    """Which attacks did not run in runs of a group, a sentence each."""
    seeds: dict[tuple[str, str], list[int]] = {}  # label and why, to the seeds
    for label in group.labels:
        for seed, why in group.score(label).not_run.items():
            seeds.setdefault((label, why), []).append(seed)
    sentences = []
    for (label, why), of_seeds in seeds.items():
        word = "seeds" if len(of_seeds) > 1 else "seed"
        listed = f"{word} {', '.join(map(str, of_seeds))}"
        sentences.append(f"{group.name}, {listed}: {label} did not run ({why}), so it has no number.")
    return sentences


# --- the page ---------------------------------------------------------------------------------------------------------


_SIDE_BY_SIDE = 2  # settings whose adversarial images are shown
MOST_LINES = 16  # more groups would be a tangle: the table has them all


def comparison_page(
    title: str, groups: Sequence[Group], figures: Path, *, suite: SuiteFile | None = None, notes: Sequence[str] = ()
) -> str:
    """HTML of a comparison; its figures are also written to ``figures``."""
    suite = suite or SuiteFile()
    runs, alarms = [], []
    for group in groups:
        for run in group.runs:
            whose = f"{group.name}, seed {run.experiment.seed}" if len(group.runs) > 1 else group.name
            runs.append(run)
            alarms += alarms_of(run, whose)
    table, rivals = results_tables(groups, suite)
    if not table:
        notes = ["None of these runs is finished yet.", *notes]
    side_by_side = groups[:_SIDE_BY_SIDE]
    strips = read_strips([group.runs[0].directory for group in side_by_side], runs[0].class_names)
    images = some(table=_image_by_image(groups), strips=strips)
    if images is not None:
        images["names"] = [group.name for group in side_by_side]
    of_runs = [highlights(run) for run in runs]
    shared = {key: value for key, value in of_runs[0].items() if all(of_run.get(key) == value for of_run in of_runs)}
    names = [group.name for group in groups]
    return render_page(
        "comparison.html",
        title=title,
        lead=f"{counted(len(groups), 'setting')}, {counted(len(runs), 'run')}",
        alarms=alarms,
        figures=figures.name,
        sections={
            "results": {"table": table, "rivals": rivals, "notes": notes},
            "rounds": drawn(_curves(groups[:MOST_LINES], suite.headings), figures),
            "classes": drawn(_classes(groups[:MOST_LINES], suite.headings), figures),
            "images": images,
            "settings": Table("Settings that differ", ["key", *names], differences(groups), len(groups) + 1),
            "recipe": shared,
            "versions": environment(runs[-1]),
            "citations": citations(runs),
        },
    )


def _image_by_image(groups: Sequence[Group]) -> Table:
    """Of two settings, a row an evaluator and seed: what the same test images say of the two models."""
    rows: list[Row] = []
    if len(groups) == 2:
        first, second = [{run.experiment.seed: run for run in group.runs} for group in groups]
        for seed in sorted(first.keys() & second.keys()):
            beside = [f"seed {seed}"] if len(first) > 1 else []
            rows += _rows_of_images(first[seed], second[seed], beside)
    note = (
        "Of the same test images, attacked in the same way: those that the first setting alone has right, those that "
        "the second alone has right, first minus second in points, and the exact McNemar test of it. It says what "
        "these images show of two models; what another seed gives is another question, which the intervals over seeds "
        "answer."
    )
    head = ["evaluator", "images", "first alone", "second alone", "difference", "p"]
    return Table("Image by image", head, rows, notes=[note])


def _rows_of_images(first: Run, second: Run, beside: Sequence[str]) -> list[Row]:
    """A row for natural accuracy, for each attack that both runs made alike, and for these attacks together."""
    one, other = evidence_of(first.directory), evidence_of(second.directory)
    if one is None or other is None or one.facts["data"] != other.facts["data"]:
        return []
    attacks = [label for label in one.tried if label in other.tried and _alike(label, first, second)]
    verdicts = {NATURAL: (one.verdicts(NATURAL), other.verdicts(NATURAL))}
    for label in attacks:
        verdicts[label] = one.withstand([label]), other.withstand([label])
    if len(attacks) > 1:  # of these alone: each run may have had others
        verdicts[WORST_CASE] = one.withstand(attacks), other.withstand(attacks)
    rows: list[Row] = []
    for label, ((tried_one, right_one), (tried_other, right_other)) in verdicts.items():
        both = tried_one & tried_other
        images = int(both.sum())
        one_alone = int((both & right_one & ~right_other).sum())
        other_alone = int((both & right_other & ~right_one).sum())
        p_value = mcnemar(one_alone, other_alone)
        shown_p = f"{p_value:.2g}" if p_value >= 0.001 else "< 0.001"
        difference = points((one_alone - other_alone) / images)
        rows.append([Cell(label, beside=beside), f"{images:,}", str(one_alone), str(other_alone), difference, shown_p])
    return rows


def _alike(label: str, one: Run, other: Run) -> bool:
    """Whether two runs measured with the same evaluator under a label, in the same ball and with the same step."""

    if measured_with(one.settings, label) != measured_with(other.settings, label):
        return False
    of_one, of_other = settings_of(one.settings), settings_of(other.settings)
    keys = [f"calfat.threat.{key}" for key in ("norm", "eps", "step_size")]
    return all(of_one.get(key) == of_other.get(key) for key in keys)


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
    class_names: dict[str, Sequence[str]] = {}  # of the first group that was measured with a label
    for group in groups:
        for label in (NATURAL, group.strongest):
            if label in group.labels:
                class_names.setdefault(label, group.runs[0].class_names)
    charts: list[Chart | None] = []
    for name, label, title in _titled(class_names, headings):
        values = {}
        for group in groups:
            means = group.mean_per_class(label)
            if means and len(means) == len(class_names[label]):
                values[group.name] = means
        if values:
            charts.append(
                bar_chart(
                    f"classes_{name}",
                    f"{title}, per class",
                    "Mean over seeds; a dash: the class has no test examples.",
                    values,
                    [short(class_name) for class_name in class_names[label]],
                    "class",
                    indexes=indexes,
                    percentages=True,
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
