"""The verdict: a function of the evidence, in the words of docs/evaluation.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from calfat_plugin.report.numbers import percent
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
        worst: what all attacks leave together; None before the first attack.
    """

    word: Word
    text: str
    sentence: str
    causes: tuple[str, ...] = ()
    clear: bool = False
    natural: float | None = None
    claimed: float | None = None
    worst: float | None = None


def conclude(checks: Sequence[Check], evidence: Sequence[Evidence], norm: str, budget: str) -> Verdict:
    """The verdict on what is known so far.

    Args:
        checks: the battery.
        evidence: of those of its checks that are done, in order.
        norm, budget: of the ball on trial; eps as an exact text.
    """
    facts = found(evidence, budget)
    if facts is None:
        return Verdict("not shown", "not shown", "Nothing has been measured yet.")
    by_name = {check.name: check for check in checks}
    symptoms = {each.check: tuple(by_name[each.check].symptoms(each.rows, facts)) for each in evidence}
    against = tuple(chain.from_iterable(symptoms.values()))
    where = f"within {norm} {budget} ({facts.examples} test images)"
    if facts.changed > 0:
        return _verdict(facts, "not shown", "not shown", f"Robustness {where} is not shown", against, clear=True)
    if facts.claimed is None:
        return _verdict(facts, "not shown", "not shown", f"Robustness {where} is not measured yet", against)
    claim = f"{percent(facts.claimed)} under PGD-20 {where}"
    if facts.claimed <= facts.guess:
        sentence = f"The model is not robust: it has {claim}, no more than guessing ({percent(facts.guess)})"
        return _verdict(facts, "not robust", "not robust", sentence, (), clear=True)
    if (gap := facts.claimed - facts.worst) > TOLERANCE:
        left = len(checks) - len(evidence)
        text = f"overstated by {100 * gap:.1f} points"
        broke = facts.contributions(evidence)
        weak = _by_strength({name: share for name, share in broke.items() if by_name[name].weakness})
        others = chain.from_iterable(texts for name, texts in symptoms.items() if name not in weak)
        causes = (*(by_name[name].weakness for name in weak), *others)
        sentence = (
            f"The {claim} overstate the robustness by {'at least ' if left else ''}{100 * gap:.1f} points: "
            f"all attacks together leave {percent(facts.worst)}"
        )
        # The last check costs most, and could only add to what is overstated already.
        return _verdict(facts, "overstated", text, sentence, causes, clear=left <= 1)
    if against:
        return _verdict(facts, "not shown", "not shown", f"The {claim} are not shown to be robust", against)
    attacks = [row.attack for row in facts.rows if row.left is not None]
    if len(evidence) < len(checks):
        return _verdict(facts, "not shown", "not shown", f"The {claim} withstood {listing(attacks)} so far", ())
    sentence = f"The {claim} hold: {listing(attacks)} together leave {percent(facts.worst)}"
    return _verdict(facts, "holds", "holds", sentence, ())


def _verdict(
    facts: Found, word: Word, text: str, sentence: str, causes: tuple[str, ...], *, clear: bool = False
) -> Verdict:
    whole = f"{sentence}. Cause: {causes[0]}." if causes else f"{sentence}."
    return Verdict(word, text, whole, causes, clear, facts.natural, facts.claimed, facts.worst)


def _by_strength(contributions: dict[str, float]) -> list[str]:
    """The checks that broke more than the slack, the strongest first; where none did, the strongest."""
    ordered = sorted(contributions, key=lambda name: -contributions[name])
    return [name for name in ordered if contributions[name] > SLACK] or ordered[:1]
