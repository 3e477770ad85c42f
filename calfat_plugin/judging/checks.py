"""The checks that compute something beside their attacks; the others are rows of the table in ``battery.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

from calfat_plugin.evaluators.alarms import clearly_below
from calfat_plugin.evaluators.autoattack.autoattack import AutoAttack, AutoAttackOptions
from calfat_plugin.evaluators.gradient import CW, MIFGSM, PGD, CWOptions, MIFGSMOptions, PGDOptions
from calfat_plugin.exact import parse_number
from calfat_plugin.judging.attacks import ProbabilityMargin
from calfat_plugin.judging.check import SLACK, STEP, STEPS, Check, Symptom
from calfat_plugin.judging.evidence import CLAIM, DEAD, Evidence, Found, Row
from calfat_plugin.report.labels import listing
from calfat_plugin.report.numbers import percent
from calfat_plugin.threat import ThreatModel

if TYPE_CHECKING:
    from calfat_plugin.judging.trial import Trial

SCALE_FREE = "margin20"
_FACTORS = (Fraction(1, 2), Fraction(2), Fraction(4))


@dataclass(frozen=True)
class BudgetCurve(Check):
    """The same attack at other budgets: the accuracy must fall, and to nothing where every image can be made grey."""

    name: str = "budget"
    title: str = "accuracy over the budget"

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
            yield trial.attack(SCALE_FREE, ProbabilityMargin(PGDOptions(steps=STEPS, restarts=2)), threat=scaled)

    def symptoms(self, rows: Sequence[Row], found: Found) -> Iterator[Symptom]:
        points = {row.eps: row.accuracy for row in rows if row.attack == CLAIM}
        if found.claimed is not None:
            points[found.budget] = found.claimed
        curve = [("0", found.natural), *sorted(points.items(), key=lambda point: parse_number(point[0]))]
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


def unbounded(threat: ThreatModel, values: int) -> Fraction:
    """The eps within which every image of so many values can be made the same grey one."""
    half = (Fraction(threat.bounds.high) - Fraction(threat.bounds.low)) / 2
    # In l2 the root is rounded up: a ball that is a little wider holds the grey image, too.
    radii = {"linf": half, "l2": Fraction(math.ceil(1000 * math.sqrt(values) * half), 1000), "l1": values * half}
    return radii[threat.norm]


@dataclass(frozen=True)
class Transfer(Check):
    """Adversarial examples of other models of the same task."""

    name: str = "transfer"
    title: str = "adversarial examples of other models"
    weakness: str = "other models' adversarial examples break what its own gradients do not: they are masked"
    masks: bool = True
    finds: str = (
        "{attack} leaves {leaves}, fewer than the best attack along its own gradients with {least}: they are masked"
    )
    surrogates: int = 1

    def cost(self, examples: int) -> float:
        return self.surrogates * STEPS * STEP * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        for name, model in trial.surrogates.items():
            yield trial.attack(f"{CLAIM} of {name}", PGD(PGDOptions(steps=STEPS)), craft_on=model)


@dataclass(frozen=True)
class Surrogate(Transfer):
    """Adversarial examples of a network that is trained on the spot on the labels that the model gives."""

    name: str = "surrogate"
    title: str = "adversarial examples of a surrogate trained here"
    weakness: str = (
        "adversarial examples of a surrogate, a network trained here on the model's labels, break what its own "
        "gradients do not: they are masked"
    )

    def cost(self, examples: int) -> float:
        from calfat_plugin.judging.surrogate import passes

        return passes(examples) + 3 * STEPS * STEP * examples

    def rows(self, trial: Trial) -> Iterator[Row]:
        from calfat_plugin.judging.surrogate import trained_surrogate

        model = trained_surrogate(trial)
        attacks: dict[str, PGD] = {
            "pgd20": PGD(PGDOptions(steps=STEPS)),
            "cw20": CW(CWOptions(steps=STEPS)),
            "mi-fgsm20": MIFGSM(MIFGSMOptions(steps=STEPS)),
        }
        for label, attack in attacks.items():
            yield trial.attack(f"{label} of surrogate", attack, craft_on=model)


@dataclass(frozen=True)
class DeadUnits(Check):
    """Images that wake units which no image on trial wakes, be they planted or an accident of training."""

    name: str = "dead-units"
    title: str = "units that no image wakes"
    weakness: str = (
        "images that wake dead units (a ReLU whose input is below 0 for every image on trial) break what PGD does not: "
        "no gradient passes through a unit that sleeps, so no attack comes to where it changes the answer"
    )
    masks: bool = False  # the way there is also one along the margin, so only what ``symptoms`` says counts
    finds: str = (
        "{attack} leaves {leaves}, fewer than the best attack along its gradients with {least}: units that sleep at "
        "every image change the answer where they are awake"
    )

    def cost(self, examples: int) -> float:
        from calfat_plugin.judging.dead_units import passes

        return passes(examples)

    def run(self, trial: Trial) -> Evidence:
        from calfat_plugin.judging.dead_units import Waking, worst_units

        if not trial.robust.any():
            return Evidence(self.name, ())
        units, dead = worst_units(trial)
        label = f"waking {len(units)} dead unit{'s' if len(units) > 1 else ''}"
        rows = (trial.attack(label, Waking(units)),) if units else ()
        return Evidence(self.name, rows, {} if dead is None else {DEAD: dead})


@dataclass(frozen=True)
class AutoAttackCheck(Check):
    """AutoAttack as published, on all images, or on those nearest to an error until so many in a row withstand it.

    A random sample would leave the number too uncertain: of 64 images that all withstand, 5.7 % may still fall. What
    AutoAttack breaks and nothing before it did are images that came close to an error, so it attacks these first, and
    what it leaves is counted for all images.

    Attributes:
        examples: it attacks so many images at a time, of those that are left, and ends when none of them falls; None:
            all images at once.
        iterations, queries: fewer than published, for tests.
    """

    name: str = "autoattack"
    title: str = "AutoAttack"
    weakness: str = "AutoAttack breaks what PGD-20 does not"
    examples: int | None = None
    iterations: int = 100
    queries: int = 5000

    def cost(self, examples: int) -> float:
        passes = (1 + 9) * self.iterations * STEP + 9 * self.iterations * 2 * STEP + self.queries
        return passes * min(examples, self.examples or examples)

    def rows(self, trial: Trial) -> Iterator[Row]:
        attack = AutoAttack(AutoAttackOptions(iterations=self.iterations, queries=self.queries))
        if self.examples is None:
            yield trial.attack("autoattack", attack, resumable=True)
            return
        left = trial.nearest_to_an_error(STEPS)
        for number, part in enumerate(left.split(self.examples) if len(left) else (), 1):
            label = "autoattack" if number == 1 else f"autoattack ({number})"
            row = trial.attack(label, attack, only=part.sort().values, resumable=True)
            yield row
            if row.accuracy == 1:
                return
