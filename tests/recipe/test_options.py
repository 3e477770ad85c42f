"""Options: a frozen dataclass described, parsed and written back."""

from __future__ import annotations

import json
from dataclasses import dataclass, make_dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from calfat_plugin.entries import PartitionEntry
from calfat_plugin.errors import OptionError, PluginError
from calfat_plugin.options import NoOptions, describe_options, option, options_to_plain, parse_options, yaml_text


@dataclass(frozen=True)
class Options:
    """One option of every type."""

    count: int = option(3, low=1, help="how many", unit="pieces")
    share: float = option(0.5, low=0, high=1, help="how much")
    rate: float = option(0.1, low=0, open_low=True, high=1, help="how fast")
    eps: Fraction | None = option(None, low=0, help="how far", unit="fraction of the pixel range")
    start: Literal["x", "uniform"] = option("x", help="where from")
    mode: str = option("fast", choices=("fast", "exact"), help="how")
    on: bool = option(True, help="whether")
    word: str = option("a", help="what")


@dataclass(frozen=True)
class Lists:
    """One list of every type."""

    widths: tuple[int, ...] = option((8, 16), low=1, help="of layers")
    radii: tuple[Fraction, ...] | None = option(None, low=0, open_low=True, high=1, help="of balls")
    kinds: tuple[Literal["fog", "snow"], ...] = option(("fog",), help="which")
    flags: tuple[bool, ...] = option((), help="whether")
    words: tuple[str, ...] = option(help="what")


@dataclass(frozen=True)
class Needy:
    """An option without a default, and a check across options."""

    path: str = option(help="where")
    low: int = option(0, help="from")
    high: int = option(1, help="to")

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise OptionError(f"low: {self.low} is above high: {self.high}.")


class ToldError(Exception):
    """What the caller of ``parse_options`` was told."""


def parse(config: type, **raw: Any) -> Any:
    return parse_options(
        config, raw, owner="'thing'", fail=lambda at, complaint: ToldError(f"{at[0] if at else None}: {complaint}")
    )


def told(config: type, **raw: Any) -> str:
    with pytest.raises(ToldError) as raised:
        parse(config, **raw)
    return str(raised.value)


FRACTION = "a number or a fraction such as 8/255"
QUOTES = "YAML reads on, off, yes and no as true or false; put quotes around a text."


def test_every_type_is_read_as_yaml_hands_it_over() -> None:
    assert parse(Options) == Options()
    read = parse(
        Options, count="4", share="1e-3", rate=1, eps="8/255", start="uniform", mode="exact", on=False, word="8/255"
    )
    assert read == Options(
        count=4, share=0.001, rate=1.0, eps=Fraction(8, 255), start="uniform", mode="exact", on=False, word="8/255"
    )
    assert isinstance(read.rate, float)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("count", 0, "got 0 (int), expected a whole number, >= 1."),
        ("count", 2.5, "got 2.5 (float), expected a whole number, >= 1."),
        ("count", True, "got true (true/false), expected a whole number, >= 1."),
        (
            "count",
            10**21,
            f"got 1{'0' * 21} (int), expected a whole number, >= 1. Tensors hold numbers up to 9.22337e+18.",
        ),
        ("count", np.zeros((2, 3)), "got an array of shape (2, 3), expected a whole number, >= 1."),
        ("share", 1.5, "got 1.5 (float), expected a number, 0 <= value <= 1."),
        ("share", None, "got nothing (null), expected a number, 0 <= value <= 1."),
        ("rate", 0, "got 0 (int), expected a number, 0 < value <= 1."),
        ("eps", "-1/255", f"got '-1/255' (text), expected {FRACTION}, >= 0, or null."),
        ("eps", [1], f"got [1] (list), expected {FRACTION}, >= 0, or null."),
        ("start", "unifrom", "got 'unifrom' (text), expected one of x, uniform. Did you mean 'uniform'?"),
        ("mode", 1, "got 1 (int), expected one of fast, exact. Put quotes around it to make it a text."),
        ("on", "yes", "got 'yes' (text), expected true or false."),
        ("on", 1, "got 1 (int), expected true or false."),
        ("word", False, f"got false (true/false), expected a text. {QUOTES}"),
        ("word", {"a": 1}, "got {'a': 1} (mapping), expected a text."),
    ],
)
def test_a_wrong_value_is_reported(name: str, value: Any, complaint: str) -> None:
    assert told(Options, **{name: value}) == f"{name}: {complaint}"


def test_unknown_and_missing_options_are_reported() -> None:
    assert told(Options, count=16**5000).startswith("count: got a number of thousands of digits (int), expected ")
    assert told(Options, cuont=3) == "cuont: 'thing' has no option 'cuont'. Did you mean 'count'?"
    assert told(Options, zzzz=3).startswith("zzzz: 'thing' has no option 'zzzz'. Known: count, eps, mode")
    assert told(NoOptions, zzzz=3) == "zzzz: 'thing' has no option 'zzzz'. It has none."
    assert told(Needy) == "None: 'thing' needs the option 'path': a text."
    assert told(Needy, path="here", low=2) == "None: low: 2 is above high: 1."  # a check across options


def test_everything_is_described() -> None:
    count, _, _, eps, start, *_ = describe_options(Options)
    assert (count.name, count.type, count.default, count.required) == ("count", int, 3, False)
    assert (count.help, count.unit) == ("how many", "pieces")
    assert (eps.optional, start.choices) == (True, ("x", "uniform"))
    assert [info.required for info in describe_options(Needy)] == [True, False, False]


def options_of(hint: Any, default: Any, **limits: Any) -> type:
    return make_dataclass("Mine", [("size", hint, option(default, help="no", **limits))], frozen=True)


ALLOWED = "; use one of Fraction, StepSize, bool, float, int, str, or a list of these, such as tuple[int, ...]"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (options_of(int, 0, low=1), "the default of the option 'size': got 0 (int), expected a whole number, >= 1"),
        (options_of(float, None), "the default of the option 'size': got nothing (null), expected a number"),
        (options_of(list[int], (1,)), f"option 'size' has type list[int]{ALLOWED}"),
        (options_of(tuple[int, int], (0, 1)), f"option 'size' has type tuple[int, int]{ALLOWED}"),
        (options_of(Literal[1, 2], 1), f"option 'size' has type typing.Literal[1, 2]{ALLOWED}"),
        (dict, "options must be a dataclass, not <class 'dict'>"),
    ],
)
def test_what_no_recipe_could_have_is_refused_with_its_entry(config: type, complaint: str) -> None:
    """A default is in the recipe as run: with a wrong one there would be no resume, and no attack on the model."""
    with pytest.raises(TypeError) as raised:
        describe_options(config)
    assert str(raised.value) == complaint
    with pytest.raises(PluginError) as refused:
        PartitionEntry("mine", build=dict, config=config)
    assert str(refused.value) == f"partition 'mine': {complaint}."


@given(
    st.builds(
        Options,
        count=st.integers(1, 2**40),
        share=st.floats(0, 1),
        rate=st.floats(0, 1, exclude_min=True),
        eps=st.none() | st.fractions(0, 1, max_denominator=10**6),
        start=st.sampled_from(["x", "uniform"]),
        on=st.booleans(),
        word=st.text(),
    )
)
def test_options_survive_yaml_and_json(options: Options) -> None:
    plain = options_to_plain(options)
    assert parse(Options, **yaml.safe_load(yaml.safe_dump(plain))) == options
    assert parse(Options, **json.loads(json.dumps(plain))) == options


# --- lists ------------------------------------------------------------------------------------------------------------


def test_lists_are_read_item_by_item_and_written_back() -> None:
    read = parse(Lists, widths=["4", 2.0], radii=["8/255", 1], kinds=("snow", "fog"), words=["a, b", "8"])
    assert read == Lists(
        widths=(4, 2), radii=(Fraction(8, 255), Fraction(1)), kinds=("snow", "fog"), words=("a, b", "8")
    )
    plain = options_to_plain(read)
    assert plain == {
        **{"widths": [4, 2], "radii": ["8/255", "1"], "kinds": ["snow", "fog"]},
        **{"flags": [], "words": ["a, b", "8"]},
    }
    assert parse(Lists, **yaml.safe_load(yaml.safe_dump(plain))) == read
    assert parse(Lists, words=[]) == Lists(words=())
    assert yaml_text(plain) == "{widths: [4, 2], radii: [8/255, 1], kinds: [snow, fog], flags: [], words: [a, b, 8]}"


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("widths", 3, "got 3 (int), expected a list, each a whole number, >= 1. Write it as [a, b]."),
        ("widths", "3", "got '3' (text), expected a list, each a whole number, >= 1. Write it as [a, b]."),
        ("widths", None, "got nothing (null), expected a list, each a whole number, >= 1. Write it as [a, b]."),
        ("widths", [1, 0], "got 0 (int), expected a list, each a whole number, >= 1."),
        ("widths", [1, [2]], "got [2] (list), expected a list, each a whole number, >= 1."),
        ("radii", [2], f"got 2 (int), expected a list, each {FRACTION}, 0 < value <= 1, or null."),
        ("kinds", ["snov"], "got 'snov' (text), expected a list, each one of fog, snow. Did you mean 'snow'?"),
        ("words", [True], f"got true (true/false), expected a list, each a text. {QUOTES}"),
    ],
)
def test_what_is_wrong_in_a_list(name: str, value: Any, complaint: str) -> None:
    assert told(Lists, **{"words": ["a"], name: value}) == f"{name}: {complaint}"
