"""What a suite file may say, as a pydantic model: types say structure and ranges, validators what spans several keys.

Recipes and plugins are looked up by ``plan``.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
import re
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from calfat_plugin.errors import did_you_mean, listed
from calfat_plugin.exact import parse_number
from calfat_plugin.options import Tag, describe
from calfat_plugin.recipe.document import KeyPath, dotted
from calfat_plugin.recipe.plugin_files import PLUGINS
from calfat_plugin.recipe.tagged_keys import keys_with

SEED_KEY = "common_args.random_seed"
MAX_SEED = 2**32 - 1
MOST_RUNS = 10_000  # of a suite; each is planned before the first one starts
MOST_TRIES = 100  # of a cell; a product of grids grows fast
_NOT_IN_NAMES = re.compile(r"[^a-z0-9.]+")


class AtError(ValueError):
    """What is wrong below the value that a validator was given; ``at``: the keys that lead there."""

    def __init__(self, at: KeyPath, text: str) -> None:
        super().__init__(text)
        self.at = at


def slug(text: str) -> str:
    """``SVHN (r = 0.3)`` as a folder is called: ``svhn-r-0.3``. Empty when nothing is left."""
    return _NOT_IN_NAMES.sub("-", text.lower()).strip("-.")


def within(key: str, above: str) -> bool:
    """Whether a dotted key is ``above`` itself or a part of its value."""
    return f"{key}.".startswith(f"{above}.")


def _overlap(first: str, second: str) -> bool:
    return within(first, second) or within(second, first)


def matches(selector: str, labels: tuple[str, ...]) -> bool:
    """Whether a selector picks the cell with these labels: ``CIFAR-10/CalFAT``, ``*/CalFAT``, or a label of any axis.

    Case does not matter.
    """
    patterns = [part.strip().lower() for part in selector.split("/")]
    in_lower_case = [label.lower() for label in labels]
    if len(patterns) == 1:
        return any(fnmatch.fnmatchcase(label, patterns[0]) for label in in_lower_case)
    return len(patterns) == len(labels) and all(map(fnmatch.fnmatchcase, in_lower_case, patterns))


def _checked_changes(changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        steps = key.split(".")
        if len(steps) < 2 or not all(steps):
            what = "this is not a SECTION.KEY of a recipe, such as train_args.comm_round or calfat.trainer."
            raise AtError((key,), what)
        if key == SEED_KEY:
            raise AtError((key,), "the suite's 'seeds' set the seeds; remove this key.")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            what = f"got {describe(value)}, which is not allowed in a recipe; quote it to make it a text."
            raise AtError((key,), what) from None
    for first, second in itertools.combinations(changes, 2):
        if _overlap(first, second):
            raise AtError((second,), f"this key overlaps with '{first}' in the same mapping; combine the two.")
    return changes


def _not_measured(changes: dict[str, Any]) -> dict[str, Any]:
    for key in changes:
        if any(_overlap(key, measured) for measured in keys_with(Tag.MEASURED)):
            raise AtError((key,), "this key changes what is measured; under 'set' it is the same in all runs.")
    return changes


def _different(values: tuple[Any, ...]) -> tuple[Any, ...]:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise AtError((index,), f"{value} is listed twice; keep one.")
    return values


def _checked_label(label: str) -> str:
    if not slug(label) or not label.isprintable() or set(label) & set("/*?[]"):
        wanted = "letters or digits and none of / * ? [ ]: it names a folder and is matched by --only"
        raise ValueError(f"got {describe(label)}, expected {wanted}.")
    return label


def _different_folders(labels: dict[str, Any]) -> dict[str, Any]:
    folders: dict[str, str] = {}
    for label in labels:
        other = folders.setdefault(slug(label), label)
        if other != label:
            raise AtError((label,), f"'{other}' has the same folder name, '{slug(label)}'; rename one.")
    return labels


def _with_headings(raw: Any) -> Any:
    if not isinstance(raw, list):
        return raw
    for index, label in enumerate(raw):
        if not isinstance(label, str):
            raise AtError((index,), f"got {describe(label)}, expected a text.")
    return dict(zip(_different(tuple(raw)), raw, strict=True))


def _averaged(raw: Any) -> tuple[str, ...]:
    labels: list[str] = []
    if isinstance(raw, str):
        mean = re.fullmatch(r"mean\((.*)\)", raw.strip())
        labels = [label.strip() for label in mean[1].split(",")] if mean else [raw.strip()]
    if not labels or not all(labels) or len(set(labels)) < len(labels):
        raise ValueError(f"got {describe(raw)}, expected an evaluator such as pgd20, or mean(natural, pgd20).")
    return tuple(labels)


OrEmpty = BeforeValidator(lambda raw: {} if raw is None else raw)  # a section may be left empty
Number = Annotated[float, BeforeValidator(lambda raw: float(parse_number(raw)))]  # 1e-3 is a text in YAML 1.1
Percent = Annotated[Number, Field(ge=0, le=100)]
Positive = Annotated[Number, Field(gt=0)]
Factor = Annotated[Number, Field(ge=1.1, le=100)]  # with two digits, a value times less may be itself
Seed = Annotated[int, Field(ge=0, le=MAX_SEED, strict=True)]
Seeds = Annotated[tuple[Seed, ...], Field(min_length=1), AfterValidator(_different)]
Evaluators = Annotated[tuple[str, ...], BeforeValidator(_averaged)]
Changes = Annotated[dict[str, Any], OrEmpty, AfterValidator(_checked_changes)]
Alone = Annotated[Changes, AfterValidator(_not_measured)]
Values = Annotated[list[Any], Field(min_length=1)]
Tried = Annotated[dict[str, Values], Field(min_length=1), AfterValidator(_checked_changes)]
Grid = Annotated[Tried, AfterValidator(_not_measured)]
Label = Annotated[str, AfterValidator(_checked_label)]
Axis = Annotated[dict[Label, Changes], Field(min_length=1), AfterValidator(_different_folders)]
Axes = Annotated[dict[Label, Axis], Field(min_length=1)]
Metrics = Annotated[dict[str, str], Field(min_length=1), BeforeValidator(_with_headings)]
Reason = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class Section(BaseModel):
    """A part of a suite file; its fields are its keys, and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Choose(Section):
    """How a suite chooses values of each cell: the best of a grid on the validation split."""

    metric: Evaluators = Field(description="an evaluator such as pgd20, or the mean of several: mean(natural, pgd20)")
    set: Alone = Field({}, description="what choice runs alone set")
    seeds: Seeds = Field(description="seeds of the choice runs, such as [100, 101]")
    grid: Grid = Field(description="what every cell tries, such as {train_args.learning_rate: [0.02, 0.05]}")
    extend: Annotated[dict[str, Factor], OrEmpty] = Field({}, description="key to the factor beyond a chosen end")

    @model_validator(mode="after")
    def _check(self) -> Choose:
        for key in self.extend:
            _check_known(("extend", key), key, self.grid, "no grid has this key.")
            for value in self.grid[key]:
                if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                    what = f"the grid tries {describe(value)}, and only numbers above 0 have a next one; remove either."
                    raise AtError(("extend", key), what)
        tries = math.prod(map(len, self.grid.values()))
        if tries > MOST_TRIES:
            raise AtError(
                (), f"each cell would make {tries} tries, at most {MOST_TRIES} are allowed; leave out values."
            )
        return self


class Compare(Section):
    """Which comparisons are planned."""

    row: str = Field(description="label of the row that all other rows are compared with")
    metrics: tuple[str, ...] = Field(description="metrics of the suite that are compared")
    robust: str = Field("autoattack", description="the metric that 'level' is about")
    level: Positive | None = Field(None, description="largest difference in 'robust', in points, that counts as none")


class Published(BaseModel):
    """Published numbers of one cell: metric to percent, and where they are published."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Percent] = Field(init=False)
    source: str | None = None

    @property
    def percent(self) -> dict[str, float]:
        return self.__pydantic_extra__


class Reported(Section):
    """Published numbers beside those of the suite."""

    source: str | None = Field(None, description="where they are published, such as arXiv:2205.14926, Table 1")
    percent: Annotated[dict[str, Published], OrEmpty] = Field({}, description="cell to what is published of it")
    tolerance: Annotated[dict[str, Percent], OrEmpty] = Field({}, description="metric to points that pass unmarked")

    def source_of(self, cell: str) -> str | None:
        """Where the numbers of a cell are published; None where it has none."""
        if cell not in self.percent:
            return None
        return self.percent[cell].source or self.source


class SuiteFile(Section):
    base: str = Field(description="recipe of every cell, relative to the suite file, or the name of a shipped one")
    title: str = Field("", description="one line above the table")
    runs: Label | None = Field(None, description="suite whose run directories to share; null: directories of its own")
    seconds_per_round: Positive | None = Field(None, description="what a round costs a process, until one was measured")
    set: Changes = Field({}, description="recipe values that change in all cells")
    axes: Axes = Field(description="axis to label to recipe values, such as {method: {CalFAT: {}}}")
    seeds: Seeds = Field(description="seeds of every cell, such as [0, 1, 2]")
    metrics: Metrics = Field(description="labels of evaluators such as [natural, pgd20], or a mapping to headings")
    choose: Choose | None = None
    compare: Compare | None = None
    reported: Annotated[Reported, OrEmpty] = Field({}, validate_default=True)
    skip: Annotated[dict[str, Reason], OrEmpty] = Field({}, description="selector of cells that are not run to why")

    def grid(self) -> list[tuple[str, ...]]:
        """The labels of every cell, the last axis running fastest."""
        return list(itertools.product(*self.axes.values()))

    def why_skipped(self, labels: tuple[str, ...]) -> str:
        """Why the cell with these labels is not run; empty where it is."""
        for selector, reason in self.skip.items():
            if matches(selector, labels):
                return reason
        return ""

    def problem_of(self, selector: str) -> str:
        """What is wrong with a selector that matches no cell; empty when it matches one."""
        if any(matches(selector, labels) for labels in self.grid()):
            return ""
        labels = self._labels()
        names = labels
        if "/" in selector:
            names = ["/".join(labels_of_cell) for labels_of_cell in self.grid()]
        hint = did_you_mean(selector, names)
        if not hint:
            hint = f" Cells are {'/'.join(self.axes)}, with the labels {listed(labels)}."
        return f"'{selector}' matches no cell.{hint}"

    def _labels(self) -> list[str]:
        return list(dict.fromkeys(itertools.chain(*self.axes.values())))

    @model_validator(mode="after")
    def _check_keys(self) -> SuiteFile:
        cells = math.prod(map(len, self.axes.values()))
        if cells * len(self.seeds) > MOST_RUNS:
            what = f"{cells} cells and {len(self.seeds)} seeds are {cells * len(self.seeds)} runs"
            raise AtError(("axes",), f"{what}; at most {MOST_RUNS} are allowed. Make several suites of it.")
        of_axes: list[tuple[KeyPath, str]] = []  # where a key is changed, and the key
        for axis, labels in self.axes.items():
            for label, changes in labels.items():
                of_axes += [(("axes", axis, label), key) for key in changes]
        # Later axes are applied later: one that replaces what an earlier one set would make its cells all alike.
        for (early, before), (late, after) in itertools.combinations(of_axes, 2):
            if early[1] != late[1] and within(before, after):
                what = f"replaces '{before}' of {dotted(early)}; put last the axis that sets only a part of it."
                raise AtError((*late, after), what)
        of_choose: list[tuple[KeyPath, str]] = []
        grid: list[tuple[KeyPath, str]] = []
        if self.choose is not None:
            of_choose = [(("choose", "set"), key) for key in self.choose.set]
            grid = [(("choose", "grid"), key) for key in self.choose.grid]
        for at, key in (*of_axes, *of_choose, *grid):
            if within(key, dotted(PLUGINS)):
                raise AtError((*at, key), "plugins are loaded once, for all cells; write this key under 'set'.")
        of_all_cells: list[tuple[KeyPath, str]] = [(("set",), key) for key in self.set]
        for at, key in (*of_axes, *of_choose, *of_all_cells):
            for at_grid, tried in grid:
                if within(key, tried):
                    what = f"'{key}' is given in '{dotted(at[:2])}', too; remove it in one of the two places."
                    raise AtError((*at_grid, tried), what)
        return self

    @model_validator(mode="after")
    def _check_names(self) -> SuiteFile:
        """Cells, rows and metrics that sections name must be there."""
        names = ["/".join(labels) for labels in self.grid()]
        no_metric = "'{}' is not among the suite's metrics."
        for name, published in self.reported.percent.items():
            at: KeyPath = ("reported", "percent", name)
            _check_known(at, name, names, f"there is no cell '{name}'.")
            if not self.reported.source_of(name):
                what = "these numbers have no source; write reported.source, such as 'arXiv:2205.14926, Table 1'."
                raise AtError(at, what)
            for metric in published.percent:
                _check_known((*at, metric), metric, self.metrics, no_metric.format(metric))
        for metric in self.reported.tolerance:
            _check_known(("reported", "tolerance", metric), metric, self.metrics, no_metric.format(metric))
        for (label, one), (other, two) in itertools.combinations(self.metrics.items(), 2):
            if one == two:
                what = f"the heading '{one}' stands over '{label}' already; give each metric one of its own."
                raise AtError(("metrics", other), what)
        if self.compare is not None:
            self._check_compare(self.compare)
        for selector in self.skip:
            problem = self.problem_of(selector)
            if problem:
                raise AtError(("skip", selector), problem)
        return self

    def _check_compare(self, compare: Compare) -> None:
        """The row and the metrics of planned comparisons must be there, once."""
        _check_known(("compare", "row"), compare.row, self._labels(), f"no row has the label '{compare.row}'.")
        axes = [axis for axis, labels in self.axes.items() if compare.row in labels]
        if len(axes) > 1:
            what = f"'{compare.row}' is a label of the axes {' and '.join(axes)}; rename it in one of them."
            raise AtError(("compare", "row"), what)
        for metric in compare.metrics:
            what = f"'{metric}' is not among the suite's metrics."
            _check_known(("compare", "metrics"), metric, self.metrics, what)
            if compare.metrics.count(metric) > 1:
                raise AtError(("compare", "metrics"), f"the metric '{metric}' is listed twice; keep one.")
        if compare.level is not None and compare.robust not in compare.metrics:
            raise AtError(("compare", "level"), f"'{compare.robust}' is not compared; add it to compare.metrics.")


def _check_known(at: KeyPath, name: str, known: Collection[str], complaint: str) -> None:
    if name not in known:
        hint = did_you_mean(name, known) or f" Known: {listed(known)}."
        raise AtError(at, f"{complaint}{hint}")
