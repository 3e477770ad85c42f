"""A suite file: what it may say, as a pydantic model, and how it becomes a :class:`Suite`.

Types say structure and ranges, validators what spans several keys. Recipes and plugins are looked up by ``plan``.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from calfat_plugin.errors import RecipeError, did_you_mean, listed
from calfat_plugin.exact import parse_number
from calfat_plugin.options import Tag, describe
from calfat_plugin.recipe.document import SUITE, Document, KeyPath, dotted, read_document
from calfat_plugin.recipe.plugin_files import PLUGINS, with_plugins
from calfat_plugin.recipe.tagged_keys import keys_with
from calfat_plugin.runs.directory import DEFAULT_ROOT
from calfat_plugin.shipped import shipped_files

SUITES_ROOT = DEFAULT_ROOT / "suites"
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
            raise AtError(
                (key,), "this is not a SECTION.KEY of a recipe, such as train_args.comm_round or calfat.trainer."
            )
        if key == SEED_KEY:
            raise AtError((key,), "the suite's 'seeds' set the seeds; remove this key.")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            text = f"got {describe(value)}, which is not allowed in a recipe; quote it to make it a text."
            raise AtError((key,), text) from None
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
        raise ValueError(
            f"got {describe(label)}, expected letters or digits and none of / * ? [ ]: it names a folder and is "
            "matched by --only."
        )
    return label


OrEmpty = BeforeValidator(lambda raw: {} if raw is None else raw)  # a section may be left empty
Number = Annotated[float, BeforeValidator(lambda raw: float(parse_number(raw)))]  # 1e-3 is a text in YAML 1.1
Percent = Annotated[Number, Field(ge=0, le=100)]
Positive = Annotated[Number, Field(gt=0)]
Factor = Annotated[Number, Field(ge=1.1, le=100)]  # with two digits, a value times less may be itself
Seed = Annotated[int, Field(ge=0, le=MAX_SEED, strict=True)]
Seeds = Annotated[tuple[Seed, ...], Field(min_length=1), AfterValidator(_different)]

Changes = Annotated[dict[str, Any], OrEmpty, AfterValidator(_checked_changes)]
Alone = Annotated[Changes, AfterValidator(_not_measured)]
Values = Annotated[list[Any], Field(min_length=1)]
Tried = Annotated[dict[str, Values], Field(min_length=1), AfterValidator(_checked_changes)]

Label = Annotated[str, AfterValidator(_checked_label)]
Axis = Annotated[dict[Label, Changes], Field(min_length=1)]
Axes = Annotated[dict[Label, Axis], Field(min_length=1)]

Reason = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class Section(BaseModel):
    """A part of a suite file; its fields are its keys, and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Choose(Section):
    """How a suite chooses values of each cell: the best of a grid on the validation split."""

    metric: tuple[str, ...] = Field(
        description="an evaluator such as pgd20, or the mean of several: mean(natural, pgd20)"
    )
    set: Alone = Field({}, description="what choice runs alone set")
    seeds: Seeds = Field(description="seeds of the choice runs, such as [100, 101]")
    grid: Annotated[Tried, AfterValidator(_not_measured)] = Field(
        description="what every cell tries, such as {train_args.learning_rate: [0.02, 0.05]}"
    )
    extend: Annotated[dict[str, Factor], OrEmpty] = Field({}, description="key to the factor beyond a chosen end")

    @field_validator("metric", mode="before")
    @classmethod
    def _read_metric(cls, raw: Any) -> tuple[str, ...]:
        """``pgd20`` or ``mean(natural, pgd20)`` as the labels over which the mean is."""
        labels: list[str] = []
        if isinstance(raw, str):
            text = raw.strip()
            mean = re.fullmatch(r"mean\((.*)\)", text)
            if mean:
                labels = [label.strip() for label in mean[1].split(",")]
            else:
                labels = [text]
        if not labels or not all(labels) or len(set(labels)) < len(labels):
            raise ValueError(f"got {describe(raw)}, expected an evaluator such as pgd20, or mean(natural, pgd20).")
        return tuple(labels)

    @model_validator(mode="after")
    def _check(self) -> Choose:
        for key in self.extend:
            _check_known(("extend", key), key, self.grid, "no grid has this key.")
            for value in self.grid[key]:
                if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                    text = f"the grid tries {describe(value)}, and only numbers above 0 have a next one; remove either."
                    raise AtError(("extend", key), text)
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
    metrics: dict[str, str] = Field(
        min_length=1, description="labels of evaluators such as [natural, pgd20], or a mapping to headings"
    )
    choose: Choose | None = None
    compare: Compare | None = None
    reported: Annotated[Reported, OrEmpty] = Field({}, validate_default=True)
    skip: Annotated[dict[str, Reason], OrEmpty] = Field({}, description="selector of cells that are not run to why")

    @field_validator("axes")
    @classmethod
    def _check_folders(cls, axes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """No two labels of an axis name the same folder."""
        for axis, labels in axes.items():
            label_of: dict[str, str] = {}  # of a folder
            for label in labels:
                other = label_of.setdefault(slug(label), label)
                if other != label:
                    text = f"'{other}' has the same folder name, '{slug(label)}'; rename one."
                    raise AtError((axis, label), text)
        return axes

    @field_validator("metrics", mode="before")
    @classmethod
    def _read_metrics(cls, raw: Any) -> Any:
        """A list as a mapping from each label to itself as its heading."""
        if not isinstance(raw, list):
            return raw
        for index, label in enumerate(raw):
            if not isinstance(label, str):
                raise AtError((index,), f"got {describe(label)}, expected a text.")
        return dict(zip(_different(tuple(raw)), raw, strict=True))

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
            names = self._names_of_cells()
        hint = did_you_mean(selector, names)
        if not hint:
            hint = f" Cells are {'/'.join(self.axes)}, with the labels {listed(labels)}."
        return f"'{selector}' matches no cell.{hint}"

    def _names_of_cells(self) -> list[str]:
        return ["/".join(labels) for labels in self.grid()]

    def _labels(self) -> list[str]:
        return list(dict.fromkeys(itertools.chain(*self.axes.values())))

    @model_validator(mode="after")
    def _check_keys(self) -> SuiteFile:
        """No key is changed in two places of which one would undo the other."""
        num_runs = math.prod(map(len, self.axes.values())) * len(self.seeds)
        if num_runs > MOST_RUNS:
            raise AtError(
                ("axes",),
                f"{num_runs // len(self.seeds)} cells and {len(self.seeds)} seeds are {num_runs} runs; at most "
                f"{MOST_RUNS} are allowed. Make several suites of it.",
            )
        of_axes: list[tuple[KeyPath, str]] = []  # where a key is changed, and the key
        for axis, labels in self.axes.items():
            for label, changes in labels.items():
                of_axes += [(("axes", axis, label), key) for key in changes]
        # Later axes are applied later: one that replaces what an earlier one set would make its cells all alike.
        for (early, before), (late, after) in itertools.combinations(of_axes, 2):
            if early[1] != late[1] and within(before, after):
                text = f"replaces '{before}' of {dotted(early)}; put last the axis that sets only a part of it."
                raise AtError((*late, after), text)
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
                    text = f"'{key}' is given in '{dotted(at[:2])}', too; remove it in one of the two places."
                    raise AtError((*at_grid, tried), text)
        return self

    @model_validator(mode="after")
    def _check_reported(self) -> SuiteFile:
        """Published numbers are of cells and metrics that there are, and have a source."""
        for name, published in self.reported.percent.items():
            at: KeyPath = ("reported", "percent", name)
            _check_known(at, name, self._names_of_cells(), f"there is no cell '{name}'.")
            if not self.reported.source_of(name):
                raise AtError(
                    at, "these numbers have no source; write reported.source, such as 'arXiv:2205.14926, Table 1'."
                )
            for metric in published.percent:
                self._check_metric((*at, metric), metric)
        for metric in self.reported.tolerance:
            self._check_metric(("reported", "tolerance", metric), metric)
        return self

    @model_validator(mode="after")
    def _check_headings(self) -> SuiteFile:
        label_of: dict[str, str] = {}  # of a heading
        for label, heading in self.metrics.items():
            other = label_of.setdefault(heading, label)
            if other != label:
                text = f"the heading '{heading}' stands over '{other}' already; give each metric one of its own."
                raise AtError(("metrics", label), text)
        return self

    @model_validator(mode="after")
    def _check_compare(self) -> SuiteFile:
        """The row and the metrics of planned comparisons are there, once."""
        compare = self.compare
        if compare is None:
            return self
        _check_known(("compare", "row"), compare.row, self._labels(), f"no row has the label '{compare.row}'.")
        axes = [axis for axis, labels in self.axes.items() if compare.row in labels]
        if len(axes) > 1:
            text = f"'{compare.row}' is a label of the axes {' and '.join(axes)}; rename it in one of them."
            raise AtError(("compare", "row"), text)
        for metric in compare.metrics:
            self._check_metric(("compare", "metrics"), metric)
            if compare.metrics.count(metric) > 1:
                raise AtError(("compare", "metrics"), f"the metric '{metric}' is listed twice; keep one.")
        if compare.level is not None and compare.robust not in compare.metrics:
            raise AtError(("compare", "level"), f"'{compare.robust}' is not compared; add it to compare.metrics.")
        return self

    @model_validator(mode="after")
    def _check_skip(self) -> SuiteFile:
        for selector in self.skip:
            problem = self.problem_of(selector)
            if problem:
                raise AtError(("skip", selector), problem)
        return self

    def _check_metric(self, at: KeyPath, metric: str) -> None:
        _check_known(at, metric, self.metrics, f"'{metric}' is not among the suite's metrics.")


def _check_known(at: KeyPath, name: str, known: Collection[str], complaint: str) -> None:
    if name not in known:
        hint = did_you_mean(name, known) or f" Known: {listed(known)}."
        raise AtError(at, f"{complaint}{hint}")


# --- reading a suite file ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One recipe value that a suite changes."""

    key: str  # ``train_args.comm_round``
    value: Any  # the raw YAML value
    place: str = ""  # its place in the suite file, for messages

    @property
    def path(self) -> KeyPath:
        return tuple(self.key.split("."))

    @property
    def override(self) -> str:
        """What ``calfat run --set`` takes to do the same."""
        written = yaml.safe_dump(self.value, default_flow_style=True, width=10**9, allow_unicode=True)
        return f"{self.key}={written.removesuffix('...' + chr(10)).strip()}"


#: Key to the settings that are tried for it, in the order of the file.
Grid = Mapping[str, tuple[Setting, ...]]


class Suite(SuiteFile):
    """A suite file that is right, and what belongs to it."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    name: str  # the file's stem; tables are written to ``runs/suites/<name>``
    document: SkipValidation[Document]  # raw values with their places, for later errors
    base_document: SkipValidation[Document]  # the raw values of the base recipe, with the plugin files of the suite
    record: Path | None = None  # the file with a row for each finished run (``--record``); None: there is none

    @property
    def directory(self) -> Path:
        return SUITES_ROOT / self.name

    @property
    def runs_directory(self) -> Path:
        return SUITES_ROOT / (self.runs or self.name)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Changes that all cells share, without the plugin files, which the base document has."""
        return tuple(setting for setting in self.settings_at("set") if not within(setting.key, dotted(PLUGINS)))

    @property
    def tried(self) -> Grid:
        """What every cell tries; empty where the suite chooses nothing."""
        grid: dict[str, tuple[Setting, ...]] = {}
        if self.choose is None:
            return grid
        for key, values in self.choose.grid.items():
            settings = []
            for number, value in enumerate(values):
                settings.append(Setting(key, value, self.document.place(("choose", "grid", key, number))))
            grid[key] = tuple(settings)
        return grid

    def settings_at(self, *at: str) -> tuple[Setting, ...]:
        """The changes of ``set``, of ``choose.set``, or of a label of an axis."""
        changes = self.document.get(at) or {}
        return tuple(Setting(key, value, self.document.place((*at, key))) for key, value in changes.items())

    def settings_of(self, labels: Iterable[str]) -> tuple[Setting, ...]:
        """The changes of the cell with these labels, in order: those of all cells, then those of each axis."""
        settings = list(self.settings)
        for axis, label in zip(self.axes, labels, strict=True):
            settings += self.settings_at("axes", axis, label)
        return tuple(settings)


def load_suite(file: str | Path | Document, plugins: Iterable[Path] = (), record: Path | None = None) -> Suite:
    """Read a suite and its base recipe; what depends on other recipes and plugins is left to ``plan``."""
    if isinstance(file, Document):
        document = file
    else:
        document = read_document(file, SUITE, piped=True)
    if "calfat" in document.data and "axes" not in document.data:
        raise document.mistaken_for("recipe", "run")
    try:
        suite = SuiteFile.model_validate(document.data)
    except ValidationError as error:
        raise _error_in(document, error) from None
    base = Path(os.path.normpath(Path(document.file).parent / suite.base))
    if not base.exists():
        base = shipped_files().get(suite.base, base)
    try:
        base_document = read_document(base)
    except RecipeError as error:
        raise document.error(("base",), str(error)) from None
    for key, value in suite.set.items():
        if within(key, dotted(PLUGINS)):  # the registry is made of the base recipe
            base_document = base_document.with_value(tuple(key.split(".")), value, document.place(("set", key)))
    name = Path(document.file).stem
    content = dict(suite)
    content["title"] = suite.title or name
    content["name"] = name
    content["document"] = document
    content["base_document"] = with_plugins(base_document, plugins)
    content["record"] = record
    return Suite.model_construct(**content)  # it has been checked above


def _error_in(document: Document, error: ValidationError) -> RecipeError:
    """pydantic's first error, a misspelt key before what is missing for it, with its place in the file."""
    first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    at = tuple(step for step in first["loc"] if step != "[key]")
    fields = SuiteFile.model_fields
    if len(at) > 1:
        sections: dict[str, type[BaseModel]] = {"choose": Choose, "compare": Compare, "reported": Reported}
        fields = sections.get(str(at[0]), SuiteFile).model_fields
    cause = first.get("ctx", {}).get("error")
    if first["type"] == "extra_forbidden":
        text = f"unknown key.{did_you_mean(str(at[-1]), fields) or f' Known: {listed(fields)}.'}"
    elif first["type"] == "missing":
        text = f"this key is missing. Expected: {fields[str(at[-1])].description}."
    elif cause is not None:
        if isinstance(cause, AtError):
            at = (*at, *cause.at)
        text = str(cause)
        if not text.endswith((".", "?")):
            text += "."
    else:
        expected = first["msg"].partition(" should ")[2].partition(" after ")[0]
        for theirs, ours in {r"dictionary( or instance of \w+)?": "mapping", "tuple": "list", "string": "text"}.items():
            expected = re.sub(theirs, ours, expected)
        text = f"got {describe(first['input'])}; it should {expected}."
    return document.error(at, text)
