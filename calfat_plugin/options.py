"""Options: frozen dataclasses whose fields carry help, unit and range (:func:`option`), and the parser for them.

A field that is a key of a recipe may have tags (:func:`tagged`): where in the package its value matters.
"""

from __future__ import annotations

import dataclasses
import enum
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

# Our places in the metadata of a dataclass field.
_OPTION = "calfat_plugin"
_TAGS = "calfat_plugin tags"
_FIXED_BECAUSE = "calfat_plugin fixed_because"

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
        words = _TYPE_WORDS[self.type]
        if self.choices:
            words = "one of " + ", ".join(self.choices)
        if self.low is not None and self.high is not None:
            low_sign = "<" if self.open_low else "<="
            words += f", {exact_text(self.low)} {low_sign} value <= {exact_text(self.high)}"
        elif self.low is not None:
            low_sign = ">" if self.open_low else ">="
            words += f", {low_sign} {exact_text(self.low)}"
        elif self.high is not None:
            words += f", <= {exact_text(self.high)}"
        if self.many:
            words = f"a list, each {words}"
        if self.optional:
            words += ", or null"
        return words

    def parse(self, value: Any) -> Any:
        """Turn a raw YAML value into the option's type, and check it.

        Raises:
            OptionError: it is of another type, out of range, or none of the choices.
        """
        if value is None and self.optional:
            return None
        if not self.many:
            return self._parse_one(value)
        if not isinstance(value, (list, tuple)):
            raise OptionError(f"got {describe(value)}, expected {self.expected}. Write it as [a, b].")
        return tuple(self._parse_one(item) for item in value)

    def _parse_one(self, value: Any) -> Any:
        parsed = _convert(value, self.type)
        if parsed is None:
            raise self._refusal(value)
        self.check(parsed, value)
        return parsed

    def check(self, value: Any, written: Any) -> None:
        """Refuse a value of the option's type that is out of range; ``written``: as it was given, for the message."""
        if isinstance(value, StepSize):
            value = StepSize(value)  # a multiple of eps is checked as that of an eps of 1: eps itself may be 0
        if isinstance(value, (int, float, Fraction)):
            limit = _MAX_INT if isinstance(value, int) else _MAX_FLOAT
            if not -limit <= value <= limit:
                raise self._refusal(written, f" Tensors hold numbers up to {limit:g}.")
        refused = bool(self.choices) and value not in self.choices
        if self.low is not None:
            refused = refused or value < self.low or (self.open_low and value == self.low)
        if self.high is not None:
            refused = refused or value > self.high
        if refused:
            raise self._refusal(written)

    def _refusal(self, value: Any, hint: str = "") -> OptionError:
        """The error about ``value``, with a hint where one is known for its type."""
        if not hint and isinstance(value, str) and self.choices:
            hint = did_you_mean(value, self.choices)
        if not hint and self.type is str:
            hint = quoting_hint(value)
        return OptionError(f"got {describe(value)}, expected {self.expected}.{hint}")


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
    fields = {}
    for field in dataclasses.fields(config):
        declared = field.metadata.get(_OPTION)
        if isinstance(declared, meta):
            fields[field.name] = declared
    return fields


class Tag(enum.Flag):
    """One question about a key of a recipe that some part of the package asks; without the tag, the answer is no."""

    MAY_CHANGE = enum.auto()  #: may a resumed run have another value? The finished rounds would be the same ones.
    NO_SETTING = enum.auto()  #: are runs that differ in nothing else runs of one setting, which reports average?
    NO_DIGEST = enum.auto()  #: are runs that differ in nothing else the same run, in the record of a suite?
    PROBLEM = enum.auto()  #: must runs agree in it before their accuracies compare?
    MEASURED = enum.auto()  #: does it change what is measured? A suite then gives it to all of its runs alike.
    OF_A_PARTY = enum.auto()  #: may each party of a run have its own value? It is then not compared over the wire.
    SECRET = enum.auto()  #: may it name brokers, keys and passwords? Loggers and pages do not show it then.
    NAMED_LAST = enum.auto()  #: is it in the name of a setting only where nothing else tells two settings apart?
    FREE = MAY_CHANGE | NO_SETTING | NO_DIGEST  #: it says how a run is carried out, and changes no number of it.


def tagged(tags: Tag, declared: Any, *, fixed_because: str = "") -> Any:
    """Add tags to a field of a section of a recipe.

    Args:
        tags: those of the key; a section's are those of all keys below it.
        declared: what ``option`` or ``no_option`` returned.
        fixed_because: why a resumed run may not change it, where that is not plain to see.
    """
    field: dataclasses.Field[Any] = declared
    field.metadata = types.MappingProxyType({**field.metadata, _TAGS: tags, _FIXED_BECAUSE: fixed_because})
    return field


def tags_of(field: dataclasses.Field[Any]) -> Tag:
    """The tags that a field is declared with."""
    tags: Tag = field.metadata.get(_TAGS, Tag(0))
    return tags


def fixed_because(field: dataclasses.Field[Any]) -> str:
    """Why a resumed run may not change a key; empty where its declaration gives no reason."""
    reason: str = field.metadata.get(_FIXED_BECAUSE, "")
    return reason


@dataclass(frozen=True)
class NoOptions:
    """The options of a plugin that has none."""


@functools.cache  # slow, and a recipe may list thousands of evaluators, a suite thousands of recipes
def describe_options(config: type) -> tuple[OptionInfo, ...]:
    """Read the options of a dataclass, in the order they were declared."""
    if not dataclasses.is_dataclass(config):
        raise TypeError(f"options must be a dataclass, not {config!r}")
    hints = typing.get_type_hints(config)
    options = []
    for field in dataclasses.fields(config):
        if isinstance(field.metadata.get(_OPTION, {}), dict):  # declared by option, or with no help at all
            options.append(_describe(field, hints[field.name]))
    return tuple(options)


def _describe(field: dataclasses.Field[Any], hint: Any) -> OptionInfo:
    """What is known about the option that a field declares; ``hint``: its annotation."""
    details = dict(field.metadata.get(_OPTION, {}))
    hint, optional = _without_none(hint)
    many = typing.get_origin(hint) is tuple and typing.get_args(hint)[1:] == (...,)
    if many:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is typing.Literal and all(isinstance(word, str) for word in typing.get_args(hint)):
        details["choices"] = typing.get_args(hint)
        hint = str
    if isinstance(field.default, StepSize):
        hint = StepSize
    if hint not in _TYPE_WORDS:
        raise TypeError(
            f"option '{field.name}' has type {hint!r}; use one of {listed(t.__name__ for t in _TYPE_WORDS)}, or a list "
            "of these, such as tuple[int, ...]"
        )
    if field.default is dataclasses.MISSING:
        return OptionInfo(field.name, hint, optional, None, True, many=many, **details)
    info = OptionInfo(field.name, hint, optional, field.default, False, many=many, **details)
    try:
        info.parse(to_plain(field.default))  # the recipe as run has the default, and is read again
    except OptionError as error:
        raise TypeError(f"the default of the option '{field.name}': {str(error).removesuffix('.')}") from None
    return info


def _without_none(hint: Any) -> tuple[Any, bool]:
    """(the annotation without None, whether it had None): ``int | None`` is int and optional."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    members = typing.get_args(hint)
    others = [member for member in members if member is not type(None)]
    if len(others) == 1:
        return others[0], len(others) < len(members)
    return hint, len(others) < len(members)  # of several types, which is refused


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
            hint = " It has none."
            if names:
                hint = did_you_mean(name, names) or f" Known: {listed(names)}."
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
    if isinstance(value, Fraction):
        return exact_text(value)
    return value


def yaml_text(value: Any) -> str:
    """A value as a recipe writes it: ``null``, ``true``, ``8/255``, ``{name: fedavg, weights: uniform}``."""
    value = to_plain(value)
    if isinstance(value, Mapping):
        items = [f"{key}: {yaml_text(item)}" for key, item in value.items()]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(yaml_text, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def describe(value: Any) -> str:
    """A value as a message shows it: ``8 (int)``, ``'abc' (text)``, ``nothing``."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (true/false)"
    if isinstance(value, str):
        printable = value if value.isprintable() else repr(value)[1:-1]
        return f"'{short(printable)}' (text)"
    if isinstance(getattr(value, "shape", None), tuple):
        return one_line(value)
    try:
        text = str(value)
    except ValueError:  # Python refuses to write integers of more than some 4,300 digits
        text = "a number of thousands of digits"
    words = {int: "int", float: "float", list: "list", dict: "mapping"}
    return f"{short(text)} ({words.get(type(value), type(value).__name__)})"


def quoting_hint(value: Any) -> str:
    """What to do where a text was expected and YAML read something else; empty for texts, lists and sections."""
    if isinstance(value, bool):
        return " YAML reads on, off, yes and no as true or false; put quotes around a text."
    if value is None or isinstance(value, (str, list, Mapping)):
        return ""
    return " Put quotes around it to make it a text."


def _convert(value: Any, kind: type) -> Any:
    """``value`` as an instance of ``kind``; None where it cannot be one."""
    if kind in (bool, str):
        return value if isinstance(value, kind) else None
    try:
        number = StepSize(value) if kind is StepSize else parse_number(value)
    except ValueError:  # no number, or one beyond every float
        return None
    if kind is int:
        return int(number) if number.denominator == 1 else None
    if kind is float:
        return float(number)
    return number
