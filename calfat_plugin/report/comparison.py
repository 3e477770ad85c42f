"""The page of several runs: which runs these are, runs of one recipe together, their table, and their curves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calfat_plugin.errors import RunError
from calfat_plugin.maths.intervals import Score, mcnemar
from calfat_plugin.options import yaml_text
from calfat_plugin.report.charts import Chart, bar_chart, compared, drawn, short
from calfat_plugin.report.images import evidence_of, read_strips
from calfat_plugin.report.labels import MORE, differing, highlights, on_examples, problem_names, setting_names
from calfat_plugin.report.numbers import NOTHING, counted, points
from calfat_plugin.report.page import alarms_of, citations, environment, render_page, some
from calfat_plugin.report.scores import (
    Scored,
    compared_alike,
    meaning,
    measured_with,
    partition_note,
    problem_of,
    score_of,
    score_tables,
    settings_of,
)
from calfat_plugin.report.table import Cell, Row, Table
from calfat_plugin.results import NATURAL, WORST_CASE
from calfat_plugin.run_files import SuiteFile, read_suite
from calfat_plugin.stored_run import RECIPE_FILE, Run


def find_runs(path: Path) -> list[Path]:
    """The run directory ``path``, or the runs that its ``suite.json`` lists, or all runs below it, sorted.

    A suite may list runs in the folder of another suite that shares them.
    """
    if (path / RECIPE_FILE).is_file():
        return [path]
    if path.is_file():  # such as the page of a run
        example = Path("runs/calfat_digits/0-20260101-120000")
        if (path.parent / RECIPE_FILE).is_file():
            example = path.parent
        raise RunError(f"{path}: not a directory. Name run directories, such as {example}.")
    runs = []
    for cell in read_suite(path).cells:
        for run in cell.runs:
            directory = _listed_run(path, Path(run.directory))
            if directory is not None:
                runs.append(directory)
    if runs:
        return runs
    problem = "no such directory"
    if path.is_dir():
        runs = sorted(recipe.parent for recipe in path.rglob(RECIPE_FILE))
        problem = "neither here nor below is there a run"
    if not runs:
        raise RunError(f"{path}: {problem}. Name run directories, such as runs/calfat_digits/0-20260101-120000.")
    return runs


def _listed_run(suite: Path, written: Path) -> Path | None:
    """A run of a suite: where ``suite.json`` says, or at the same place beside the suite, if both were moved."""
    moved = suite.resolve().parent.joinpath(*written.parts[-3:])  # resolved, because "." has no parent
    for directory in (written, moved):
        if (directory / RECIPE_FILE).is_file():
            return directory
    return None


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
        accuracies = []  # a row for each run, with a column for each class
        for run in self.runs:
            evaluation = run.results.get(label)
            if evaluation is not None and evaluation.per_class:
                accuracies.append(evaluation.per_class)
        means: list[float | None] = []
        for column in zip(*accuracies, strict=True):
            known = [accuracy for accuracy in column if accuracy is not None]
            means.append(sum(known) / len(known) if len(known) == len(column) else None)
        return means


def group_runs(runs: Sequence[Run], root: Path | None = None) -> list[Group]:
    """Sort runs into groups, in the order in which they first appear (a suite's order where there is one).

    Of several runs with one recipe and seed the last one counts, and a finished one before one that is not.
    """
    cells = _suite_cells(root)
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
        outside_suite = Group(name, (), reported.percent, reported.source, {})
        group = cells.get(first.directory.resolve(), outside_suite)
        groups.append(replace(group, runs=tuple(seeds[seed] for seed in sorted(seeds))))
    order = list(dict.fromkeys(cell.name for cell in cells.values()))

    def place(group: Group) -> int:
        return order.index(group.name) if group.name in order else len(order)

    return sorted(groups, key=place)


def differences(groups: Sequence[Group]) -> list[list[str]]:
    """A row for every key in which the groups differ: the dotted key, then the value of each group or a dash."""
    settings = [settings_of(group.runs[0].settings) for group in groups]
    rows = []
    for key in differing(settings):
        row = [key]
        for values in settings:
            row.append(yaml_text(values[key]) if key in values else NOTHING)
        rows.append(row)
    return rows


def _suite_cells(root: Path | None) -> dict[Path, Group]:
    """Resolved run directory to the cell of ``suite.json`` that it belongs to, as a group without runs.

    Empty without a suite.
    """
    cells: dict[Path, Group] = {}
    if root is None:
        return cells
    suite = read_suite(root)
    for cell in suite.cells:
        reported = {}
        for label, score in cell.scores.items():
            if score.reported is not None:
                reported[label] = 100 * score.reported
        group = Group(cell.name, (), reported, cell.source, suite.tolerance_points)
        for run in cell.runs:
            directory = _listed_run(root, Path(run.directory))
            if directory is not None:
                cells[directory.resolve()] = group
    return cells


# --- the table --------------------------------------------------------------------------------------------------------


def results_tables(groups: Sequence[Group], suite: SuiteFile) -> tuple[Table, Table]:
    """Means and their differences, under the problems that the settings solve; empty where nothing is finished."""
    headings = {}  # metric to the heading of its column, those of the suite first
    for metric, heading in suite.headings.items():
        # An attack that did not run is among the labels and has no value; a worst class has a value alone.
        if any(metric in group.labels or group.score(metric).values for group in groups):
            headings[metric] = heading
    for group in groups:
        for label in group.labels:
            headings.setdefault(label, label)
    settings_and_scores, problems = {}, []
    for group in groups:
        settings = group.runs[0].settings
        settings_and_scores[group.name] = settings, {metric: group.score(metric) for metric in headings}
        problems.append(problem_of(settings))
    scores = compared_alike(settings_and_scores)
    rows = []
    for group, problem in zip(groups, problem_names(problems), strict=True):
        seeds = str(group.finished)
        if group.finished < len(group.runs):
            seeds += f" of {len(group.runs)}"
        rows.append(Scored([group.name, seeds], scores[group.name], problem))
    axes = "/".join(axis.name for axis in suite.axes)
    return score_tables([axes or "setting", "seeds"], headings, rows, _note(groups, suite, headings, rows))


def _note(groups: Sequence[Group], suite: SuiteFile, headings: Mapping[str, str], rows: Sequence[Scored]) -> str:
    """What the numbers of the table mean."""
    measured = []
    for label, heading in headings.items():
        evaluations = []
        for group in groups:
            for run in group.runs:
                if label in run.results:
                    evaluations.append((run, run.results[label]))
        if evaluations:
            measured.append((heading, evaluations))
    sources = [group.source or "as the recipe says" for group in groups if group.reported]
    of_several_seeds = {group.name: group.runs[0].settings for group in groups if len(group.runs) > 1}
    sentences = [
        f"Accuracy of the final models in percent: {on_examples(measured)}. ± is the sample standard deviation over "
        "seeds.",
        meaning(headings, rows, sources, suite.tolerance_points, partition_note(of_several_seeds)),
    ]
    for group in groups:
        seeds_of: dict[tuple[str, str], list[str]] = {}  # by attack, and the reason why it did not run
        for label in group.labels:
            for seed, reason in group.score(label).not_run.items():
                seeds_of.setdefault((label, reason), []).append(str(seed))
        for (label, reason), seeds in seeds_of.items():
            word = "seeds" if len(seeds) > 1 else "seed"
            listed = f"{group.name}, {word} {', '.join(seeds)}"
            sentences.append(f"{listed}: {label} did not run ({reason}), so it has no number.")
    if any(group.name.endswith(MORE) for group in groups):
        sentences.append(f"Settings whose names end in {MORE} differ in more than their names say; see What differs.")
    return " ".join(sentences)


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
            name = group.name
            if len(group.runs) > 1:
                name += f", seed {run.experiment.seed}"
            runs.append(run)
            alarms += alarms_of(run, name)
    table, rivals = results_tables(groups, suite)
    if not table:
        notes = ["None of these runs is finished yet.", *notes]
    side_by_side = groups[:_SIDE_BY_SIDE]
    directories = [group.runs[0].directory for group in side_by_side]
    strips = read_strips(directories, runs[0].class_names)
    images = some(table=_image_by_image(groups), strips=strips)
    if images is not None:
        images["names"] = [group.name for group in side_by_side]
    first, *others = [highlights(run) for run in runs]
    shared = {}
    for key, value in first.items():
        if all(other.get(key) == value for other in others):
            shared[key] = value
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
        first_runs = {run.experiment.seed: run for run in groups[0].runs}
        for second in groups[1].runs:
            seed = second.experiment.seed
            if seed in first_runs:
                beside = [f"seed {seed}"] if len(first_runs) > 1 else []
                rows += _rows_of_images(first_runs[seed], second, beside)
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
    evidence_1, evidence_2 = evidence_of(first.directory), evidence_of(second.directory)
    if evidence_1 is None or evidence_2 is None or evidence_1.facts["data"] != evidence_2.facts["data"]:
        return []
    attacks = []
    for label in evidence_1.tried:
        if label in evidence_2.tried and _measured_alike(label, first, second):
            attacks.append(label)
    verdicts = {NATURAL: (evidence_1.verdicts(NATURAL), evidence_2.verdicts(NATURAL))}
    for label in attacks:
        verdicts[label] = evidence_1.withstand([label]), evidence_2.withstand([label])
    if len(attacks) > 1:  # of these alone, because each run may have had others
        verdicts[WORST_CASE] = evidence_1.withstand(attacks), evidence_2.withstand(attacks)
    rows: list[Row] = []
    for label, ((tried_1, right_1), (tried_2, right_2)) in verdicts.items():
        tried = tried_1 & tried_2
        num_images = int(tried.sum())
        first_alone = int((tried & right_1 & ~right_2).sum())
        second_alone = int((tried & right_2 & ~right_1).sum())
        difference = points((first_alone - second_alone) / num_images)
        p_value = mcnemar(first_alone, second_alone)
        p_text = f"{p_value:.2g}" if p_value >= 0.001 else "< 0.001"
        name = Cell(label, beside=beside)
        rows.append([name, f"{num_images:,}", str(first_alone), str(second_alone), difference, p_text])
    return rows


def _measured_alike(label: str, first: Run, second: Run) -> bool:
    """Whether two runs measured with the same evaluator under a label, in the same ball and with the same step."""
    if measured_with(first.settings, label) != measured_with(second.settings, label):
        return False
    settings_1, settings_2 = settings_of(first.settings), settings_of(second.settings)
    keys = ("calfat.threat.norm", "calfat.threat.eps", "calfat.threat.step_size")
    return all(settings_1.get(key) == settings_2.get(key) for key in keys)


# --- charts -----------------------------------------------------------------------------------------------------------


def _curves(groups: Sequence[Group], headings: Mapping[str, str]) -> list[Chart | None]:
    """Accuracy during the runs, a chart for each evaluator; and heterogeneity."""
    runs: dict[str, Sequence[Run]] = {}
    labels: dict[str, None] = {}
    for group in groups:
        runs[group.name] = group.runs
        for run in group.runs:
            labels.update(dict.fromkeys(run.monitored))
    charts = []
    for name, label, title in _titled(labels, headings):
        charts.append(compared(name, title, "accuracy (%)", label, runs))
    charts.append(compared("heterogeneity", "Heterogeneity s²", "s²", "heterogeneity", runs, percentages=False))
    return charts


def _classes(groups: Sequence[Group], headings: Mapping[str, str]) -> list[Chart | None]:
    """Accuracy per class, clean and under each attack that hurt a setting most."""
    indexes = {group.name: index for index, group in enumerate(groups)}  # the colours of the curves
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


def _titled(labels: Collection[str], headings: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(name for files, evaluator, title) of a chart for each evaluator, natural accuracy first."""
    if NATURAL in labels:
        heading = headings.get(NATURAL, NATURAL)
        yield "natural", NATURAL, f"{heading[:1].upper()}{heading[1:]} accuracy"
    attacks = [label for label in labels if label != NATURAL]
    for number, label in enumerate(attacks, start=1):
        name = "robust" if number == 1 else f"robust_{number}"
        yield name, label, f"Accuracy under {headings.get(label, label)}"
