"""Suite and registry become a plan before anything starts: every cell resolved, what is left to run, and its cost."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from calfat_plugin.errors import OptionError, RecipeError, listed
from calfat_plugin.experiment import Experiment
from calfat_plugin.host.runtimes import runtime_of
from calfat_plugin.options import describe_options
from calfat_plugin.recipe.document import Document, KeyPath, dotted
from calfat_plugin.recipe.plugin_files import PLUGINS
from calfat_plugin.registry import Registry
from calfat_plugin.results import BESIDE, FREQUENCY, WORST_CASE, evaluator_of
from calfat_plugin.rounds import number_of_rounds
from calfat_plugin.run_files import read_results
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites.cells import Cell, SuiteRun, in_cell, look_again, resolve
from calfat_plugin.suites.suite import Setting, Suite, matches, within
from calfat_plugin.suites.tuning import Tuning, choice_of

_REPORTED = "calfat.reported"


@dataclass(frozen=True)
class SuitePlan:
    """A suite with every cell checked."""

    suite: Suite
    overrides: tuple[str, ...]  # ``--set`` of the command line, applied to every cell after the suite's own settings
    seeds: tuple[int, ...]  # the suite's, or those of the command line
    cells: tuple[Cell, ...]  # all of them, in the order of the table
    runs: tuple[SuiteRun, ...]  # of cells whose values are chosen; the first seed of each before the second of any
    selected: frozenset[str]  # names of the cells to run now
    warnings: tuple[str, ...]  # findings that stop nothing, each once
    choices: Mapping[str, Tuning] = field(default_factory=dict)  # name of each cell that chooses values to its choice

    @property
    def left(self) -> tuple[SuiteRun, ...]:
        return tuple(run for run in self.runs if run.to_do and run.cell.name in self.selected)

    @property
    def choosing(self) -> SuitePlan:
        """The plan of the choice runs, which come first; each seed of all cells before the next one."""
        runs_of_seed: dict[int, list[SuiteRun]] = {}  # seeds in the order of the suite
        for choice in self.choices.values():
            for run in choice.runs:
                runs_of_seed.setdefault(run.seed, []).append(run)
        runs = itertools.chain.from_iterable(runs_of_seed.values())
        return dataclasses.replace(self, runs=tuple(runs), choices={})

    @property
    def num_runs(self) -> int:
        """Runs of the table, those included that wait until their values are chosen."""
        return len(self.runs) + len(self.waiting) * len(self.seeds)

    @property
    def num_waiting(self) -> int:
        """Runs of the selected cells that wait until their values are chosen."""
        return len(self.selected.intersection(self.waiting)) * len(self.seeds)

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
        problem = suite.problem_of(selector)
        if problem:
            raise OptionError(f"--only: {problem}")
    _refuse_hidden_axes(suite, overrides)
    choices: dict[str, Tuning] = {}
    cells = []
    for cell in list(_resolved_cells(suite, registry, overrides)):  # all are right before the first one is tuned
        if suite.choose is not None and cell.experiment is not None:
            choice = choice_of(suite, suite.choose, registry, cell, cell.experiment, overrides)
            choices[cell.name] = choice
            if choice.best is not None:
                settings = (*cell.settings, *choice.best.point)
                experiment = resolve(suite, registry, cell.name, settings, overrides)
                cell = dataclasses.replace(cell, settings=settings, experiment=experiment)
        cells.append(cell)
    if seeds is None:
        seeds = suite.seeds
    selected = set()
    warnings: list[str] = []
    for cell in cells:
        if not only or any(matches(selector, cell.labels) for selector in only):
            selected.add(cell.name)
        if cell.experiment is not None:
            warnings.extend(cell.experiment.warnings)
    return SuitePlan(
        suite=suite,
        overrides=tuple(overrides),
        seeds=tuple(seeds),
        cells=tuple(cells),
        runs=look_again(suite.record, *_runs_of_the_table(suite, cells, choices, seeds)),
        selected=frozenset(selected),
        warnings=tuple(dict.fromkeys(warnings)),
        choices=choices,
    )


def _runs_of_the_table(
    suite: Suite, cells: Iterable[Cell], choices: Mapping[str, Tuning], seeds: Iterable[int]
) -> Iterator[SuiteRun]:
    """The runs of all cells that have no values to choose, or have chosen them; the first seed of each comes first."""
    ready = [cell for cell in cells if cell.name not in choices or choices[cell.name].best is not None]
    for seed in seeds:
        for cell in ready:
            if cell.experiment is not None:
                folder = suite.runs_directory / cell.folder / f"seed-{seed}"
                yield SuiteRun(cell, cell.experiment, seed, folder)


def registry_of(suite: Suite, overrides: Iterable[str]) -> Registry:
    """The plugins that cells may name: installed ones, and the files of base recipe, suite and command line."""
    files = [text for text in overrides if text.strip().startswith(dotted(PLUGINS))]
    return Registry.for_recipe(suite.base_document.with_overrides(files))


def _refuse_hidden_axes(suite: Suite, overrides: Sequence[str]) -> None:
    """``--set`` comes last: on what an axis sets or a cell chooses, it would make all cells or tries alike."""
    Document("--set", {}).with_overrides(overrides)  # for its complaints
    keys = {text.partition("=")[0].strip() for text in overrides}
    settings: list[tuple[str, Setting]] = []
    for axis, labels in suite.axes.items():
        for label in labels:
            for setting in suite.settings_at("axes", axis, label):
                settings.append((f"set by the axis '{axis}' of", setting))
    for tried in suite.tried.values():
        settings.append(("chosen by", tried[0]))
    for how, setting in settings:
        if any(within(setting.key, key) for key in keys):
            raise OptionError(
                f"--set: '{setting.key}' is {how} {suite.document.file} "
                f"({setting.place}); select cells with --only, or change the suite file."
            )


def _resolved_cells(suite: Suite, registry: Registry, overrides: Sequence[str]) -> Iterator[Cell]:
    """Every cell of the grid, its recipe resolved and its columns checked.

    Two labels for one and the same run are a slip of the pen, and would count one result twice.
    """
    cell_of_recipe: dict[str, str] = {}
    for labels in suite.grid():
        name = "/".join(labels)
        settings = suite.settings_of(labels)
        settings += _reported(suite, name, settings)
        skipped = suite.why_skipped(labels)
        if skipped:
            yield Cell(labels, settings, None, skipped)
            continue
        experiment = resolve(suite, registry, name, settings, overrides)
        if runtime_of(experiment).is_cross_silo:
            raise RecipeError(
                f"{suite.document.file}: the cell '{name}' is a cross-silo run, whose parties are processes of their "
                "own, and a suite runs simulations: add --set common_args.training_type=simulation --set "
                "comm_args.backend=sp."
            )
        _check_metrics(suite, experiment, name)
        as_run = experiment.as_run()
        as_run["calfat"].pop("reported")  # changes no run
        recipe = json.dumps(as_run, sort_keys=True, default=str)
        other = cell_of_recipe.setdefault(recipe, name)
        if other != name:
            raise suite.document.error(
                ("axes",), f"the cells '{other}' and '{name}' are the same run: all their values are equal."
            )
        yield Cell(labels, settings, experiment)


def _reported(suite: Suite, name: str, settings: Iterable[Setting]) -> tuple[Setting, ...]:
    """The cell's published numbers as a recipe value, for the page of each of its runs; instead of the base recipe's,
    which are about another setting."""
    if any(within(setting.key, _REPORTED) for setting in settings):
        return ()
    published = suite.reported.percent.get(name)
    if published is None:
        if not suite.base_document.has(tuple(_REPORTED.split("."))):
            return ()
        return (Setting(_REPORTED, {}, suite.document.place(())),)
    value: dict[str, Any] = {"source": suite.reported.source_of(name)}
    for label, percent in published.percent.items():
        if evaluator_of(label) == label:
            value[label] = percent
    return (Setting(_REPORTED, value, suite.document.place(("reported", "percent", name))),)


def _check_metrics(suite: Suite, experiment: Experiment, name: str) -> None:
    """Refuse columns that the runs of the cell with that name do not measure."""

    def refuse(key: KeyPath, text: str) -> NoReturn:
        raise in_cell(suite.document.error(key, text), name, suite)

    accuracies = [pick.label for pick in experiment.evaluators]
    if experiment.evaluation.evidence_mb and sum(pick.name != "natural" for pick in experiment.evaluators) > 1:
        accuracies.append(WORST_CASE)
    measured = [*accuracies, *experiment.final_metrics]
    for label in suite.metrics:
        before, _, part = label.rpartition(":")  # of pgd20:worst-class
        evaluator = evaluator_of(label)
        is_published = any(label in cell.percent for cell in suite.reported.percent.values())
        if label in measured:
            if is_published and label not in accuracies:
                text = f"'{label}' is no accuracy; published numbers are accuracies in percent. Remove it here."
                refuse(("reported",), text)
        elif before in accuracies and part not in BESIDE:
            text = f"got '{label}'; after the evaluator '{before}' and a colon, expected {listed(BESIDE)}."
            refuse(("metrics",), text)
        elif part in FREQUENCY and not experiment.partition.entry.long_tailed:
            text = f"'{label}' is of a long tail, data_args.partition_method: longtail."
            refuse(("metrics",), f"{text} Remove it, or take that partition in every cell.")
        elif evaluator not in accuracies:
            text = f"'{evaluator}' is not among what is measured: {listed(measured)}. Every cell has to measure it: "
            refuse(("metrics",), f"{text}add it to calfat.evaluators, or remove it here.")
    if suite.compare is None:
        return
    for label in suite.compare.metrics:
        if label in measured and label not in accuracies:
            text = f"'{label}' is no accuracy, and only accuracies are compared."
            refuse(("compare", "metrics"), f"{text} Name the metric of an evaluator: {listed(accuracies)}.")


# --- what is left to do, and its cost ---------------------------------------------------------------------------------


def seconds_left(plan: SuitePlan) -> float | None:
    """Of the selected cells' runs that are left, in one process; None where nothing says what a round costs.

    A round costs what it did in the runs that finished here.
    """
    choosing = plan.choosing
    measured = []
    for run in (*choosing.runs, *plan.runs):
        if run.state == "finished" and run.recorded is None:
            results = read_results(RunDirectory(run.directory).results)
            if results is not None:
                rounds_done = results.rounds or run.experiment.num_rounds  # fewer where training stopped early
                measured.append(results.seconds / rounds_done)
    seconds_per_round = plan.suite.seconds_per_round
    if measured:
        seconds_per_round = sum(measured) / len(measured)
    if seconds_per_round is None:
        return None
    rounds = 0
    for run in (*choosing.left, *plan.left):
        rounds += run.experiment.num_rounds - number_of_rounds(RunDirectory(run.directory).rounds)
    for cell in plan.cells:
        if cell.experiment is not None and cell.name in plan.selected.intersection(plan.waiting):
            rounds += len(plan.seeds) * cell.experiment.num_rounds
    return seconds_per_round * rounds


# --- data -------------------------------------------------------------------------------------------------------------


def fetch(plan: SuitePlan) -> Iterator[str]:
    """Read every data set that the runs to do need, downloading what is missing and offered for download."""
    read = set()
    for run in (*plan.choosing.left, *plan.left):
        experiment = run.experiment
        pick = experiment.dataset
        key = (pick.name, experiment.data.data_cache_dir, repr(pick.options))
        if key in read:
            continue
        read.add(key)
        if any(info.name == "download" for info in describe_options(pick.entry.config)):
            pick = dataclasses.replace(pick, options=dataclasses.replace(pick.options, download=True))
        dataset = dataclasses.replace(experiment, dataset=pick).load_dataset()
        yield f"{pick.name}: {len(dataset.train)} training and {len(dataset.test)} test examples"
