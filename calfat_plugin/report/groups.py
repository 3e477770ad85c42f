"""Runs that differ in their seed only belong together; groups get the shortest names that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calfat_plugin.disk import read_json
from calfat_plugin.experiment.compare import flat
from calfat_plugin.maths.metrics import MeanStd, mean_std
from calfat_plugin.report.numbers import NOTHING
from calfat_plugin.report.reading import SUITE, RunFiles, listed_run
from calfat_plugin.report.words import aggregator, method, pick, plain

_SEED = ("common_args.random_seed",)
_NOT_THE_PROBLEM = ("calfat.loggers", "calfat.reported.", "calfat.runtime.", "device_args.", "tracking_args.")


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

    def score(self, label: str) -> MeanStd | None:
        """Mean and sample standard deviation over seeds of the final accuracy; None where nothing is finished."""
        values = [value for value in (run.accuracy(label) for run in self.runs) if value is not None]
        return mean_std(values) if values else None

    @property
    def problem(self) -> str:
        """What must agree before accuracies compare: data, partition, model, clients and threat."""
        first = self.runs[0]
        keys = ("data_args", "model_args")
        calfat = [first.value("calfat", key) for key in ("threat", "partition", "dataset", "model")]
        return repr(([first.value(key) for key in keys], first.value("train_args", "client_num_in_total"), calfat))

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
    cells = _suite_cells(root)
    order = list(dict.fromkeys(cell.name for cell in cells.values()))
    together: dict[str, dict[int, RunFiles]] = {}
    for run in runs:
        cell = cells.get(run.path.resolve())
        key = f"cell {order.index(cell.name)}" if cell else repr(sorted(_settings(run).items()))
        seeds = together.setdefault(key, {})
        if run.seed not in seeds or run.finished or not seeds[run.seed].finished:
            seeds[run.seed] = run
    members = [tuple(found[seed] for seed in sorted(found)) for found in together.values()]
    names = _names([group[0] for group in members])
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
        found = {key: value for key, value in _settings(group.runs[0]).items() if not key.startswith("calfat.trainer.")}
        trainer, loss = group.runs[0].value("calfat", "trainer"), group.runs[0].value("calfat", "trainer", "loss")
        settings.append({"calfat.trainer": pick(trainer) + (f" + {pick(loss)}" if loss else ""), **found})
    keys = dict.fromkeys(key for values in settings for key in values)
    rows = ((key, [plain(values[key]) if key in values else NOTHING for values in settings]) for key in keys)
    return [(key, row) for key, row in rows if len(set(row)) > 1]


def _settings(run: RunFiles) -> dict[str, Any]:
    return {key: value for key, value in flat(run.recipe).items() if not key.startswith((*_SEED, *_NOT_THE_PROBLEM))}


def reported_of(run: RunFiles) -> tuple[Mapping[str, float], str]:
    """What a paper reports for one run, by the recipe's ``calfat.reported``: (accuracies as fractions, source)."""
    section = dict(run.value("calfat", "reported") or {})
    source = str(section.pop("source", "") or "")
    return {label: float(value) / 100 for label, value in section.items()}, source


# --- names ------------------------------------------------------------------------------------------------------------


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """The facets in which the runs differ, as many as it takes until no two names are equal."""
    facets: list[Callable[[RunFiles], str]] = [
        method,
        aggregator,
        lambda run: plain(run.value("data_args", "dataset")),
        lambda run: plain(run.value("data_args", "partition_method")),
        lambda run: f"β {plain(run.value('data_args', 'partition_alpha'))}",
        lambda run: f"{run.value('train_args', 'client_num_in_total')} clients",
        lambda run: plain(run.value("model_args", "model")),
        lambda run: f"{run.num_rounds} rounds",
        lambda run: f"ε {plain(run.value('calfat', 'threat', 'eps'))}",
    ]
    facets = [facet for facet in facets if len({facet(run) for run in runs}) > 1]
    if method not in facets:
        facets.insert(0, method)
    names = [" · ".join(facet(run) for facet in facets) for run in runs]
    settings = [_settings(run) for run in runs]
    for key in dict.fromkeys(key for values in settings for key in values):
        for same in {name for name in names if names.count(name) > 1}:
            members = [index for index, name in enumerate(names) if name == same]
            written = [plain(settings[index].get(key)) for index in members]
            if len(set(written)) > 1:
                for index, value in zip(members, written, strict=True):
                    names[index] += f" · {key.rpartition('.')[2].replace('_', ' ')} {value}"
    return [name if names.count(name) == 1 else f"{name} · {run.path}" for name, run in zip(names, runs, strict=True)]


def _suite_cells(root: Path | None) -> dict[Path, Group]:
    """Resolved run directory to the cell of ``suite.json`` that it belongs to, without its runs; empty without one."""
    found: dict[Path, Group] = {}
    if root is None:
        return found
    for cell in read_json(root / SUITE).get("cells", ()):
        scores: Mapping[str, Mapping[str, Any]] = cell.get("scores", {})
        reported = {label: score["reported"] for label, score in scores.items() if score.get("reported") is not None}
        beyond = {label: score.get("beyond_tolerance") for label, score in scores.items()}
        tolerable = {label: not is_beyond for label, is_beyond in beyond.items() if is_beyond is not None}
        group = Group(str(cell["name"]), (), reported, str(cell.get("source") or ""), tolerable)
        places = (listed_run(root, Path(run["directory"])) for run in cell.get("runs", ()))
        found |= {place.resolve(): group for place in places if place is not None}
    return found
