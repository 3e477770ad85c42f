"""The typed suite. What a suite file says, checked for structure; recipes and plugins are looked up by ``plan``."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from calfat_plugin.options import option
from calfat_plugin.recipe.document import Document, KeyPath, dotted
from calfat_plugin.runs.directory import DEFAULT_ROOT

SUITES_ROOT = DEFAULT_ROOT / "suites"
_NOT_IN_NAMES = re.compile(r"[^a-z0-9.]+")


def slug(text: str) -> str:
    """``SVHN (r = 0.3)`` as a folder is called: ``svhn-r-0.3``. Empty when nothing is left."""
    return _NOT_IN_NAMES.sub("-", text.lower()).strip("-.")


@dataclass(frozen=True)
class SuiteOptions:
    """The plain keys of a suite file."""

    base: str = option(
        help="recipe that every cell starts from, relative to the suite file, or the name of a shipped one"
    )
    title: str = option("", help="one line above the table")
    runs: str | None = option(
        None,
        help="name of the suite whose run directories to share; its cells of the same names are not run twice; null: "
        "directories of its own",
    )
    seconds_per_round: float | None = option(
        None,
        low=0,
        open_low=True,
        help="what a round costs, the share of the evaluation included, for the estimate before a round was measured; "
        "null: no estimate then",
        unit="seconds of one process",
    )


@dataclass(frozen=True)
class Setting:
    """One recipe value that a suite changes.

    Attributes:
        path: where in the recipe.
        value: the raw YAML value.
        place: its place in the suite file, for messages.
    """

    path: KeyPath
    value: Any
    place: str

    @property
    def key(self) -> str:
        """``train_args.comm_round``."""
        return dotted(self.path)

    @property
    def override(self) -> str:
        """What ``calfat run --set`` takes to do the same."""
        written = yaml.safe_dump(self.value, default_flow_style=True, width=10**9, allow_unicode=True)
        return f"{self.key}={written.removesuffix('...' + chr(10)).strip()}"


#: The grid in the order of the table: name of an axis, such as ``method``, to label, such as ``FedPGD``, to settings.
Axes = Mapping[str, Mapping[str, tuple[Setting, ...]]]


@dataclass(frozen=True)
class Reported:
    """Published numbers of one cell.

    Attributes:
        source: where they are published, such as ``arXiv:2205.14926, Table 1``.
        accuracy: evaluator label to accuracy, a fraction in [0, 1].
    """

    source: str
    accuracy: Mapping[str, float]


@dataclass(frozen=True)
class Selector:
    """Picks cells: ``CIFAR-10/CalFAT``, ``*/CalFAT``, or a label of any axis: ``CalFAT``. Case does not matter."""

    text: str

    def matches(self, labels: tuple[str, ...]) -> bool:
        """Whether the cell with these labels, one an axis, is meant."""
        parts = [part.strip().lower() for part in self.text.split("/")]
        found = [label.lower() for label in labels]
        if len(parts) == 1:
            return any(fnmatch.fnmatchcase(label, parts[0]) for label in found)
        return len(parts) == len(found) and all(map(fnmatch.fnmatchcase, found, parts))


#: Key to the settings that are tried for it, in the order of the file.
Grid = Mapping[KeyPath, tuple[Setting, ...]]


@dataclass(frozen=True)
class Choose:
    """How a suite chooses values of each cell: the best of a grid on the validation split.

    Attributes:
        metric: labels of evaluators; the mean of their accuracies is compared.
        by: ``last``: the accuracy after the last round; ``best``: the best of all rounds.
        seeds: seeds of the choice runs.
        grid: what every cell tries.
        own: for the cells of a selector: further keys, or other values of a key of ``grid``.
        finalists: how many values of a cell, the best by the first seed, are tried with the other seeds; None: all.
        extend: for a key of a grid whose chosen value is an end of it: the factor to the next value that is tried.
        settings: what choice runs alone set, such as fewer rounds.
    """

    metric: tuple[str, ...]
    by: str
    seeds: tuple[int, ...]
    grid: Grid
    own: Mapping[Selector, Grid] = field(default_factory=dict)
    finalists: int | None = None
    extend: Mapping[KeyPath, float] = field(default_factory=dict)
    settings: tuple[Setting, ...] = ()

    def grid_of(self, labels: tuple[str, ...]) -> Grid:
        """What the cell with these labels tries."""
        found = dict(self.grid)
        for selector, grid in self.own.items():
            found |= grid if selector.matches(labels) else {}
        return found


@dataclass(frozen=True)
class Compare:
    """The section ``compare`` of a suite: which comparisons are planned."""

    row: str = option(help="label of the row that all other rows are compared with")
    metrics: tuple[str, ...] = option(help="metrics of the suite that are compared")
    robust: str = option("autoattack", help="the metric that 'level' is about")
    level: float | None = option(
        None, low=0, open_low=True, help="largest difference in 'robust' that counts as none", unit="points"
    )


@dataclass(frozen=True)
class Suite:
    """A suite file whose structure is right.

    Attributes:
        name: the file's stem; tables are written to ``runs/suites/<name>``.
        title: one line above the table.
        document: raw values with their places, for later errors.
        base: the base recipe, as a path from the working directory.
        base_document: its raw values, with the plugin files of the suite.
        settings: changes that all cells share.
        axes: the grid; a cell is one label of each.
        seeds: seeds of every cell.
        metrics: the columns: an evaluator's label in the final evaluation, the same with what the model serves worst
            (``pgd20:worst-class``), or a plugin's figure (``train/margin``, ``pgd20/ece``), to the column's heading.
        choose: how values of each cell are chosen before its runs; None: as the suite says.
        compare: the comparisons that are planned; None: none are.
        reported: cell name to published numbers.
        tolerance: evaluator label to the difference from the published number that passes unmarked, in points.
        skip: cells that are not run, with the reason that the table shows.
        runs: name of the suite whose run directories these are; usually ``name``.
        record: the file with a row for each finished run (``--record``); None: there is none.
        seconds_per_round: what a round costs one process, by the suite's author; None: not said.
    """

    name: str
    title: str
    document: Document
    base: Path
    base_document: Document
    settings: tuple[Setting, ...]
    axes: Axes
    seeds: tuple[int, ...]
    metrics: Mapping[str, str]
    choose: Choose | None = None
    compare: Compare | None = None
    reported: Mapping[str, Reported] = field(default_factory=dict)
    tolerance: Mapping[str, float] = field(default_factory=dict)
    skip: Mapping[Selector, str] = field(default_factory=dict)
    runs: str = ""
    record: Path | None = None
    seconds_per_round: float | None = None

    @property
    def directory(self) -> Path:
        """Where the tables go."""
        return SUITES_ROOT / self.name

    @property
    def runs_directory(self) -> Path:
        """Where the run directories are."""
        return SUITES_ROOT / self.runs
