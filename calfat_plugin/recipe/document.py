"""YAML text to plain values with their places in the file.

All recipe errors get their location from here: a line of the file, a ``--set`` on the command line, or a preset.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import yaml

from calfat_plugin.disk import read_bytes
from calfat_plugin.errors import RecipeError, did_you_mean, short
from calfat_plugin.exact import scalar
from calfat_plugin.options import describe, parse_options, quoting_hint, to_plain
from calfat_plugin.shipped import located, shipped_files
from calfat_plugin.threat import Norm, ThreatModel, lacks_eps

T = TypeVar("T")
KeyPath = tuple[str | int, ...]
NORM: KeyPath = ("calfat", "threat", "norm")
EPS: KeyPath = ("calfat", "threat", "eps")

# A recipe is a page of text. A file beyond these limits is of another kind, or its YAML aliases multiply.
_MAX_BYTES = 256_000
_MAX_DEPTH = 20
_MAX_VALUES = 20_000
_TOO_DEEP = f"values are nested more than {_MAX_DEPTH} deep."

# First and last line of a recipe that a run wrote. Half of one may well be a good recipe, with defaults for the rest.
AS_RUN = " as run: every default and derived value is written out, down to the last line."
END_AS_RUN = "# End of the recipe as run."

_YAML = "tag:yaml.org,2002:"
_PLAIN_TAGS = tuple(_YAML + name for name in ("map", "seq"))
_SCALAR_TAGS = tuple(_YAML + name for name in ("null", "bool", "int", "float", "timestamp", "str"))
_READ_AS_OTHER_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


def dotted(path: KeyPath) -> str:
    """``("calfat", "evaluators", 0)`` as a person writes it: ``calfat.evaluators[0]``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}"
    return text.removeprefix(".")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key to value, for every value of a recipe."""
    keys: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            keys |= flat(value, f"{prefix}{name}.")
        else:
            keys[prefix + name] = value
    return keys


def _error_at(place: str, path: KeyPath, complaint: str) -> RecipeError:
    key = dotted(path)
    if key:
        place += f": {key}"
    return RecipeError(f"{place}: {complaint}")


@dataclass
class Document:
    """A recipe's raw values and their places, such as ``recipes/a.yaml:12`` or ``--set calfat.threat.eps=8``."""

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
        return _error_at(self.place(path), path, complaint)

    def mistaken_for(self, kind: str, command: str) -> RecipeError:
        """An error that says what the file is instead of what was expected, and which command runs such a file."""
        file = self.file
        if not Path(file).is_file():  # a pipe, which can be read only once, or sections from Python
            file = "FILE"
        return RecipeError(f"{self.file}: this is a {kind}. Run it with: {shlex.join(['calfat', command, file])}")

    def get(self, path: KeyPath) -> Any:
        """The value at ``path``; None where there is none."""
        value: Any = self.data
        for step in path:
            if isinstance(value, str):  # a text can be indexed, too
                return None
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def has(self, path: KeyPath) -> bool:
        """Whether the recipe has a value at ``path``."""
        parent = self.get(path[:-1])
        return isinstance(parent, Mapping) and path[-1] in parent

    def section(self, path: KeyPath, expected: str = "a section of keys and values") -> Mapping[str, Any]:
        """The section at ``path``; empty where the recipe leaves it out. ``expected`` is for the message."""
        value = self.get(path)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(path, f"got {describe(value)}, expected {expected}.")
        return value

    def options(
        self,
        path: KeyPath,
        config: type[T],
        raw: Mapping[str, Any] | None = None,
        given: Mapping[str, Any] | None = None,
        also: tuple[str, ...] = (),
        owner: str = "",
    ) -> T:
        """The options of type ``config`` at ``path``.

        Args:
            path: of the section.
            config: the class of its options.
            raw: their values; None: all that the section has.
            given: values of fields of ``config`` that are no options.
            also: further keys, beside the options, that a message about an unknown one names.
            owner: what a message calls the section; empty: by its key.
        """
        if raw is None:
            raw = self.section(path)
        if not owner:
            name = path[-1] if isinstance(path[-1], str) else dotted(path)
            owner = f"section '{name}'"
        return parse_options(
            config,
            raw,
            owner=owner,
            fail=lambda below, complaint: self.error((*path, *below), complaint),
            also=(*(given or {}), *also),
            given=given,
        )

    def with_value(self, path: KeyPath, value: Any, place: str) -> Document:
        """A copy that holds ``value`` at ``path``; missing sections on the way are created."""
        places = {key: at for key, at in self.places.items() if key[: len(path)] != path}
        data = dict(self.data)
        section: Any = data
        for depth, step in enumerate(path[:-1]):
            below = section.get(step)
            path_below = path[: depth + 1]
            if below is None:
                below = {}
                places[path_below] = place
            if not isinstance(below, dict):
                raise RecipeError(
                    f"{place}: {dotted(path_below)} is {describe(below)} in {self.place(path_below)}, not a section, "
                    f"so '{dotted(path)}' cannot be set."
                )
            # Only the sections on the way are copied: nobody writes to the others.
            section[step] = dict(below)
            section = section[step]
        section[path[-1]] = value
        return Document(self.file, data, {**places, path: place})

    def with_values(self, changes: Iterable[tuple[KeyPath, Any, str]]) -> Document:
        """A copy with each (path, value, place) applied, in order: together, one change of the recipe.

        An eps is a length in a norm. Where the change has another norm and no eps, the recipe's is null, which
        :meth:`check_norm` refuses unless a later change has one.
        """
        document = self
        for path, value, place in changes:
            document = document.with_value(path, value, place)
        norm_before, norm = self.get(NORM) or ThreatModel.norm, document.get(NORM) or ThreatModel.norm
        if norm != norm_before and document.has(EPS) and document.place(EPS) == self.place(EPS):
            document = document.with_value(EPS, None, document.place(NORM))
        return document

    def check_norm(self) -> None:
        """Refuse a norm whose eps is that of another norm, or the default, which is one of linf."""
        norm = self.get(NORM)
        if norm in get_args(Norm) and self.get(EPS) is None and (self.has(EPS) or norm != ThreatModel.norm):
            raise self.error(NORM, lacks_eps(norm))

    def with_overrides(self, overrides: Iterable[str]) -> Document:
        """A copy with each ``section.key=value`` of the command line applied, in order: one change."""
        changes: list[tuple[KeyPath, Any, str]] = []
        for override in overrides:
            place = f"--set {short(override, 120)}"
            key, equals, text = override.partition("=")
            steps = tuple(key.strip().split("."))
            if not equals or len(steps) < 2 or not all(steps):
                raise RecipeError(
                    f"{place}: expected SECTION.KEY=VALUE, such as train_args.comm_round=20 or calfat.threat.eps=4/255."
                )
            changes.append((steps, parsed_value(text, steps, place), place))
        return self.with_values(changes)


class Kind(NamedTuple):
    """What a file is meant to be, in the words of messages: an example of one, and what is expected at its top."""

    name: str
    example: str
    top: str


RECIPE = Kind("recipe", "a recipe in recipes/, such as calfat_digits.yaml", "sections such as train_args: and calfat:")
SUITE = Kind("suite", "the example in docs/suites.md", "keys such as base: and axes:")


def read_document(path: str | Path, kind: Kind = RECIPE, *, piped: bool = False) -> Document:
    """Read a recipe file, or another of ours; a name such as ``calfat_digits`` is that of one in the package.

    ``piped``: the user has named it, so it may be a device or a pipe. In a run directory it must be a regular file.
    """
    file = located(path)
    text = read_text(file, kind.name, piped=piped)
    document = parse_document(text, str(file), kind)
    first = text.partition("\n")[0]
    if first.startswith("#") and first.endswith(AS_RUN) and f"\n{END_AS_RUN}" not in text:
        raise RecipeError(f"{file}: the file is cut short: its last line is missing. Restore it from a copy.")
    return document


def read_text(path: Path, kind: str, *, piped: bool = False) -> str:
    """The text of a recipe or a suite (``kind``), in UTF-8, perhaps with its mark; ``piped``: also from a pipe."""
    try:
        if path.is_dir():
            files = sorted(child.name for child in path.glob("*.y*ml") if child.is_file())
            hint = ""
            if files:
                hint = f" Did you mean {path / files[0]}?"
            raise RecipeError(f"{path}: this is a directory, expected a {kind} file.{hint}")
        content = read_bytes(path, _MAX_BYTES, piped=piped)
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file.{_instead_of(path)}") from None
    except OSError as error:
        raise RecipeError(f"{short(str(path), 120)}: cannot be read ({error.strerror}).") from None
    if len(content) > _MAX_BYTES:
        size = path.stat().st_size or f"more than {_MAX_BYTES}"  # a pipe has no size
        raise RecipeError(f"{path}: {size} bytes are too many for a {kind} ({_MAX_BYTES // 1000} kB at most).")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"{path}:{line}: byte {error.start} is not UTF-8 text; expected a YAML {kind}, not a binary file."
        ) from None


def _instead_of(path: Path) -> str:
    """What a missing file was probably meant to be: one beside it, or one that comes with the package."""
    near = [str(child) for child in path.parent.glob("*.y*ml") if child.is_file()]
    shipped = shipped_files()
    if not near and path.stem in shipped:
        return f" The one that comes with the package is called '{path.stem}', without a folder and an ending."
    if path.name == str(path) and not path.suffix:  # written as a name
        return did_you_mean(str(path), [*near, *shipped]) or " 'calfat recipes' lists what comes with the package."
    return did_you_mean(str(path), near)


def parse_document(text: str, file: str, kind: Kind = RECIPE) -> Document:
    """Parse a recipe's text, or that of another file of ours; ``file`` is the name used in messages."""
    builder = _Builder(lambda line: f"{file}:{line}")
    try:
        node = builder.compose(text)
        if node is None:
            raise RecipeError(f"{file}: the file is empty. Start from {kind.example}.")
        data = builder.build(node, ())
    except yaml.YAMLError as error:
        raise RecipeError(f"{file}{_line(error, text)}: not valid YAML: {_problem(error)}.") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{file}: found {describe(data)} at the top, expected {kind.top}.")
    return Document(file, data, {**builder.places, (): file})


def from_python(value: Any, file: str = "recipe", path: KeyPath = ()) -> Any:
    """A copy of a Python value as the recipe ``file`` could have it."""
    if len(path) > _MAX_DEPTH:
        raise _error_at(file, path[:1], _TOO_DEEP)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _error_at(file, path, f"the key {describe(key)} is not a text.{quoting_hint(key)}")
        return {str(key): from_python(item, file, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [from_python(item, file, (*path, index)) for index, item in enumerate(value)]
    value = to_plain(scalar(value))
    for kind in (bool, int, float, str):  # also where it is a subclass, which no file could hold
        if isinstance(value, kind):
            return kind(value)
    if value is None or isinstance(value, date):
        return value
    raise _error_at(file, path, f"got {describe(value)}, expected a number, a text, a list or a mapping.")


def parsed_value(text: str, path: KeyPath, place: str) -> Any:
    """The value of an override, held to the same rules as the file."""
    builder = _Builder(lambda line: place)
    try:
        node = builder.compose(text)
        if node is None:
            return None
        return builder.build(node, path)
    except yaml.YAMLError as error:
        raise RecipeError(
            f"{place}: the value is not valid YAML ({_problem(error)}); quote it for the shell, such as "
            '--set "calfat.trainer={name: fedpgd}".'
        ) from None


class _Loader(yaml.SafeLoader):
    """Refuses deep nesting before it costs time: the scanner's work grows with the square of the depth."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth > _MAX_DEPTH:
            raise RecursionError
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


# YAML 1.1 gives a lone = a tag that nothing constructs; in YAML 1.2 it is a text like any other.
_Loader.yaml_implicit_resolvers = dict(yaml.SafeLoader.yaml_implicit_resolvers)
del _Loader.yaml_implicit_resolvers["="]


class _Builder:
    """YAML nodes to plain values, with the place of each key path.

    Stricter than YAML: keys are texts and unique, no tags of other languages, and no numbers that YAML 1.1 reads
    as something else than they look like. Nesting and size are bounded, because an alias may contain itself, or many
    aliases of aliases may expand to millions of values. ``at`` is the place of a 1-based line.
    """

    def __init__(self, at: Callable[[int], str]) -> None:
        self.places: dict[KeyPath, str] = {}
        self._at = at
        self._values = 0

    def compose(self, text: str) -> yaml.Node | None:
        """The document's root node; None for an empty text."""
        self._loader = _Loader(text)
        try:
            node: yaml.Node | None = self._loader.get_single_node()
        except RecursionError:
            line = self._loader.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise RecipeError(f"{self._at(line)}: {_TOO_DEEP}") from None
        return node

    def build(self, node: yaml.Node, path: KeyPath, depth: int = 0) -> Any:
        """The value of ``node`` at ``path``."""
        self.places.setdefault(path, self._at(node.start_mark.line + 1))
        self._values += 1
        if depth > _MAX_DEPTH:
            raise self._too_much(path, _TOO_DEEP)
        if self._values > _MAX_VALUES:
            raise self._too_much(path, f"there are more than {_MAX_VALUES} values, aliases counted.")
        allowed = _SCALAR_TAGS if isinstance(node, yaml.ScalarNode) else _PLAIN_TAGS
        if node.tag not in allowed:
            raise self._error(node, path, f"the tag {node.tag} is not allowed in a recipe; remove it.")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        return [self.build(child, (*path, index), depth + 1) for index, child in enumerate(node.value)]

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        try:
            value = self._loader.construct_object(node)
        except ValueError as error:  # a date in month 13, a number of 5,000 digits
            reason = str(error).partition(";")[0]
            raise self._error(node, path, f"{describe(node.value)} is not a value: {reason}.") from None
        except (AttributeError, LookupError):  # what PyYAML raises on !!bool maybe, !!int '' and !!timestamp x
            tag = f"!!{node.tag.removeprefix(_YAML)}"
            raise self._error(node, path, f"{describe(node.value)} is no {tag}; remove the tag.") from None
        if isinstance(value, (int, float)) and _READ_AS_OTHER_NUMBER.fullmatch(node.value):
            text = f"YAML reads {node.value} as {value:g}; write the intended number, or '{node.value}' for a text."
            raise self._error(node, path, text)
        return value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _YAML + "merge":  # << of one section, or of a list of them
                if isinstance(value_node, yaml.SequenceNode):
                    merged += value_node.value
                else:
                    merged.append(value_node)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, path, f"a key is a {key_node.id}, expected a text.")
            key = self._scalar(key_node, path)
            if not isinstance(key, str):
                raise self._error(key_node, path, f"the key {describe(key)} is not a text.{quoting_hint(key)}")
            if key in result:
                raise self._error(key_node, (*path, key), "duplicate key; keep one.")
            self.places.setdefault((*path, key), self._at(key_node.start_mark.line + 1))
            result[key] = self.build(value_node, (*path, key), depth + 1)
        for base in merged:  # the mapping's own keys win, then the first base that has the key
            values = self.build(base, path, depth + 1)
            if not isinstance(values, dict):
                raise self._error(base, path, f"<< got {describe(values)}, expected a section or a list of them.")
            result = {**values, **result}
        return result

    def _too_much(self, path: KeyPath, complaint: str) -> RecipeError:
        """An error at the section: the nodes of an alias are elsewhere in the file."""
        return _error_at(self.places.get(path[:1]) or self.places[path], path[:1], complaint)

    def _error(self, node: yaml.Node, path: KeyPath, complaint: str) -> RecipeError:
        return _error_at(self._at(node.start_mark.line + 1), path, complaint)


def _line(error: yaml.YAMLError, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f":{mark.line + 1}"
    if isinstance(error, yaml.reader.ReaderError):  # a character that YAML forbids
        return f":{text.count(chr(10), 0, error.position) + 1}"
    return ""


def _problem(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return " ".join(str(problem).split()).removeprefix("but ").rstrip(".")
