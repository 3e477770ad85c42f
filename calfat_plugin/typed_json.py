"""JSON to the dataclasses that declare it, and back.

A field's annotation says what a file may hold there. A value that is something else is refused with its place in the
file, so whoever gets the object need not check it again.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from calfat_plugin.disk import RESTORE, read_json
from calfat_plugin.errors import RunError
from calfat_plugin.exact import parse_number
from calfat_plugin.options import describe

T = TypeVar("T")

_PLAIN = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}


class Kind(NamedTuple):
    """What an annotation asks of a value beside its type: in words, and as a check; and what null stands for."""

    expected: str
    holds: Callable[[Any], bool]
    null: Any = None


class NotAsDeclaredError(ValueError):
    """A value is not what its annotation says; the text begins with its place, such as ``evaluations[0].label``."""


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return is_number(value) and abs(value) <= sys.float_info.max  # a whole number may be larger, and no float


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_exact(value: Any) -> bool:
    try:
        return float(parse_number(value)) >= 0
    except (ValueError, OverflowError):
        return False


Share = Annotated[float, Kind("a number from 0 to 1", lambda value: _is_finite(value) and 0 <= value <= 1)]
Count = Annotated[int, Kind("a whole number, 0 or more", _is_count)]
#: Of a figure, or seconds. Larger numbers have no place on a page.
Finite = Annotated[float, Kind("a number", lambda value: _is_finite(value) and abs(value) < 1e15)]
#: A figure that a file without nan has null for.
FiniteOrNan = Annotated[float, Kind("a number, or null", _is_finite, null=math.nan)]
Eps = Annotated[Any, Kind("a number such as 8/255", _is_exact)]


# --- reading ----------------------------------------------------------------------------------------------------------


def read_typed(kind: type[T], path: Path) -> T | None:
    """Read a JSON file as an object of a dataclass; None where there is none, or an empty mapping is in it.

    Raises:
        RunError: the file is damaged, or was changed by hand; it names file and place.
    """
    content = read_json(path)
    if not content:
        return None
    try:
        return from_json(kind, content)
    except NotAsDeclaredError as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, problem: str) -> RunError:
    """The error about a file whose content is wrong; ``problem`` begins with its place."""
    return RunError(f"{path}: {problem}. The file is damaged or was changed by hand. {RESTORE}")


def from_json(kind: type[T], value: Any, where: str = "") -> T:
    """Make an object of a dataclass of what JSON holds.

    Keys that the dataclass does not have are ignored: a newer version may have written them. Null counts as absent
    where the field has a default.

    Args:
        kind: the dataclass.
        value: what ``json.loads`` gave.
        where: the place of ``value`` in its file; empty: it is the whole file.

    Raises:
        NotAsDeclaredError: naming the place, what is there, and what was expected.
    """
    if not isinstance(value, dict):
        raise wrong(where, f"is {describe(value)}, expected a mapping")
    values = {}
    declared: Any = kind  # mypy does not know that a class is hashable
    for name, hint, has_default in _fields_of(declared):
        if has_default and value.get(name) is None:
            continue
        if name not in value:
            raise wrong(where, f"has no '{name}'")
        values[name] = _typed(value[name], hint, f"{where}.{name}".removeprefix("."))
    return kind(**values)


def wrong(where: str, what: str) -> NotAsDeclaredError:
    """The error about a place of a file."""
    return NotAsDeclaredError(f"{where or 'the file'} {what}")


@cache
def _fields_of(kind: Any) -> list[tuple[str, Any, bool]]:
    """Name, annotation, and whether there is a default, of each field of a dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = []
    for field in dataclasses.fields(kind):
        without = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        fields.append((field.name, hints[field.name], not without))
    return fields


def _typed(value: Any, hint: Any, where: str) -> Any:
    """A value as its annotation says: lists become tuples, and mappings with numbers as keys get numbers."""
    if hint is Any:
        return value
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_json(hint, value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _typed_or_null(value, arguments, where)
    if origin is Annotated:
        kind = hint.__metadata__[0]
        if value is None and kind.null is not None:
            return kind.null
        if not kind.holds(value):
            raise wrong(where, f"is {describe(value)}, expected {kind.expected}")
        return value
    if origin in (tuple, Sequence):
        if not isinstance(value, list):
            raise wrong(where, f"is {describe(value)}, expected a list")
        return tuple(_typed(item, arguments[0], f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Mapping:
        return _typed_mapping(value, arguments, where)
    if not _is_plain(value, hint):
        raise wrong(where, f"is {describe(value)}, expected {_PLAIN[hint]}")
    return value


def _typed_or_null(value: Any, members: Sequence[Any], where: str) -> Any:
    if value is None:
        return None
    (member,) = [member for member in members if member is not type(None)]
    try:
        return _typed(value, member, where)
    except NotAsDeclaredError as error:
        if not str(error).startswith(f"{where} is "):  # it is about a part of the value
            raise
        raise NotAsDeclaredError(f"{error}, or null") from None


def _typed_mapping(value: Any, arguments: Sequence[Any], where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise wrong(where, f"is {describe(value)}, expected a mapping")
    kind_of_key, kind_of_value = arguments
    if kind_of_key is int:
        for key in value:
            if not key.isdecimal():
                raise wrong(f"{where}.{key}", "is named by a text, expected a whole number")
    # The usual case, in which nothing is wrong: a round of many clients has thousands of numbers.
    if kind_of_value in _PLAIN and all(_is_plain(item, kind_of_value) for item in value.values()):
        return {kind_of_key(key): item for key, item in value.items()}
    return {kind_of_key(key): _typed(item, kind_of_value, f"{where}.{key}") for key, item in value.items()}


def _is_plain(value: Any, kind: type) -> bool:
    if kind is float:
        return is_number(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


# --- writing ----------------------------------------------------------------------------------------------------------


def as_json(value: Any) -> Any:
    """A dataclass, or what one holds, as JSON has it. Numbers that are not finite stay as they are.

    Raises:
        TypeError: it holds something that JSON has no form for.
    """
    import numpy  # here, not above: recipes are checked without it

    if dataclasses.is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, numpy.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"JSON has no form for a {type(value).__name__}")
