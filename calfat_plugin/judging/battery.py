"""The battery: all checks of a model, the cheapest first; a new one is written here alone.

A check is a row of the table at the end, or a class where it computes something beside its attacks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

from calfat_plugin.evaluators.alarms import ZERO_GRADIENTS, clearly_below
from calfat_plugin.evaluators.autoattack import AutoAttack, AutoAttackOptions
from calfat_plugin.evaluators.gradient import CW, FGSM, MIFGSM, PGD, CWOptions, FGSMOptions, MIFGSMOptions, PGDOptions
from calfat_plugin.exact import parse_number
from calfat_plugin.judging.check import (
    DLR,
    SLACK,
    STEPS,
    Attack,
    Check,
    Noise,
    NoiseOptions,
    ProbabilityMargin,
    Symptom,
)
from calfat_plugin.judging.findings import CHANGED, CLAIM, REPEATED, Findings, Overview, Row
from calfat_plugin.report.numbers import listing, percent
from calfat_plugin.threat import ThreatModel

if TYPE_CHECKING:
    from calfat_plugin.judging.trial import Trial

#: AutoAttack attacks so many images at a time unless all checks are asked for.
SAMPLE = 32
_UNRELATED_SHARE = 0.1  # of the images: a kink of a ReLU is no masking


@dataclass(frozen=True)
class Answers(Check):
    """Does the model answer the same to the same image, whenever it is asked and whatever else it is asked about?"""

    name: str = "answers"
    title: str = "same answers to the same images"

    def run(self, trial: Trial) -> Findings:
        from calfat_plugin.judging.questions import repeated_answers

        facts = repeated_answers(trial)
        rows: tuple[Row, ...] = ()
        if facts[CHANGED] > 0:
            rows = tuple(self.rows(trial))
        return Findings(self.name, rows, facts)

    def rows(self, trial: Trial) -> Iterator[Row]:
        """For a randomised model: the attack on trial, as often as the clean images, to show what one run is worth."""
        from calfat_plugin.judging.questions import DRAWS

        for draw in range(DRAWS):
            yield trial.attack(f"{CLAIM}, draw {draw + 1}", PGD(PGDOptions(steps=STEPS)))

    def symptoms(self, rows: Sequence[Row], overview: Overview) -> Iterator[Symptom]:
        repeated = overview.facts.get(REPEATED, 0.0)
        if repeated > ZERO_GRADIENTS:
            yield Symptom(
                f"at a random point of the ball the logits of {percent(repeated)} of the images are exactly what they "
                "are at the image itself: no attack that compares logits sees how near it is to an error",
                masks=True,
            )


UNRELATED = "unrelated"  # share of images at which the gradient is not the derivative of the logits
ONE_HOT = "one-hot"  # share of images whose logits are as many different numbers as those of a label


@dataclass(frozen=True)
class Slopes(Check):
    """Is the gradient that the model returns the slope of the logits that it returns?

    At a random point of each image's ball the difference of the two largest logits is compared, along random
    directions, with what the gradient says about it. A gradient that was replaced, or taken of something else than
    what is answered, leads attacks elsewhere, however strong they are.
    """

    name: str = "slopes"
    title: str = "gradients against the slopes of the logits"

    def run(self, trial: Trial) -> Findings:
        from calfat_plugin.judging.questions import slopes

        unrelated, one_hot = slopes(trial)
        return Findings(self.name, (), {UNRELATED: unrelated, ONE_HOT: one_hot})

    def symptoms(self, rows: Sequence[Row], overview: Overview) -> Iterator[Symptom]:
        unrelated, one_hot = overview.facts.get(UNRELATED, 0.0), overview.facts.get(ONE_HOT, 0.0)
        if unrelated > _UNRELATED_SHARE:
            yield Symptom(
                f"for {percent(unrelated)} of the images the gradient is not the slope of the logits: attacks along it "
                "climb another function than the one that answers",
                masks=True,
            )
        if one_hot > _UNRELATED_SHARE:
            yield Symptom(
                f"for {percent(one_hot)} of the images the logits are two different numbers alone, as a label is: no "
                "attack that compares logits sees how near it is to an error",
                masks=True,
            )


SCALE_FREE = "margin20"
_FACTORS = (Fraction(1, 2), Fraction(2), Fraction(4))


@dataclass(frozen=True)
class BudgetCurve(Check):
    """The same attack at other budgets: the accuracy must fall, and to nothing where every image can be made grey."""

    name: str = "budget"
    title: str = "accuracy over the budget"

    def rows(self, trial: Trial) -> Iterator[Row]:
        threat = trial.task.threat
        everything = unbounded(threat, trial.task.data.x[0].numel())
        budgets = {max(everything, threat.eps)}
        for factor in _FACTORS:
            if factor < 1 or factor * threat.eps < everything:
                budgets.add(factor * threat.eps)
        budgets.discard(threat.eps)
        for eps in sorted(budgets):
            scaled = replace(threat, eps=eps, step_size=min(eps, threat.step_size * eps / threat.eps))
            row = trial.attack(CLAIM, PGD(PGDOptions(steps=STEPS)), threat=scaled)
            yield row
        # Pixels or a softmax that saturate so far away may blind the cross-entropy alone.
        if row.accuracy > 0 and threat.eps < everything:
            yield trial.attack(SCALE_FREE, ProbabilityMargin(PGDOptions(steps=STEPS, restarts=2)), threat=scaled)

    def symptoms(self, rows: Sequence[Row], overview: Overview) -> Iterator[Symptom]:
        accuracy_at = {row.eps: row.accuracy for row in rows if row.attack == CLAIM}
        if overview.claimed is not None:
            accuracy_at[overview.budget] = overview.claimed
        curve = [("0", overview.natural)]
        for eps in sorted(accuracy_at, key=parse_number):
            curve.append((eps, accuracy_at[eps]))
        for (smaller, before), (larger, after) in pairwise(curve):
            if clearly_below(before, after, overview.examples, SLACK):
                yield Symptom(
                    f"the accuracy rises with the budget, from {percent(before)} at eps {smaller} to {percent(after)} "
                    f"at eps {larger}",
                    masks=True,
                )
        largest, least = curve[-1]
        attacks = {row.attack: row.accuracy for row in (*rows, *overview.rows) if row.eps == largest}
        least = min(least, *attacks.values())
        if clearly_below(overview.guess, least, overview.examples, SLACK):
            yield Symptom(
                f"at eps {largest} every image can be made the same grey one, yet what {listing([*attacks] or [CLAIM])}"
                f" leaves, {percent(least)}, is more than guessing ({percent(overview.guess)}): the attack fails",
                masks=True,
            )


def unbounded(threat: ThreatModel, values: int) -> Fraction:
    """The eps within which every image of so many values can be made the same grey one."""
    half = (Fraction(threat.bounds.high) - Fraction(threat.bounds.low)) / 2
    if threat.norm == "l1":
        return values * half
    if threat.norm == "l2":
        # The root is rounded up: a ball that is a little wider holds the grey image, too.
        return Fraction(math.ceil(1000 * math.sqrt(values) * half), 1000)
    return half


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

    def rows(self, trial: Trial) -> Iterator[Row]:
        from calfat_plugin.judging.questions import trained_surrogate

        model = trained_surrogate(trial)
        attacks: dict[str, PGD] = {
            "pgd20": PGD(PGDOptions(steps=STEPS)),
            "cw20": CW(CWOptions(steps=STEPS)),
            "mi-fgsm20": MIFGSM(MIFGSMOptions(steps=STEPS)),
        }
        for label, attack in attacks.items():
            yield trial.attack(f"{label} of surrogate", attack, craft_on=model)


DEAD = "dead"  # share of the values between pixels and logits that are the same on all images and at random points


@dataclass(frozen=True)
class DeadUnits(Check):
    """Images that open gates which no image on trial opens, be they planted or an accident of training."""

    name: str = "dead-units"
    title: str = "units that no image wakes"
    weakness: str = (
        "images that wake dead units (a ReLU whose input is below 0 for every image on trial, or another gate that no "
        "image opens) break what PGD does not: no gradient passes through a unit that sleeps, so no attack comes to "
        "where it changes the answer"
    )
    masks: bool = False  # the way there is also one along the margin, so only what ``symptoms`` says counts
    finds: str = (
        "{attack} leaves {leaves}, fewer than the best attack along its gradients with {least}: units that sleep at "
        "every image change the answer where they are awake"
    )

    def run(self, trial: Trial) -> Findings:
        from calfat_plugin.judging.dead_units import Waking, worst_plans

        if not trial.robust.any():
            return Findings(self.name, ())
        worst = worst_plans(trial)
        rows = []
        if worst.plans:
            label = "waking 1 dead unit"
            if worst.units > 1:
                label = f"waking {worst.units} dead units"
            rows.append(trial.attack(label, Waking(worst.plans, worst.one_by_one)))
        return Findings(self.name, tuple(rows), {DEAD: worst.share_asleep})


@dataclass(frozen=True)
class AutoAttackCheck(Check):
    """AutoAttack as published, on all images, or on those nearest to an error until so many in a row withstand it.

    A random sample would leave the number too uncertain: of 64 images that all withstand, 5.7 % may still fall. What
    AutoAttack breaks and nothing before it did are images that came close to an error, so it attacks these first, and
    what it leaves is counted for all images.
    """

    name: str = "autoattack"
    title: str = "AutoAttack"
    weakness: str = "AutoAttack breaks what PGD-20 does not"
    examples: int | None = None  # so many at a time, of those left, until none of them falls; None: all images at once
    iterations: int = 100  # fewer for tests, as the queries
    queries: int = 5000

    def rows(self, trial: Trial) -> Iterator[Row]:
        attack = AutoAttack(AutoAttackOptions(iterations=self.iterations, queries=self.queries))
        if self.examples is None:
            yield trial.attack("autoattack", attack, resumable=True)
            return
        left = trial.nearest_to_an_error(STEPS)
        if not len(left):
            return
        for number, part in enumerate(left.split(self.examples), 1):
            label = "autoattack"
            if number > 1:
                label = f"autoattack ({number})"
            row = trial.attack(label, attack, only=part.sort().values, resumable=True)
            yield row
            if row.accuracy == 1:
                return


# --- the table --------------------------------------------------------------------------------------------------------


def _zero_gradients(rows: Sequence[Row], overview: Overview) -> Iterator[Symptom]:
    for row in rows:
        share = (row.zero_gradients or 0) / row.examples
        if share > ZERO_GRADIENTS:
            yield Symptom(
                f"the gradient of the cross-entropy is exactly zero for {percent(share)} of the images",
                decides=f"Where it is for more than {percent(ZERO_GRADIENTS)}, PGD-20 on smaller logits decides "
                "(calfat attack --attacks scaled=pgd20 --set scaled.logit_scale=0.1): the number holds if that "
                "leaves no fewer. --full does not run it.",
            )


def _zero_gradients_of_logits(rows: Sequence[Row], overview: Overview) -> Iterator[Symptom]:
    # The least of them: a loss that is cut off has none for an image that is wrong by far.
    share = min(((row.zero_gradients or 0) / row.examples for row in rows), default=0.0)
    if share > ZERO_GRADIENTS:
        yield Symptom(
            f"the gradient of the logits themselves is exactly zero for {percent(share)} of the images", masks=True
        )


def _more_finds_less(rows: Sequence[Row], overview: Overview) -> Iterator[Symptom]:
    if overview.claimed is None or not rows:
        return
    few, many, restarted = [(row.attack, row.accuracy) for row in rows]
    claim = (CLAIM, overview.claimed)
    for (weak, before), (strong, after) in ((few, claim), (claim, many), (claim, restarted)):
        if clearly_below(before, after, overview.examples, SLACK):
            yield Symptom(
                f"{strong} leaves {percent(after)}, more than {weak} with {percent(before)}: more effort finds less",
                decides="The same with shorter steps decides (--step-size): the number holds if more effort then "
                f"leaves at most {100 * SLACK:g} points more. --full keeps the steps.",
            )


def _pgd(label: str, steps: int = STEPS, restarts: int = 1) -> Attack:
    return Attack(label, PGD(PGDOptions(steps=steps, restarts=restarts)))


_OPTIONS = PGDOptions(steps=STEPS)
#: In the order in which they run, after the number on trial the cheapest first. First what follows the model's own
#: gradients well: what others break beyond that, these gradients miss.
_FIRST: tuple[Check, ...] = (
    Answers(),
    Check(
        "gradients",
        "share of zero gradients",
        (Attack("fgsm", FGSM(FGSMOptions())),),
        symptom=_zero_gradients,
    ),
    Check("pgd", "the number on trial", (_pgd(CLAIM),)),
    Slopes(),
    Check(
        "losses",
        "losses without the scale of the logits",
        (
            Attack("cw20", CW(CWOptions(steps=STEPS))),
            Attack("dlr20", DLR(_OPTIONS), classes=3),
            Attack(SCALE_FREE, ProbabilityMargin(_OPTIONS)),
        ),
        weakness="losses that do not depend on the scale of the logits (Carlini-Wagner margin, DLR, probability "
        "margin) break what the cross-entropy does not: the softmax is saturated or flattened, which blinds PGD",
        symptom=_zero_gradients_of_logits,
    ),
)
_THEN: tuple[Check, ...] = (
    Check(
        "noise",
        "random noise",
        (Attack("noise100", Noise(NoiseOptions(draws=100))),),
        weakness="random points of the ball break what PGD does not: its gradients point nowhere",
        masks=True,
        finds="random noise leaves {leaves}, fewer than the best attack along its gradients with {least}: the "
        "gradients point nowhere",
    ),
    BudgetCurve(),
    Check(
        "strength",
        "more steps and restarts",
        (_pgd("pgd5", 5), _pgd("pgd100", 100), _pgd(f"{CLAIM} x 5", restarts=5)),
        weakness="more steps and restarts break more: PGD-20 was too weak",
        symptom=_more_finds_less,
    ),
    DeadUnits(),
    Check(
        "black-box",
        "attack without gradients",
        (
            Attack(
                "square1000",
                AutoAttack(AutoAttackOptions(version="custom", attacks="square", queries=1000)),
                resumable=True,
            ),
        ),
        weakness="Square, which uses no gradients, breaks what all gradient attacks do not: the gradients are masked "
        "(a step without a derivative, or noise, between the pixels and the logits)",
        masks=True,
        finds="Square, which uses no gradients, leaves {leaves}, fewer than the best attack that uses them with "
        "{least}: the gradients are masked",
    ),
    Surrogate(),
)


def battery(*, full: bool, surrogates: bool = False, square: bool = True) -> tuple[Check, ...]:
    """The checks in the order in which they run.

    Args:
        full: whether AutoAttack attacks all images, not those nearest to an error.
        surrogates: whether there are other models, beside the one that is trained here.
        square: whether Square can attack images of this size in this norm.
    """
    checks = list(_FIRST)
    if surrogates:
        checks.append(Transfer())
    checks += _THEN
    if full:
        checks.append(AutoAttackCheck())
    else:
        checks.append(AutoAttackCheck(f"autoattack-{SAMPLE}", examples=SAMPLE))
    return tuple(check for check in checks if square or check.name != "black-box")
