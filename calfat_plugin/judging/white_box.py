"""Checks that follow the model's own gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

from calfat_plugin.evaluators.alarms import ZERO_GRADIENTS, clearly_below
from calfat_plugin.evaluators.gradient import CW, FGSM, PGD, CWOptions, FGSMOptions, PGDOptions
from calfat_plugin.exact import parse_number
from calfat_plugin.judging.attacks import DLR, ProbabilityMargin
from calfat_plugin.judging.check import SLACK, STEP, STEPS, Check, Symptom
from calfat_plugin.judging.evidence import CLAIM, Found, Row
from calfat_plugin.report.labels import listing
from calfat_plugin.report.numbers import percent
from calfat_plugin.threat import ThreatModel

if TYPE_CHECKING:
    from calfat_plugin.judging.trial import Trial

_SCALE_FREE = "margin20"
_FACTORS = (Fraction(1, 2), Fraction(2), Fraction(4))


class Gradients(Check):
    """One step along the gradient, from the clean image: is there a gradient at all?"""

    name, title = "gradients", "share of zero gradients"

    def cost(self, examples: int) -> float:
        return (1 + STEP) * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        yield trial.attack("fgsm", FGSM(FGSMOptions()))

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[Symptom]:
        for row in rows:
            share = (row.zero_gradients or 0) / row.examples
            if share > ZERO_GRADIENTS:
                yield Symptom(
                    f"the gradient of the cross-entropy is exactly zero for {percent(share)} of the images",
                    decides=f"Where it is for more than {percent(ZERO_GRADIENTS)}, PGD-20 on smaller logits decides "
                    "(calfat attack --attacks scaled=pgd20 --set scaled.logit_scale=0.1): the number holds if that "
                    "leaves no fewer. --full does not run it.",
                )


class WhiteBox(Check):
    """The attack whose number is on trial."""

    name, title = "pgd", "the number on trial"

    def cost(self, examples: int) -> float:
        return STEPS * STEP * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        yield trial.attack(CLAIM, PGD(PGDOptions(steps=STEPS)))


class ScaleFree(Check):
    """Losses that stay the same if all logits are multiplied, against the cross-entropy, which does not."""

    name, title = "losses", "losses without the scale of the logits"
    weakness = (
        "losses that do not depend on the scale of the logits (Carlini-Wagner margin, DLR, probability margin) break "
        "what the cross-entropy does not: the softmax is saturated or flattened, which blinds PGD"
    )

    def cost(self, examples: int) -> float:
        return 3 * STEPS * STEP * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        options = PGDOptions(steps=STEPS)
        yield trial.attack("cw20", CW(CWOptions(steps=STEPS)))
        if trial.num_classes > 2:
            yield trial.attack("dlr20", DLR(options))
        yield trial.attack(_SCALE_FREE, ProbabilityMargin(options))

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[Symptom]:
        # The least of them: a loss that is cut off has none for an image that is wrong by far.
        share = min(((row.zero_gradients or 0) / row.examples for row in rows), default=0.0)
        if share > ZERO_GRADIENTS:
            yield Symptom(
                f"the gradient of the logits themselves is exactly zero for {percent(share)} of the images", masks=True
            )


class BudgetCurve(Check):
    """The same attack at other budgets: the accuracy must fall, and to nothing where every image can be made grey."""

    name, title = "budget", "accuracy over the budget"

    def cost(self, examples: int) -> float:
        return (len(_FACTORS) + 1) * STEPS * STEP * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        threat, (_, *image) = trial.threat, trial.data.x.shape
        everything = unbounded(threat, math.prod(image))
        budgets = {factor * threat.eps for factor in _FACTORS if factor < 1 or factor * threat.eps < everything}
        for eps in sorted(budgets | {max(everything, threat.eps)} - {threat.eps}):
            scaled = replace(threat, eps=eps, step_size=min(eps, threat.step_size * eps / threat.eps))
            yield (row := trial.attack(CLAIM, PGD(PGDOptions(steps=STEPS)), threat=scaled))
        if (
            row.accuracy > 0 and threat.eps < everything
        ):  # pixels or a softmax that saturate so far away may blind the cross-entropy alone
            yield trial.attack(_SCALE_FREE, ProbabilityMargin(PGDOptions(steps=STEPS, restarts=2)), threat=scaled)

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[Symptom]:
        curve = budget_curve([row for row in rows if row.attack == CLAIM], found)
        for (smaller, before), (larger, after) in pairwise(curve):
            if clearly_below(before, after, found.examples, SLACK):
                yield Symptom(
                    f"the accuracy rises with the budget, from {percent(before)} at eps {smaller} to {percent(after)} "
                    f"at eps {larger}",
                    masks=True,
                )
        eps, _ = curve[-1]
        attacks = {row.attack: row.accuracy for row in (*rows, *found.rows) if row.eps == eps}
        least = min((*attacks.values(), curve[-1][1]))
        if clearly_below(found.guess, least, found.examples, SLACK):
            yield Symptom(
                f"at eps {eps} every image can be made the same grey one, yet what {listing([*attacks] or [CLAIM])} "
                f"leaves, {percent(least)}, is more than guessing ({percent(found.guess)}): the attack fails",
                masks=True,
            )


class Strength(Check):
    """More steps and more restarts, which can only help the attacker."""

    name, title = "strength", "more steps and restarts"
    weakness = "more steps and restarts break more: PGD-20 was too weak"
    steps, restarts = (5, 100), 5

    def cost(self, examples: int) -> float:
        return (sum(self.steps) + self.restarts * STEPS) * STEP * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        for steps in self.steps:
            yield trial.attack(f"pgd{steps}", PGD(PGDOptions(steps=steps)))
        yield trial.attack(f"{CLAIM} x {self.restarts}", PGD(PGDOptions(steps=STEPS, restarts=self.restarts)))

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[Symptom]:
        if found.claimed is None or not rows:
            return
        few, many, restarted = rows
        curve = ((few.attack, few.accuracy), (CLAIM, found.claimed), (many.attack, many.accuracy))
        for (weak, before), (strong, after) in (*pairwise(curve), (curve[1], (restarted.attack, restarted.accuracy))):
            if clearly_below(before, after, found.examples, SLACK):
                yield Symptom(
                    f"{strong} leaves {percent(after)}, more than {weak} with {percent(before)}: more effort finds "
                    "less",
                    decides="The same with shorter steps decides (--step-size): the number holds if more effort then "
                    f"leaves at most {100 * SLACK:g} points more. --full keeps the steps.",
                )


def unbounded(threat: ThreatModel, values: int) -> Fraction:
    """The eps within which every image of so many values can be made the same grey one."""
    width = Fraction(threat.bounds.high) - Fraction(threat.bounds.low)
    half = width / 2
    # In l2 the root is rounded up: a ball that is a little wider holds the grey image, too.
    radii = {"linf": half, "l2": Fraction(math.ceil(1000 * math.sqrt(values) * half), 1000), "l1": values * half}
    return radii[threat.norm]


def budget_curve(rows: Sequence[Row], found: Found) -> list[tuple[str, float]]:
    """(eps, accuracy) from the clean images on, with the budget on trial among them."""
    curve = {row.eps: row.accuracy for row in rows}
    if found.claimed is not None:
        curve[found.budget] = found.claimed
    return [("0", found.natural), *sorted(curve.items(), key=lambda point: parse_number(point[0]))]
