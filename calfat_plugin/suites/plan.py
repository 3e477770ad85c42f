"""Suite and registry become a plan: every cell resolved, and what is left to run known, before anything starts."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from calfat_plugin.errors import CalfatError, OptionError, RecipeError, RunError, listed
from calfat_plugin.experiment import Experiment, assemble, changes, same_but_rounds
from calfat_plugin.host.runtimes import supported_runtime
from calfat_plugin.recipe.document import Document, KeyPath, read_document
from calfat_plugin.registry import Registry
from calfat_plugin.runs.compute import settled
from calfat_plugin.runs.directory import DEFAULT_ROOT, RunDirectory
from calfat_plugin.suites.parse import SEED_PATH, check_selector, grid
from calfat_plugin.suites.schema import Selector, Setting, Suite, slug

SUITES_ROOT = DEFAULT_ROOT / "suites"
REPORTED_PATH: KeyPath = ("calfat", "reported")
_SHOWN = 3  # changed runs that a message names
_DECIMALS = 9  # 0.6469 * 100 is 64.69000000000001

State = Literal["new", "unfinished", "finished"]


@dataclass(frozen=True)
class Cell:
    """One place of the grid.

    Attributes:
        labels: one an axis.
        settings: what it changes in the base recipe, in order: the suite's, then each axis's, then published numbers.
        experiment: the recipe resolved; None for a skipped cell.
        skipped: why it is not run; empty when it is.
    """

    labels: tuple[str, ...]
    settings: tuple[Setting, ...]
    experiment: Experiment | None
    skipped: str = ""

    @property
    def name(self) -> str:
        """``CIFAR-10/CalFAT``."""
        return "/".join(self.labels)

    @property
    def folder(self) -> str:
        """``cifar-10_calfat``."""
        return "_".join(map(slug, self.labels))


@dataclass(frozen=True)
class PlannedRun:
    """One cell with one seed.

    Attributes:
        experiment: the cell's recipe resolved.
        state: ``finished``: its results are there; ``unfinished``: a run directory to resume; else ``new``.
    """

    cell: Cell
    experiment: Experiment
    seed: int
    directory: Path
    state: State

    @property
    def name(self) -> str:
        """``CIFAR-10/CalFAT seed 0``."""
        return f"{self.cell.name} seed {self.seed}"

    @property
    def output(self) -> Path:
        """Where what the command printed is kept."""
        return self.directory.with_name(f"{self.directory.name}.txt")


@dataclass(frozen=True)
class Plan:
    """A suite with every cell checked.

    Attributes:
        overrides: ``--set`` of the command line, applied to every cell after the suite's own settings.
        seeds: the suite's, or those of the command line.
        cells: all of them, in the order of the table.
        runs: of all cells that are not skipped; the first seed of each before the second of any.
        chosen: names of the cells to run now.
        warnings: findings that stop nothing, each once.
    """

    suite: Suite
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    runs: tuple[PlannedRun, ...]
    chosen: frozenset[str]
    warnings: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """Where the tables go."""
        return SUITES_ROOT / self.suite.name

    @property
    def runs_directory(self) -> Path:
        """Where the run directories are."""
        return SUITES_ROOT / self.suite.runs

    @property
    def left(self) -> tuple[PlannedRun, ...]:
        """What is to run now."""
        return tuple(run for run in self.runs if run.state != "finished" and run.cell.name in self.chosen)


def make_plan(
    suite: Suite,
    registry: Registry,
    *,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
) -> Plan:
    """Resolve every cell and look at the run directories.

    Args:
        suite: what to run.
        registry: the plugins.
        overrides: ``SECTION.KEY=VALUE`` texts for every cell.
        only: selectors of the cells to run; none: all.
        seeds: instead of the suite's.

    Raises:
        RecipeError, PluginError: a cell that cannot be; with file, line, key and the cell's name.
        OptionError: a selector that matches no cell.
        RunError: a run directory that another recipe was run in.
    """
    selectors = _selectors(suite, only)
    _refuse_hidden_axes(suite, overrides)
    cells = tuple(_cells(suite, registry, overrides))
    _refuse_twins(suite, cells)
    chosen_seeds = suite.seeds if seeds is None else tuple(seeds)
    to_run = [(cell, cell.experiment) for cell in cells if cell.experiment is not None]
    runs = [
        PlannedRun(cell, experiment, seed, SUITES_ROOT / suite.runs / cell.folder / f"seed-{seed}", "new")
        for seed in chosen_seeds
        for cell, experiment in to_run
    ]
    chosen = [cell.name for cell in cells if not selectors or any(each.matches(cell.labels) for each in selectors)]
    return Plan(
        suite=suite,
        overrides=tuple(overrides),
        seeds=chosen_seeds,
        cells=cells,
        runs=look_again(*runs),
        chosen=frozenset(chosen),
        warnings=tuple(dict.fromkeys(text for _, experiment in to_run for text in experiment.recipe.warnings)),
    )


def look_again(*runs: PlannedRun) -> tuple[PlannedRun, ...]:
    """The runs with their states as they are now: another process may have changed them since the plan was made.

    Raises:
        RunError: another recipe was run in a directory of theirs.
    """
    states = [_state(RunDirectory(run.directory), run.experiment, run.seed) for run in runs]
    changed = [f"{run.directory}: {change}" for run, (_, change) in zip(runs, states, strict=True) if change]
    if changed:
        more = f"\n  and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        raise RunError(
            "these runs were started with a recipe that differs from the suite's current one:\n  "
            + "\n  ".join(changed[:_SHOWN])
            + more
            + "\nUndo the change, or move these directories away to run the cells again."
        )
    return tuple(dataclasses.replace(run, state=state) for run, (state, _) in zip(runs, states, strict=True))


def _selectors(suite: Suite, only: Iterable[str]) -> list[Selector]:
    selectors = [Selector(text) for text in only]
    for selector in selectors:
        if problem := check_selector(selector, suite.axes):
            raise OptionError(f"--only: {problem}")
    return selectors


def _refuse_hidden_axes(suite: Suite, overrides: Sequence[str]) -> None:
    """``--set`` comes last: on what an axis sets, it would make the axis's cells all alike."""
    Document("--set", {}).with_overrides(overrides)  # for its complaints
    written = {tuple(text.partition("=")[0].strip().split(".")) for text in overrides}
    settings = ((axis, each) for axis in suite.axes for changes in suite.axes[axis].values() for each in changes)
    for axis, setting in settings:
        if any(setting.path[:length] in written for length in range(1, len(setting.path) + 1)):
            raise OptionError(
                f"--set: '{setting.key}' is set by the axis '{axis}' of {suite.document.file} "
                f"({setting.place}); select cells with --only, or change the suite file."
            )


def _cells(suite: Suite, registry: Registry, overrides: Sequence[str]) -> Iterator[Cell]:
    for labels in grid(suite.axes):
        changes = (suite.axes[axis][label] for axis, label in zip(suite.axes, labels, strict=True))
        settings = (*suite.settings, *itertools.chain.from_iterable(changes))
        settings += _reported(suite, "/".join(labels), settings)
        reason = next((reason for selector, reason in suite.skip.items() if selector.matches(labels)), "")
        experiment = None
        if not reason:
            try:
                experiment = _resolve(suite, registry, settings, overrides)
            except CalfatError as error:
                raise RecipeError(f"{error} (In cell '{'/'.join(labels)}' of {suite.document.file}.)") from None
        yield Cell(labels, settings, experiment, reason)


def _reported(suite: Suite, name: str, settings: Iterable[Setting]) -> tuple[Setting, ...]:
    """The cell's published numbers as a recipe value, for the page of each of its runs; instead of the base recipe's,
    which are about another setting."""
    if any(setting.path[: len(REPORTED_PATH)] == REPORTED_PATH for setting in settings):
        return ()
    published = suite.reported.get(name)
    if published is None:
        place = suite.document.place(())
        return (Setting(REPORTED_PATH, {}, place),) if suite.base_document.has(REPORTED_PATH) else ()
    percent = {label: round(100 * accuracy, _DECIMALS) for label, accuracy in published.accuracy.items()}
    place = suite.document.place(("reported", "percent", name))
    return (Setting(REPORTED_PATH, {"source": published.source, **percent}, place),)


def _resolve(suite: Suite, registry: Registry, settings: Iterable[Setting], overrides: Sequence[str]) -> Experiment:
    document = suite.base_document
    for setting in settings:
        document = document.with_value(setting.path, setting.value, setting.place)
    experiment = assemble(document.with_overrides(overrides), registry)
    supported_runtime(experiment)
    accuracies = [pick.label for pick in experiment.evaluators]
    measured = [*accuracies, *experiment.final_metrics]
    published = {label for cell in suite.reported.values() for label in cell.accuracy}
    for label in suite.metrics:
        if label in published and label in measured and label not in accuracies:
            raise suite.document.error(
                ("reported",), f"'{label}' is no accuracy; published numbers are accuracies in percent. Remove it here."
            )
        if label not in measured:
            raise suite.document.error(
                ("metrics",),
                f"'{label}' is not among the evaluators of the run: {listed(measured)}. Add it to calfat.evaluators.",
            )
    return experiment


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


def _state(directory: RunDirectory, experiment: Experiment, seed: int) -> tuple[State, str]:
    """(state, what has changed since the run was started)."""
    if not directory.recipe.exists():
        return "new", ""
    try:
        then = assemble(read_document(directory.recipe), experiment.registry).as_run()
    except CalfatError as error:
        return "unfinished", f"its recipe can no longer be read: {error}"
    now = settled(experiment).as_run()
    section, key = SEED_PATH
    now[str(section)][key] = seed
    keys = same_but_rounds(then, now)
    asked, done = (recipe["train_args"]["comm_round"] for recipe in (now, then))
    if asked < done:
        keys = [*dict.fromkeys((*keys, "train_args.comm_round"))]
    if keys:
        return "unfinished", changes(then, now, keys, "then")
    return ("finished" if directory.finished and asked == done else "unfinished"), ""
