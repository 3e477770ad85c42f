"""The battery: a table of checks, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from calfat_plugin.evaluators.alarms import ZERO_GRADIENTS, clearly_below
from calfat_plugin.evaluators.autoattack.autoattack import AutoAttack, AutoAttackOptions
from calfat_plugin.evaluators.gradient import CW, FGSM, PGD, CWOptions, FGSMOptions, PGDOptions
from calfat_plugin.judging.attacks import DLR, Noise, NoiseOptions, ProbabilityMargin
from calfat_plugin.judging.check import SLACK, STEP, STEPS, Attack, Check, Symptom
from calfat_plugin.judging.checks import (
    SCALE_FREE,
    Answers,
    AutoAttackCheck,
    BudgetCurve,
    DeadUnits,
    Slopes,
    Surrogate,
    Transfer,
)
from calfat_plugin.judging.findings import CLAIM, Found, Row
from calfat_plugin.report.numbers import percent

#: AutoAttack attacks so many images at a time unless all checks are asked for.
SAMPLE = 32


def _zero_gradients(rows: Sequence[Row], found: Found) -> Iterator[Symptom]:
    for row in rows:
        share = (row.zero_gradients or 0) / row.examples
        if share > ZERO_GRADIENTS:
            yield Symptom(
                f"the gradient of the cross-entropy is exactly zero for {percent(share)} of the images",
                decides=f"Where it is for more than {percent(ZERO_GRADIENTS)}, PGD-20 on smaller logits decides "
                "(calfat attack --attacks scaled=pgd20 --set scaled.logit_scale=0.1): the number holds if that "
                "leaves no fewer. --full does not run it.",
            )


def _zero_gradients_of_logits(rows: Sequence[Row], found: Found) -> Iterator[Symptom]:
    # The least of them: a loss that is cut off has none for an image that is wrong by far.
    share = min(((row.zero_gradients or 0) / row.examples for row in rows), default=0.0)
    if share > ZERO_GRADIENTS:
        yield Symptom(
            f"the gradient of the logits themselves is exactly zero for {percent(share)} of the images", masks=True
        )


def _more_finds_less(rows: Sequence[Row], found: Found) -> Iterator[Symptom]:
    if found.claimed is None or not rows:
        return
    few, many, restarted = ((row.attack, row.accuracy) for row in rows)
    claim = (CLAIM, found.claimed)
    for (weak, before), (strong, after) in (*pairwise((few, claim, many)), (claim, restarted)):
        if clearly_below(before, after, found.examples, SLACK):
            yield Symptom(
                f"{strong} leaves {percent(after)}, more than {weak} with {percent(before)}: more effort finds less",
                decides="The same with shorter steps decides (--step-size): the number holds if more effort then "
                f"leaves at most {100 * SLACK:g} points more. --full keeps the steps.",
            )


def _pgd(label: str, steps: int = STEPS, restarts: int = 1) -> Attack:
    return Attack(label, PGD(PGDOptions(steps=steps, restarts=restarts)), steps * restarts * STEP)


_OPTIONS, _PASSES = PGDOptions(steps=STEPS), STEPS * STEP
#: First what follows the model's own gradients well: what others break beyond that, these gradients miss.
_FIRST = (
    Answers(),
    Check(
        "gradients",
        "share of zero gradients",
        (Attack("fgsm", FGSM(FGSMOptions()), 1 + STEP),),
        symptom=_zero_gradients,
    ),
    Check("pgd", "the number on trial", (_pgd(CLAIM),)),
    Slopes(),
    Check(
        "losses",
        "losses without the scale of the logits",
        (
            Attack("cw20", CW(CWOptions(steps=STEPS)), _PASSES),
            Attack("dlr20", DLR(_OPTIONS), _PASSES, classes=3),
            Attack(SCALE_FREE, ProbabilityMargin(_OPTIONS), _PASSES),
        ),
        weakness="losses that do not depend on the scale of the logits (Carlini-Wagner margin, DLR, probability "
        "margin) break what the cross-entropy does not: the softmax is saturated or flattened, which blinds PGD",
        symptom=_zero_gradients_of_logits,
    ),
)
_THEN = (
    Check(
        "noise",
        "random noise",
        (Attack("noise100", Noise(NoiseOptions(draws=100)), 100),),
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
    Surrogate(),
    Check(
        "black-box",
        "attack without gradients",
        (
            Attack(
                "square1000",
                AutoAttack(AutoAttackOptions(version="custom", attacks="square", queries=1000)),
                1000,
                resumable=True,
            ),
        ),
        weakness="Square, which uses no gradients, breaks what all gradient attacks do not: the gradients are masked "
        "(a step without a derivative, or noise, between the pixels and the logits)",
        masks=True,
        finds="Square, which uses no gradients, leaves {leaves}, fewer than the best attack that uses them with "
        "{least}: the gradients are masked",
    ),
)


def battery(*, full: bool, surrogates: int = 0, square: bool = True) -> tuple[Check, ...]:
    """The checks in the order in which they run: after the number on trial the cheapest first.

    Args:
        full: whether AutoAttack attacks all images, not those nearest to an error.
        surrogates: how many other models there are, beside the one that is trained here.
        square: whether Square can attack images of this size in this norm.
    """
    then = [check for check in _THEN if square or check.name != "black-box"]
    then += [Transfer(surrogates=surrogates)] if surrogates else []
    last = AutoAttackCheck() if full else AutoAttackCheck(f"autoattack-{SAMPLE}", examples=SAMPLE)
    return (*_FIRST, *sorted(then, key=lambda check: check.cost(SAMPLE)), last)
