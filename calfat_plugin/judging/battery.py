"""The battery: every check, the cheapest first."""

from __future__ import annotations

from calfat_plugin.judging.answers import Answers, Slopes
from calfat_plugin.judging.check import Check
from calfat_plugin.judging.independent_checks import (
    AutoAttackCheck,
    BlackBox,
    DeadUnits,
    RandomNoise,
    Surrogate,
    Transfer,
)
from calfat_plugin.judging.white_box import BudgetCurve, Gradients, ScaleFree, Strength, WhiteBox

#: AutoAttack attacks so many images at a time unless all checks are asked for.
SAMPLE = 32


def battery(*, full: bool, surrogates: int = 0, square: bool = True) -> tuple[Check, ...]:
    """The checks in the order in which they run: after the number on trial the cheapest first.

    Args:
        full: whether AutoAttack attacks all images, not those nearest to an error.
        surrogates: how many other models there are, beside the one that is trained here.
        square: whether Square can attack images of this size in this norm.
    """
    transfer = (Transfer(surrogates),) if surrogates else ()
    black_box = (BlackBox(),) if square else ()
    # First what follows the model's own gradients well: what others break beyond that, these gradients miss.
    first = (Answers(), Gradients(), WhiteBox(), Slopes(), ScaleFree())
    then = (RandomNoise(), BudgetCurve(), Strength(), DeadUnits(), Surrogate(), *transfer, *black_box)
    return (*first, *sorted(then, key=lambda check: check.cost(SAMPLE)), AutoAttackCheck(None if full else SAMPLE))
