"""YAML text to plain values that remember where they stood.

A :class:`Document` is a tree of plain Python values plus, for every key path, the place it came from: a line of the
file, a ``--set`` on the command line, or a preset. All recipe errors get their location from here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from calfat_plugin.errors import RecipeError
from calfat_plugin.options import describe

KeyPath = tuple[str | int, ...]

_MAX_BYTES = 1_000_000  # a recipe is a page of text; anything larger is another kind of file


def dotted(path: KeyPath) -> str:
    """``("calfat", "evaluators", 0)`` as a person writes it: ``calfat.evaluators[0]``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else (f".{step}" if text else str(step))
    return text


@dataclass
class Document:
    """A recipe's raw values and their places.

    Attributes:
        file: the recipe's file name as the user wrote it.
        data: the values.
        places: key path to place, such as ``recipes/a.yaml:12`` or ``--set calfat.threat.eps=8``.
    """

    file: str
    data: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """The place of ``path``, or of the nearest parent that has one."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.file

    def error(self, path: KeyPath, complaint: str) -> RecipeError:
        """An error that begins with place and key path."""
        where = dotted(path)
        return RecipeError(f"{self.place(path)}: {where + ': ' if where else ''}{complaint}")

    def get(self, path: KeyPath) -> Any:
        """The value at ``path``; None where there is none."""
        value: Any = self.data
        for step in path:
            if not isinstance(value, Mapping) or step not in value:
                return None
            value = value[step]
        return value

    def has(self, path: KeyPath) -> bool:
        """Whether the recipe says something at ``path``."""
        parent = self.get(path[:-1])
        return isinstance(parent, Mapping) and path[-1] in parent

    def with_value(self, path: KeyPath, value: Any, place: str) -> Document:
        """A copy that holds ``value`` at ``path``; missing sections on the way are created.

        Raises:
            RecipeError: when a step on the way is not a section.
        """
        data = copy.deepcopy(self.data)
        section: Any = data
        for depth, step in enumerate(path[:-1]):
            section = section.setdefault(step, {})
            if section is None:
                section = {}
                _assign(data, path[: depth + 1], section)
            if not isinstance(section, dict):
                here = path[: depth + 1]
                raise RecipeError(
                    f"{place}: {dotted(here)} is {describe(section)} in {self.place(here)}, not a section, "
                    f"so '{dotted(path)}' cannot be set."
                )
        section[path[-1]] = value
        places = {known: at for known, at in self.places.items() if known[: len(path)] != path}
        places[path] = place
        return Document(self.file, data, places)

    def with_overrides(self, overrides: Iterable[str]) -> Document:
        """A copy with each ``section.key=value`` of the command line applied, in order.

        Raises:
            RecipeError: for an override without ``=``, without a key, or whose value is not YAML.
        """
        document = self
        for override in overrides:
            place = f"--set {override}"
            key, equals, text = override.partition("=")
            steps = tuple(key.strip().split("."))
            if not equals or len(steps) < 2 or not all(steps):
                raise RecipeError(
                    f"{place}: expected SECTION.KEY=VALUE, such as train_args.comm_round=20 or calfat.threat.eps=4/255."
                )
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise RecipeError(
                    f"{place}: the value is not valid YAML ({_problem(error)}); quote it for the shell, such as "
                    '--set "calfat.trainer={name: fedpgd}".'
                ) from None
            document = document.with_value(steps, value, place)
        return document


def read_document(path: str | Path) -> Document:
    """Read a recipe file.

    Raises:
        RecipeError: when there is no such file, or it is no YAML mapping of sections; with the line where one is known.
    """
    return parse_document(_read_text(Path(path), str(path)), str(path))


def parse_document(text: str, file: str) -> Document:
    """Parse recipe text; ``file`` is the name used in messages.

    Raises:
        RecipeError: as ``read_document``.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise RecipeError(
                f"{file}: the file is empty. Start from a recipe in recipes/, such as calfat_digits.yaml."
            )
        places: dict[KeyPath, str] = {}
        data = _build(loader, node, (), file, places)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise RecipeError(f"{file}{line}: not valid YAML: {_problem(error)}.") from None
    if not isinstance(data, dict):
        raise RecipeError(
            f"{file}: found {describe(data)} at the top, expected sections such as train_args: and calfat:."
        )
    return Document(file, data, places)


def _read_text(path: Path, shown: str) -> str:
    if path.is_dir():
        inside = sorted(child.name for child in path.glob("*.y*ml"))
        hint = f" Did you mean {path / inside[0]}?" if inside else ""
        raise RecipeError(f"{shown}: this is a directory, expected a recipe file.{hint}")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise RecipeError(f"{shown}: {path.stat().st_size} bytes are too many for a recipe (1 MB at most).")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = [child.name for child in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        from calfat_plugin.errors import did_you_mean

        raise RecipeError(f"{shown}: no such file.{did_you_mean(path.name, near)}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{shown}: byte {error.start} is not UTF-8 text; expected a YAML recipe, not a binary file."
        ) from None
    except OSError as error:
        raise RecipeError(f"{shown}: cannot be read ({error.strerror}).") from None


def _build(loader: yaml.SafeLoader, node: yaml.Node, path: KeyPath, file: str, places: dict[KeyPath, str]) -> Any:
    line = f"{file}:{node.start_mark.line + 1}"
    places.setdefault(path, line if path else file)
    if isinstance(node, yaml.MappingNode):
        written = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            at = f"{file}:{key_node.start_mark.line + 1}"
            if not isinstance(key, str):
                raise RecipeError(f"{at}: the key {describe(key)} is not a text.")
            if key in result and written.count(key) > 1:
                raise RecipeError(f"{at}: {dotted((*path, key))}: this key stands here twice; keep one.")
            child: KeyPath = (*path, key)
            places[child] = at
            result[key] = _build(loader, value_node, child, file, places)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, child, (*path, index), file, places) for index, child in enumerate(node.value)]
    return loader.construct_object(node, deep=True)


def _assign(data: dict[str, Any], path: KeyPath, value: Any) -> None:
    section: Any = data
    for step in path[:-1]:
        section = section[step]
    section[path[-1]] = value


def _problem(error: yaml.YAMLError) -> str:
    words = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return " ".join(str(words).split()).rstrip(".")
