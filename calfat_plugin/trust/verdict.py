"""The verdict: a function of the evidence, in the words of docs/evaluation.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from calfat_plugin.maths.intervals import Interval
from calfat_plugin.report.numbers import interval, percent
from calfat_plugin.report.words import listing
from calfat_plugin.trust.check import SLACK, Check
from calfat_plugin.trust.evidence import Evidence, Found, found

Word = Literal["holds", "overstated", "not robust", "not shown"]

#: How far (a share) AutoAttack and the others may go below PGD-20 while the number still holds. Adversarially trained
#: networks without masked gradients lose 2 to 4 points; CalFAT's release preset, with flattened logits, about 10.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Verdict:
    """What may be said about the number on trial.

    Attributes:
        word: one of four.
        text: the same with its number: ``overstated by 10.4 points``.
        sentence: for a reviewer, with budget, numbers and cause.
        causes: what speaks against the number, the strongest first, which is also in ``sentence``.
        clear: whether the checks that are left would change neither the word nor, by much, its number.
        natural: clean accuracy; None before the first check.
        claimed: accuracy under PGD-20; None: not measured.
        worst: what all attacks leave together; None before the first check.
        difference: the share of images that PGD-20 leaves and others break; None: PGD-20 is not measured.
        intervals: of these four shares, by name.
    """

    word: Word
    text: str
    sentence: str
    causes: tuple[str, ...] = ()
    clear: bool = False
    natural: float | None = None
    claimed: float | None = None
    worst: float | None = None
    difference: float | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)


def conclude(checks: Sequence[Check], evidence: Sequence[Evidence], norm: str, budget: str, examples: int) -> Verdict:
    """The verdict on what is known so far.

    Args:
        checks: the battery.
        evidence: of those of its checks that are done, in order.
        norm, budget: of the ball on trial; eps as an exact text.
        examples: how many images are attacked.
    """
    facts = found(evidence, budget, examples)
    if facts is None:
        return Verdict("not shown", "not shown", "Nothing has been measured yet.")
    by_name = {check.name: check for check in checks}
    symptoms = {each.check: tuple(by_name[each.check].symptoms(each.rows, facts)) for each in evidence}
    against = tuple(chain.from_iterable(symptoms.values()))
    where = f"within {norm} {budget} ({examples} test images)"
    if facts.changed > 0:
        return _verdict(facts, "not shown", "not shown", f"Robustness {where} is not shown", against, clear=True)
    if facts.claimed is None or facts.difference is None:
        return _verdict(facts, "not shown", "not shown", f"Robustness {where} is not measured yet", against)
    ranges = {name: interval(*ends) for name, ends in facts.intervals.items()}
    claim = f"{percent(facts.claimed)} {ranges['claimed']} under PGD-20 {where}"
    worst = f"{percent(facts.worst)} {ranges['worst']}"
    points = f"{100 * facts.difference:.1f} points"
    if facts.claimed <= facts.guess:
        sentence = f"The model is not robust: it has {claim}, no more than guessing ({percent(facts.guess)})"
        return _verdict(facts, "not robust", "not robust", sentence, (), clear=True)
    if facts.difference > TOLERANCE and facts.intervals["difference"].low > SLACK:
        left = len(checks) - len(evidence)
        sentence = (
            f"The {claim} overstate the robustness by {'at least ' if left else ''}{points} {ranges['difference']}: "
            f"all attacks together leave {worst}"
        )
        causes = _causes(facts, by_name, evidence, symptoms)
        # The last check costs most, and could only add to what is overstated already.
        return _verdict(facts, "overstated", f"overstated by {points}", sentence, causes, clear=left <= 1)
    if facts.difference > TOLERANCE:
        few = f"all attacks together leave {points} fewer {ranges['difference']}, but of too few images to be sure"
        against = (f"{few}: attack more of them (--examples, --full)", *against)
    if against:
        return _verdict(facts, "not shown", "not shown", f"The {claim} are not shown to be robust", against)
    attacks = listing([row.attack for row in facts.rows if row.left is not None])
    if len(evidence) < len(checks):
        return _verdict(facts, "not shown", "not shown", f"The {claim} withstood {attacks} so far", ())
    sentence = f"The {claim} hold: {attacks} together leave {worst}, {points} fewer {ranges['difference']}"
    return _verdict(facts, "holds", "holds", sentence, ())


def _causes(
    facts: Found, checks: Mapping[str, Check], evidence: Sequence[Evidence], symptoms: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Of an overstated number: what broke more, the strongest first, then what else speaks against it."""
    broke = facts.contributions(evidence)
    weak = _by_strength({name: share for name, share in broke.items() if checks[name].weakness})
    others = chain.from_iterable(texts for name, texts in symptoms.items() if name not in weak)
    return (*(checks[name].weakness for name in weak), *others)


def _verdict(
    facts: Found, word: Word, text: str, sentence: str, causes: tuple[str, ...], *, clear: bool = False
) -> Verdict:
    whole = f"{sentence}. Cause: {causes[0]}." if causes else f"{sentence}."
    shares = (facts.natural, facts.claimed, facts.worst, facts.difference)
    return Verdict(word, text, whole, causes, clear, *shares, facts.intervals)


def _by_strength(contributions: dict[str, float]) -> list[str]:
    """The checks that broke more than the slack, the strongest first; where none did, the strongest."""
    ordered = sorted(contributions, key=lambda name: -contributions[name])
    return [name for name in ordered if contributions[name] > SLACK] or ordered[:1]
