"""Suite and registry become a plan: every cell resolved, and known what is left to run and what that will cost, before
anything starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from calfat_plugin.errors import OptionError, listed
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.runtimes import runtime_of
from calfat_plugin.options import describe_options
from calfat_plugin.recipe.document import Document, dotted
from calfat_plugin.recipe.plugin_files import PLUGINS
from calfat_plugin.registry import Registry
from calfat_plugin.report.reading import read_results
from calfat_plugin.results import BESIDE, evaluator_of
from calfat_plugin.rounds_csv import read_rounds
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites.cells import Cell, PlannedRun, in_cell, look_again, resolve
from calfat_plugin.suites.parse import Setting, Suite
from calfat_plugin.suites.schema import matches, within
from calfat_plugin.suites.tuning import Tuning, choice_of

_REPORTED = "calfat.reported"


@dataclass(frozen=True)
class SuitePlan:
    """A suite with every cell checked."""

    suite: Suite
    overrides: tuple[str, ...]  # ``--set`` of the command line, applied to every cell after the suite's own settings
    seeds: tuple[int, ...]  # the suite's, or those of the command line
    cells: tuple[Cell, ...]  # all of them, in the order of the table
    runs: tuple[PlannedRun, ...]  # of cells whose values are chosen; the first seed of each before the second of any
    selected: frozenset[str]  # names of the cells to run now
    warnings: tuple[str, ...]  # findings that stop nothing, each once
    choices: Mapping[str, Tuning] = field(default_factory=dict)  # name of each cell that chooses values to its choice

    @property
    def left(self) -> tuple[PlannedRun, ...]:
        """What is to run now."""
        return tuple(run for run in self.runs if run.to_do and run.cell.name in self.selected)

    @property
    def choosing(self) -> SuitePlan:
        """The plan of the choice runs, which come first; each seed of all cells before the next one."""
        runs = [run for choice in self.choices.values() for run in choice.runs]
        order = {seed: number for number, seed in enumerate(dict.fromkeys(run.seed for run in runs))}
        return dataclasses.replace(self, runs=tuple(sorted(runs, key=lambda run: order[run.seed])), choices={})

    @property
    def num_runs(self) -> int:
        """Runs of the table, those included that wait until their values are chosen."""
        return len(self.runs) + len(self.waiting) * len(self.seeds)

    @property
    def num_waiting(self) -> int:
        """Runs of the selected cells that wait until their values are chosen."""
        return len(self.selected.intersection(self.waiting)) * len(self.seeds)

    @property
    def num_finals(self) -> int:
        """Choice runs of the selected cells that wait until it is known whose they are."""
        return sum(choice.finals for name, choice in self.choices.items() if name in self.selected)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of the cells whose runs wait until their values are chosen."""
        return tuple(name for name, choice in self.choices.items() if choice.open)


def make_plan(
    suite: Suite,
    registry: Registry,
    *,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
) -> SuitePlan:
    """Resolve every cell and look at the run directories."""
    for selector in only:
        if problem := suite.problem_of(selector):
            raise OptionError(f"--only: {problem}")
    _refuse_hidden_axes(suite, overrides)
    cells = list(_cells(suite, registry, overrides))
    _refuse_twins(suite, cells)
    choices = {
        cell.name: choice_of(suite, suite.choose, registry, cell, cell.experiment, overrides)
        for cell in cells
        if suite.choose is not None and cell.experiment is not None
    }
    cells = [_with_chosen(suite, registry, cell, choices.get(cell.name), overrides) for cell in cells]
    chosen_seeds = suite.seeds if seeds is None else tuple(seeds)
    ready = [cell for cell in cells if cell.name not in choices or choices[cell.name].best is not None]
    runs = [
        PlannedRun(cell, cell.experiment, seed, suite.runs_directory / cell.folder / f"seed-{seed}", "new")
        for seed in chosen_seeds
        for cell in ready
        if cell.experiment is not None
    ]
    selected = [cell.name for cell in cells if not only or any(matches(each, cell.labels) for each in only)]
    experiments = [cell.experiment for cell in cells if cell.experiment is not None]
    return SuitePlan(
        suite=suite,
        overrides=tuple(overrides),
        seeds=chosen_seeds,
        cells=tuple(cells),
        runs=look_again(suite.record, *runs),
        selected=frozenset(selected),
        warnings=tuple(dict.fromkeys(text for experiment in experiments for text in experiment.warnings)),
        choices=choices,
    )


def registry_of(suite: Suite, overrides: Iterable[str]) -> Registry:
    """The plugins that cells may name: installed ones, and the files of base recipe, suite and command line."""
    files = [text for text in overrides if text.strip().startswith(dotted(PLUGINS))]
    return Registry.for_recipe(suite.base_document.with_overrides(files))


def _with_chosen(suite: Suite, registry: Registry, cell: Cell, choice: Tuning | None, overrides: Sequence[str]) -> Cell:
    """The cell with its chosen values; as it was where nothing is chosen, or not yet."""
    if choice is None or choice.best is None:
        return cell
    settings = (*cell.settings, *choice.best.point)
    return dataclasses.replace(
        cell, settings=settings, experiment=resolve(suite, registry, cell.name, settings, overrides)
    )


def _refuse_hidden_axes(suite: Suite, overrides: Sequence[str]) -> None:
    """``--set`` comes last: on what an axis sets or a cell chooses, it would make all cells or tries alike."""
    Document("--set", {}).with_overrides(overrides)  # for its complaints
    written = {text.partition("=")[0].strip() for text in overrides}
    settings = [
        (f"set by the axis '{axis}' of", each)
        for axis, labels in suite.axes.items()
        for label in labels
        for each in suite.settings_at("axes", axis, label)
    ]
    settings += [("chosen by", tried[0]) for tried in suite.tried.values()]
    for how, setting in settings:
        if any(within(setting.key, key) for key in written):
            raise OptionError(
                f"--set: '{setting.key}' is {how} {suite.document.file} "
                f"({setting.place}); select cells with --only, or change the suite file."
            )


def _cells(suite: Suite, registry: Registry, overrides: Sequence[str]) -> Iterator[Cell]:
    for labels in suite.grid():
        settings = suite.settings_of(labels)
        settings += _reported(suite, "/".join(labels), settings)
        reason = next((reason for selector, reason in suite.skip.items() if matches(selector, labels)), "")
        experiment = None
        if not reason:
            experiment = resolve(suite, registry, "/".join(labels), settings, overrides)
            _check_metrics(suite, experiment, "/".join(labels))
        yield Cell(labels, settings, experiment, reason)


def _reported(suite: Suite, name: str, settings: Iterable[Setting]) -> tuple[Setting, ...]:
    """The cell's published numbers as a recipe value, for the page of each of its runs; instead of the base recipe's,
    which are about another setting."""
    if any(within(setting.key, _REPORTED) for setting in settings):
        return ()
    published = suite.reported.percent.get(name)
    if published is None:
        place = suite.document.place(())
        return (Setting(_REPORTED, {}, place),) if suite.base_document.has(tuple(_REPORTED.split("."))) else ()
    percent = {label: number for label, number in published.percent.items() if evaluator_of(label) == label}
    place = suite.document.place(("reported", "percent", name))
    return (Setting(_REPORTED, {"source": suite.reported.source_of(name), **percent}, place),)


def _check_metrics(suite: Suite, experiment: Experiment, name: str) -> None:
    """Whether the runs of the cell with that name measure the suite's columns."""
    accuracies = [pick.label for pick in experiment.evaluators]
    measured = [*accuracies, *experiment.final_metrics]
    published = {label for cell in suite.reported.percent.values() for label in cell.percent}
    for label in suite.metrics:
        if label in published and label in measured and label not in accuracies:
            what = f"'{label}' is no accuracy; published numbers are accuracies in percent. Remove it here."
            raise in_cell(suite.document.error(("reported",), what), name, suite)
        if label not in measured and (problem := _problem_of_metric(label, experiment, accuracies, measured)):
            raise in_cell(suite.document.error(("metrics",), problem), name, suite)
    for label in suite.compare.metrics if suite.compare is not None else ():
        if label in measured and label not in accuracies:
            what = f"'{label}' is no accuracy, which is wanted here."
            what += f" Name the metric of an evaluator: {listed(accuracies)}."
            raise in_cell(suite.document.error(("compare", "metrics"), what), name, suite)


def _problem_of_metric(metric: str, experiment: Experiment, accuracies: Sequence[str], measured: Sequence[str]) -> str:
    """Why the runs of a cell do not have a metric, in words; empty where they have it."""
    evaluator, _, worst = metric.rpartition(":")
    if evaluator in accuracies and worst not in BESIDE:
        return f"got '{metric}'; after the evaluator '{evaluator}' and a colon, expected {listed(BESIDE)}."
    if worst == "worst-clients" and runtime_of(experiment).is_cross_silo:
        return (
            f"'{metric}' needs the labels of each client's examples, and across silos the server does not know them. "
            f"Remove it, or run the suite as a simulation."
        )
    evaluator = evaluator_of(metric)
    if evaluator not in accuracies:
        return f"'{evaluator}' is not among the evaluators of the run: {listed(measured)}. Add it to calfat.evaluators."
    return ""


def _refuse_twins(suite: Suite, cells: Iterable[Cell]) -> None:
    """Two labels for one and the same run are a slip of the pen, and would count one result twice."""
    seen: dict[str, str] = {}
    for cell in cells:
        if cell.experiment is not None:
            written = cell.experiment.as_run()
            written["calfat"].pop("reported")  # changes no run
            key = json.dumps(written, sort_keys=True, default=str)
            other = seen.setdefault(key, cell.name)
            if other != cell.name:
                raise suite.document.error(
                    ("axes",), f"the cells '{other}' and '{cell.name}' are the same run: all their values are equal."
                )


# --- what is left will cost -------------------------------------------------------------------------------------------


def seconds_left(plan: SuitePlan) -> float | None:
    """What the selected cells' runs that are left will take one process, the choice runs included.

    Rounds are as dear as those of runs of the same cell, tried or chosen values alike; else as those of the suite.
    """
    choosing = plan.choosing
    per_round = _rates((*choosing.runs, *plan.runs), plan.suite.seconds_per_round)
    left = [(run.cell.name, run.cell.tried != "", _rounds_left(run)) for run in (*choosing.left, *plan.left)]
    for cell in plan.cells:
        if cell.experiment is not None and cell.name in plan.waiting and cell.name in plan.selected:
            left.append((cell.name, False, len(plan.seeds) * cell.experiment.num_rounds))
            left.append((cell.name, True, plan.choices[cell.name].finals * cell.experiment.num_rounds))
    costs = [(per_round(cell, choosing), rounds) for cell, choosing, rounds in left]
    known = [cost * rounds for cost, rounds in costs if cost is not None]
    return sum(known) if len(known) == len(costs) else None


def _rates(runs: Sequence[PlannedRun], figure: float | None) -> Callable[[str, bool], float | None]:
    """Seconds of a round by the cell's name and whether it is of a choice run, which skips the final evaluation."""
    known = [(run.cell.name, run.cell.tried != "", rate) for run in runs if (rate := _rate(run)) is not None]

    def per_round(cell: str, choosing: bool) -> float | None:
        alike = [(name, rate) for name, kind, rate in known if kind == choosing]
        own = [rate for name, rate in alike if name == cell]
        rates = own or [rate for _, rate in alike] or [rate for *_, rate in known]
        return sum(rates) / len(rates) if rates else figure

    return per_round


def _rate(run: PlannedRun) -> float | None:
    """Seconds of a round of this run, with its share of the final evaluation where that is done."""
    directory = RunDirectory(run.directory)
    if run.recorded is not None:
        return None  # of another machine
    if run.state == "finished":
        return float(read_results(directory.results).get("seconds") or 0) / run.experiment.num_rounds
    rows = read_rounds(directory.rounds)
    return sum(float(row["seconds"]) for row in rows) / len(rows) if rows else None


def _rounds_left(run: PlannedRun) -> int:
    done = len(read_rounds(RunDirectory(run.directory).rounds)) if run.state == "unfinished" else 0
    return max(0, run.experiment.num_rounds - done)


# --- data -------------------------------------------------------------------------------------------------------------


def fetch(plan: SuitePlan) -> Iterator[str]:
    """Read every data set that the runs to do need, downloading what is missing and offered for download."""
    done = set()
    for run in (*plan.choosing.left, *plan.left):
        experiment, pick = run.experiment, run.experiment.dataset
        key = (pick.name, experiment.data.data_cache_dir, repr(pick.options))
        if key in done:
            continue
        done.add(key)
        if any(info.name == "download" for info in describe_options(pick.entry.config)):
            pick = dataclasses.replace(pick, options=dataclasses.replace(pick.options, download=True))
        dataset = dataclasses.replace(experiment, dataset=pick).load_dataset()
        yield f"{pick.name}: {len(dataset.train)} training and {len(dataset.test)} test examples"
