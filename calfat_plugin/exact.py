"""Exact numbers: ``8/255`` is a fraction and stays one, and a step may be a multiple of eps."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, TypeVar

from calfat_plugin.errors import one_line

Number = TypeVar("Number", bound=Fraction)

_DECIMAL = r"[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,3})?"
_NUMBER = re.compile(rf"\s*({_DECIMAL})\s*(?:/\s*({_DECIMAL})\s*)?")
_SIMPLE_DENOMINATOR = 10_000  # 8/255 and the like are recognised in a float up to this denominator


def scalar(value: Any) -> Any:
    """What Python itself has for a number of numpy or torch, such as ``np.arange(3)[0]``; anything else as it is."""
    if getattr(value, "shape", None) == ():
        return value.item()
    return value


def parse_number(value: object) -> Fraction:
    """Read ``8/255``, ``1e-3``, ``2.0e-3``, ``0.1`` (text or number) as an exact fraction.

    YAML 1.1 reads the first two as text; this is the one place that turns them into numbers. A float becomes the
    simplest fraction that is the same float, so ``8 / 255`` computed in Python is 8/255 again.
    """
    value = scalar(value)
    if isinstance(value, str):
        number = _parsed_text(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
        number = Fraction(repr(float(value)))
        simplest = number.limit_denominator(_SIMPLE_DENOMINATOR)
        if float(simplest) == value:
            number = simplest
    elif isinstance(value, (int, Fraction)) and not isinstance(value, bool):
        number = Fraction(value)
    else:
        raise ValueError(f"{one_line(value)} is not a number; write 8/255, 0.1 or 1e-3")
    try:
        float(number)
    except OverflowError:
        if isinstance(value, str):
            raise ValueError(f"{value!r} is too large for a float") from None
        # Of a long number only the size: Python itself refuses to write more than 4,300 digits.
        bits = abs(int(number)).bit_length()
        raise ValueError(f"a number of {bits} bits is too large for a float") from None
    return number


def _parsed_text(text: str) -> Fraction:
    """``8/255``, ``1e-3`` or ``0.1`` as a fraction."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"{one_line(text)} is not a number; write 8/255, 0.1 or 1e-3")
    numerator, denominator = Fraction(match[1]), Fraction(match[2] or 1)
    if denominator == 0:
        raise ValueError(f"{text!r} divides by zero")
    return numerator / denominator


def exact_text(value: Fraction | float) -> str:
    """Write a number without loss and as people write it: ``8/255``, ``0.1``, ``0.002``, ``1``.

    ``parse_number(exact_text(v)) == parse_number(v)`` for every float, and for every fraction that
    a threat model would hold (up to 30 digits above and below the line).
    """
    exact = parse_number(value)
    decimal = repr(float(exact)).removesuffix(".0")
    if Fraction(decimal) == exact:
        return decimal
    return str(exact)


class StepSize(Fraction):
    """The length of a step of an attack, which may follow eps: ``eps``, ``eps/4``, ``0.25 eps``, ``2/3 eps``.

    Any other number is a length of its own, which stays whatever eps becomes. A multiple of eps has the value for an
    eps of 1 until a threat model says which eps; a threat model of another eps, such as a copy by
    ``dataclasses.replace``, then has another step. Calculations give plain fractions.

    Attributes:
        factor: how many eps it is; None for a length of its own.
    """

    __slots__ = ("factor",)
    factor: Fraction | None

    def __new__(cls, value: object, eps: Fraction | None = None) -> StepSize:
        """``value`` as users write it; ``eps``: what a multiple is a multiple of."""
        if isinstance(value, StepSize):
            factor = value.factor
        else:
            factor = _factor_of_eps(value)
        if factor is None:
            step = super().__new__(cls, parse_number(value))
        elif eps is None:
            step = super().__new__(cls, factor)
        else:
            step = super().__new__(cls, factor * eps)
        step.factor = factor
        return step

    @property
    def text(self) -> str:
        """As a recipe writes it, without loss: ``eps/4``, ``2/255``."""
        if self.factor is None:
            return exact_text(self)
        numerator, denominator = self.factor.as_integer_ratio()
        if numerator == denominator:
            return "eps"
        if numerator == 1:
            return f"eps/{denominator}"
        return f"{exact_text(self.factor)} eps"

    # A fraction makes copies of itself from numerator and denominator, which would forget the factor.

    def __copy__(self) -> StepSize:
        return self

    def __deepcopy__(self, memo: object) -> StepSize:
        return self

    def __reduce__(self) -> tuple[type[StepSize], tuple[str, Fraction | None]]:
        eps = None
        if self.factor:
            eps = Fraction(self) / self.factor
        return StepSize, (self.text, eps)


def _factor_of_eps(value: object) -> Fraction | None:
    """1/4 for ``eps/4`` and for ``0.25 eps``; None where there is no eps."""
    if not isinstance(value, str) or "eps" not in value:
        return None
    before, _, after = (part.strip() for part in value.partition("eps"))
    try:
        if after[:1] not in ("", "/"):
            raise ValueError
        return parse_number((before or "1") + after)
    except ValueError:
        raise ValueError(f"{value!r} is no multiple of eps; write eps/4 or 0.25 eps") from None


QUARTER = StepSize("eps/4")  #: the default: the paper's 2/255 at 8/255
