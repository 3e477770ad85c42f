"""Runs that differ in their seed only belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calfat_plugin.maths.intervals import Interval, of_accuracy
from calfat_plugin.maths.metrics import MeanStd, mean_std
from calfat_plugin.report.measures import Measure, final
from calfat_plugin.report.names import setting_names, settings_of
from calfat_plugin.report.numbers import NOTHING
from calfat_plugin.report.reading import NATURAL, RunFiles, listed_run, read_suite
from calfat_plugin.report.words import pick, plain


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, one a seed.

    Attributes:
        name: unlike that of any other group of the page.
        runs: ascending seeds.
        reported: evaluator label to accuracy that a paper reports, a fraction.
        source: the paper, table or figure that reports it.
        tolerable: evaluator label to whether the difference is within the suite's tolerance; absent: not judged.
    """

    name: str
    runs: tuple[RunFiles, ...]
    reported: Mapping[str, float]
    source: str
    tolerable: Mapping[str, bool]

    def by_seed(self, label: str) -> dict[int, float]:
        """Seed to final accuracy of the finished runs."""
        found = {run.seed: run.accuracy(label) for run in self.runs}
        return {seed: value for seed, value in found.items() if value is not None}

    def release(self, label: str) -> float | None:
        """The mean over seeds by the release's convention, with which reported numbers compare."""
        found = [value for run in self.runs if (value := run.accuracy_release(label)) is not None]
        return mean_std(found)[0] if found else None

    def score(self, label: str) -> MeanStd | None:
        """Mean and sample standard deviation over seeds of the final accuracy; None where nothing is finished."""
        values = list(self.by_seed(label).values())
        return mean_std(values) if values else None

    def interval(self, label: str) -> Interval | None:
        """95 % interval of that mean: Student's over seeds, of one run Wilson's; None where nothing is finished."""
        numbers = {e.get("num_examples") for run in self.runs for e in run.evaluations if e["label"] == label}
        return of_accuracy(list(self.by_seed(label).values()), numbers.pop() if len(numbers) == 1 else None)

    def measures(self) -> dict[str, Measure]:
        """Evaluator label to how its final accuracy was measured; empty where nothing is finished."""
        return {str(found["label"]): final(run, found) for run in reversed(self.runs) for found in run.evaluations}

    @property
    def strongest(self) -> str:
        """The evaluator that hurt most, by the mean over seeds, of equals the last; empty without an attack."""
        means = {label: score.mean for label in self.measures() if (score := self.score(label)) is not None}
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

    Args:
        runs: what to group.
        root: a directory that may hold a suite's ``suite.json``.
    """
    cells = {} if root is None else _suite_cells(root)
    order = list(dict.fromkeys(cell.name for cell in cells.values()))
    together: dict[str, dict[int, RunFiles]] = {}
    for run in runs:
        cell = cells.get(run.path.resolve())
        key = f"cell {order.index(cell.name)}" if cell else repr(sorted(settings_of(run).items()))
        seeds = together.setdefault(key, {})
        if run.seed not in seeds or run.finished or not seeds[run.seed].finished:
            seeds[run.seed] = run
    members = [tuple(found[seed] for seed in sorted(found)) for found in together.values()]
    names = setting_names([group[0] for group in members])
    groups = []
    for name, group in zip(names, members, strict=True):
        cell = cells.get(group[0].path.resolve()) or Group(name, (), *reported_of(group[0]), {})
        groups.append(replace(cell, runs=group))
    return sorted(groups, key=lambda group: order.index(group.name) if group.name in order else len(order))


def differences(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """(dotted key, one value a group) for every setting in which the groups differ; a dash where a group has none.

    The trainer with all its options is one setting.
    """
    settings = []
    for group in groups:
        found = settings_of(group.runs[0])
        found = {key: value for key, value in found.items() if not key.startswith("calfat.trainer.")}
        trainer, loss = group.runs[0].value("calfat", "trainer"), group.runs[0].value("calfat", "trainer", "loss")
        settings.append({"calfat.trainer": pick(trainer) + (f" + {pick(loss)}" if loss else ""), **found})
    keys = dict.fromkeys(key for values in settings for key in values)
    rows = ((key, [plain(values[key]) if key in values else NOTHING for values in settings]) for key in keys)
    return [(key, row) for key, row in rows if len(set(row)) > 1]


def reported_of(run: RunFiles) -> tuple[Mapping[str, float], str]:
    """What a paper reports for one run, by the recipe's ``calfat.reported``: (accuracies as fractions, source)."""
    section = dict(run.value("calfat", "reported") or {})
    source = str(section.pop("source", "") or "")
    return {label: float(value) / 100 for label, value in section.items()}, source


def _suite_cells(root: Path) -> dict[Path, Group]:
    """Resolved run directory to the cell of ``suite.json`` that it belongs to, without its runs; empty without one."""
    found: dict[Path, Group] = {}
    for cell in read_suite(root).cells:
        scores: Mapping[str, Mapping[str, Any]] = cell.get("scores", {})
        reported = {label: score["reported"] for label, score in scores.items() if score.get("reported") is not None}
        beyond = {label: score.get("beyond_tolerance") for label, score in scores.items()}
        tolerable = {label: not is_beyond for label, is_beyond in beyond.items() if is_beyond is not None}
        group = Group(str(cell["name"]), (), reported, str(cell.get("source") or ""), tolerable)
        places = (listed_run(root, Path(run["directory"])) for run in cell.get("runs", ()))
        found |= {place.resolve(): group for place in places if place is not None}
    return found
