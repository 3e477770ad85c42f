"""The battery: every check, the cheapest first."""

from __future__ import annotations

from calfat_plugin.trust.check import Check
from calfat_plugin.trust.other_ways import Answers, BlackBox, LastWord, RandomNoise, Transfer
from calfat_plugin.trust.white_box import BudgetCurve, Gradients, ScaleFree, Strength, WhiteBox

#: AutoAttack attacks so many images unless all checks are asked for.
SAMPLE = 64


def battery(*, full: bool, surrogates: int = 0, square: bool = True) -> tuple[Check, ...]:
    """The checks in the order in which they run: the cheapest first.

    Args:
        full: whether AutoAttack attacks all images, not a sample.
        surrogates: how many other models there are.
        square: whether Square can attack images of this size in this norm.
    """
    transfer = (Transfer(surrogates),) if surrogates else ()
    black_box = (BlackBox(),) if square else ()
    checks = (Answers(), Gradients(), WhiteBox(), RandomNoise(), ScaleFree(), BudgetCurve(), Strength())
    every = (*checks, *black_box, *transfer, LastWord(None if full else SAMPLE))
    return (*every[:3], *sorted(every[3:], key=lambda check: check.cost(SAMPLE)))
