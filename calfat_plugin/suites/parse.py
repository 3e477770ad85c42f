"""Suite file to :class:`Suite`: the model of what it says, with the places of its values and its base recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, SkipValidation, ValidationError

from calfat_plugin.errors import RecipeError, did_you_mean, listed
from calfat_plugin.options import describe
from calfat_plugin.recipe.document import SUITE, Document, KeyPath, dotted, read_document
from calfat_plugin.recipe.plugin_files import PLUGINS, with_plugins
from calfat_plugin.runs.directory import DEFAULT_ROOT
from calfat_plugin.shipped import shipped_files
from calfat_plugin.suites.schema import AtError, Choose, Compare, Reported, SuiteFile, within

SUITES_ROOT = DEFAULT_ROOT / "suites"
_SECTIONS: Mapping[Any, type[BaseModel]] = {"choose": Choose, "compare": Compare, "reported": Reported}


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
    document = file if isinstance(file, Document) else read_document(file, SUITE, piped=True)
    if "calfat" in document.data and "axes" not in document.data:
        raise document.mistaken_for("recipe", "run")
    try:
        suite = SuiteFile.model_validate(document.data)
    except ValidationError as error:
        raise _first_of(error, document) from None
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


def _first_of(error: ValidationError, document: Document) -> RecipeError:
    """pydantic's first finding, a misspelt key before what is missing for it, with its place."""
    first = min(error.errors(), key=lambda finding: finding["type"] != "extra_forbidden")
    at = tuple(step for step in first["loc"] if step != "[key]")
    fields = _SECTIONS.get(at[0] if len(at) > 1 else None, SuiteFile).model_fields
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
        wanted = first["msg"].partition(" should ")[2].partition(" after ")[0]
        for theirs, ours in {r"dictionary( or instance of \w+)?": "mapping", "tuple": "list", "string": "text"}.items():
            wanted = re.sub(theirs, ours, wanted)
        text = f"got {describe(first['input'])}; it should {wanted}."
    return document.error(at, text)
