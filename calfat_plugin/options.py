"""Options: frozen dataclasses whose fields carry help, unit and range (:func:`option`), and the parser for them."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from calfat_plugin.errors import OptionError, did_you_mean, listed, one_line, short
from calfat_plugin.exact import StepSize, exact_text, parse_number

T = TypeVar("T")

_OPTION = "calfat_plugin"  # our place in the metadata of a dataclass field

_MAX_FLOAT = 1e38  # beyond, torch refuses a number for its single-precision tensors
_MAX_INT = 2**63 - 1  # likewise for its whole numbers

_TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    Fraction: "a number or a fraction such as 8/255",
    StepSize: "a multiple of eps such as eps/4, or a number or a fraction such as 2/255",
    bool: "true or false",
    str: "a text",
}


@dataclass(frozen=True)
class OptionInfo:
    """What is known about one option: the single source of checks, help texts and reference docs."""

    name: str
    type: type
    optional: bool
    default: Any
    required: bool
    help: str = ""
    unit: str = ""
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    choices: tuple[str, ...] = ()
    many: bool = False  #: a list of such values

    @property
    def expected(self) -> str:
        """The valid values in words: ``a number, 0 <= value <= 1``, ``a list, each a whole number, >= 1``."""
        words = f"a list, each {self._each}" if self.many else self._each
        return words + (", or null" if self.optional else "")

    @property
    def _each(self) -> str:
        words = "one of " + ", ".join(self.choices) if self.choices else _TYPE_WORDS[self.type]
        low, high = ("" if end is None else exact_text(end) for end in (self.low, self.high))
        if low and high:
            words += f", {low} {'<' if self.open_low else '<='} value <= {high}"
        elif low:
            words += f", {'>' if self.open_low else '>='} {low}"
        elif high:
            words += f", <= {high}"
        return words

    def parse(self, value: Any) -> Any:
        """Turn a raw YAML value into the option's type."""
        if value is None and self.optional:
            return None
        if not self.many:
            return self._parse_one(value)
        if not isinstance(value, (list, tuple)):
            raise OptionError(f"got {describe(value)}, expected {self.expected}. Write it as [a, b].")
        return tuple(map(self._parse_one, value))

    def _parse_one(self, value: Any) -> Any:
        parsed = _convert(value, self.type)
        limit = _MAX_INT if isinstance(parsed, int) else _MAX_FLOAT
        too_large = isinstance(parsed, (int, float, Fraction)) and not -limit <= parsed <= limit
        refused = parsed is None or too_large or (self.choices and parsed not in self.choices)
        if not refused and self.low is not None:
            refused = parsed < self.low or (self.open_low and parsed == self.low)
        if not refused and (self.high is None or parsed <= self.high):
            return parsed
        hint = did_you_mean(value, self.choices) if isinstance(value, str) and self.choices else ""
        if self.type is str:
            hint += quoting_hint(value)
        if too_large:
            hint = f" Tensors hold numbers up to {limit:g}."
        raise OptionError(f"got {describe(value)}, expected {self.expected}.{hint}")


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    choices: tuple[str, ...] = (),
    positional: bool = False,
) -> Any:
    """Declare a field of an options dataclass.

    Args:
        default: the default; leave it out to make the option required.
        help: one line for the user.
        unit: unit in words, such as ``fraction of the pixel range``.
        low: smallest allowed value (excluded when ``open_low``).
        high: largest allowed value.
        open_low: whether ``low`` itself is forbidden.
        choices: the allowed texts.
        positional: whether the class also takes it by position.
    """
    described = {"help": help, "unit": unit, "low": low, "high": high, "open_low": open_low, "choices": choices}
    return dataclasses.field(default=default, metadata={_OPTION: described}, kw_only=not positional)


def no_option(default: Any = dataclasses.MISSING, *, meta: object = None, **how: Any) -> Any:
    """Declare a field of an options dataclass that is not a single value of a recipe, but ``meta``, or None."""
    return dataclasses.field(default=default, metadata={_OPTION: meta}, **how)


def other_fields(config: type, meta: type[T]) -> dict[str, T]:
    """The fields of an options dataclass that ``no_option`` declares to be a ``meta``, by name."""
    found = {field.name: field.metadata.get(_OPTION) for field in dataclasses.fields(config)}
    return {name: what for name, what in found.items() if isinstance(what, meta)}


@dataclass(frozen=True)
class NoOptions:
    """The options of a plugin that has none."""


@functools.cache  # slow, and a recipe may list thousands of evaluators, a suite thousands of recipes
def describe_options(config: type) -> tuple[OptionInfo, ...]:
    """Read the options of a dataclass, in the order they were declared."""
    if not dataclasses.is_dataclass(config):
        raise TypeError(f"options must be a dataclass, not {config!r}")
    hints = typing.get_type_hints(config)
    options = (field for field in dataclasses.fields(config) if isinstance(field.metadata.get(_OPTION, {}), dict))
    return tuple(_describe(field, hints[field.name]) for field in options)


def _describe(field: dataclasses.Field[Any], hint: Any) -> OptionInfo:
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        optional = len(members) < len(typing.get_args(hint))
        hint = members[0] if len(members) == 1 else hint
    many = typing.get_origin(hint) is tuple and typing.get_args(hint)[1:] == (...,)
    if many:
        hint = typing.get_args(hint)[0]
    details = dict(field.metadata.get(_OPTION, {}))
    if typing.get_origin(hint) is typing.Literal and all(isinstance(word, str) for word in typing.get_args(hint)):
        details["choices"], hint = typing.get_args(hint), str
    if isinstance(field.default, StepSize):
        hint = StepSize
    if hint not in _TYPE_WORDS:
        raise TypeError(
            f"option '{field.name}' has type {hint!r}; use one of {listed(t.__name__ for t in _TYPE_WORDS)}, or a list "
            "of these, such as tuple[int, ...]"
        )
    required = field.default is dataclasses.MISSING
    default = None if required else field.default
    info = OptionInfo(field.name, hint, optional, default, required, many=many, **details)
    if not required:  # the recipe as run has the default, and is read again
        try:
            info.parse(to_plain(default))
        except OptionError as error:
            raise TypeError(f"the default of the option '{field.name}': {str(error).removesuffix('.')}") from None
    return info


def parse_options(
    config: type[T],
    raw: Mapping[str, Any],
    *,
    owner: str,
    fail: Callable[[tuple[str | int, ...], str], Exception],
    also: tuple[str, ...] = (),
    given: Mapping[str, Any] | None = None,
) -> T:
    """An instance of the options dataclass ``config`` from raw values of a recipe, by the name of the option.

    ``fail`` makes the exception to raise from (keys that lead to the value, complaint), since it knows file and line.
    ``also`` are further keys beside the options for did-you-mean, ``given`` the values of fields that are no options.
    """
    declared: type = config  # mypy takes no type[T] for Hashable, which the cache wants
    known = {info.name: info for info in describe_options(declared)}
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in known:
            names = (*also, *known)
            hint = did_you_mean(name, names) or (f" Known: {listed(names)}." if names else " It has none.")
            raise fail((name,), f"{owner} has no option '{name}'.{hint}")
        try:
            values[name] = known[name].parse(value)
        except OptionError as error:
            raise fail((name,), str(error)) from None
    missing = [name for name, info in known.items() if info.required and name not in values]
    if missing:
        raise fail((), f"{owner} needs the option '{missing[0]}': {known[missing[0]].expected}.")
    try:
        return config(**values, **(given or {}))
    except OptionError as error:  # a check across options, made by the dataclass itself
        raise fail(error.at, str(error)) from None


def options_to_plain(options: Any) -> dict[str, Any]:
    """Write an options instance as YAML-ready values, fractions as exact text."""
    config: type = type(options)
    return {info.name: to_plain(getattr(options, info.name)) for info in describe_options(config)}


def to_plain(value: Any) -> Any:
    """Turn a parsed value into what YAML and JSON can hold, losing nothing: fractions become exact text."""
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, StepSize):
        return value.text
    return exact_text(value) if isinstance(value, Fraction) else value


def yaml_text(value: Any) -> str:
    """A value as a recipe writes it: ``null``, ``true``, ``8/255``, ``{name: fedavg, weights: uniform}``."""
    value = to_plain(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {yaml_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(yaml_text, value)) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe(value: Any) -> str:
    """A value as a message shows it: ``8 (int)``, ``'abc' (text)``, ``nothing``."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (true/false)"
    if isinstance(value, str):
        return f"'{short(value if value.isprintable() else repr(value)[1:-1])}' (text)"
    if isinstance(getattr(value, "shape", None), tuple):
        return one_line(value)
    words = {int: "int", float: "float", list: "list", dict: "mapping"}
    return f"{short(_text(value))} ({words.get(type(value), type(value).__name__)})"


def quoting_hint(value: Any) -> str:
    """What to do where a text was wanted and YAML made something else of it; empty for texts, lists and sections."""
    if isinstance(value, bool):
        return " YAML reads on, off, yes and no as true or false; put quotes around a text."
    makes_sense = value is not None and not isinstance(value, (str, list, Mapping))
    return " Put quotes around it to make it a text." if makes_sense else ""


def _text(value: object) -> str:
    try:
        return str(value)
    except ValueError:  # Python refuses to write integers of more than some 4,300 digits
        return "a number of thousands of digits"


def _convert(value: Any, wanted: type) -> Any:
    """``value`` as an instance of ``wanted``; None where it cannot be one."""
    if wanted in (bool, str):
        return value if isinstance(value, wanted) else None
    try:
        number = StepSize(value) if wanted is StepSize else parse_number(value)
    except ValueError:  # no number, or one beyond every float
        return None
    if wanted is int:
        return int(number) if number.denominator == 1 else None
    return float(number) if wanted is float else number
