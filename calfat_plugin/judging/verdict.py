"""The verdict: a function of the evidence, in the words of docs/evaluation.md."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from calfat_plugin.evaluators.alarms import ZERO_GRADIENTS
from calfat_plugin.judging.check import SLACK, Check, Symptom
from calfat_plugin.judging.findings import BATCHED, CHANGED, REMEMBERED, Findings, Found, found
from calfat_plugin.maths.intervals import Interval, wilson
from calfat_plugin.report.labels import listing
from calfat_plugin.report.numbers import interval, percent

Word = Literal["holds", "overstated", "not robust", "not shown"]

#: How far (a share) AutoAttack and the others may go below PGD-20 while the number still holds: our choice. Honest
#: adversarially trained networks lose a few points, and more where eps is large (up to 8 were seen); CalFAT's release
#: preset, with flattened logits, about 10.
TOLERANCE = 0.05
_UPPER_BOUND = (
    "The worst case, {}, is no usable number, only an upper bound: the model hides from attacks. Attack it without the "
    "part that does (the evaluator transfer takes such a model), and report what that leaves; --full attacks the same "
    "model."
)
_UNSTEADY = "No number of such a model is usable."
_MOST = 1_000_000  # images; beyond that nothing is advised


@dataclass(frozen=True)
class Verdict:
    """What may be said about the number on trial.

    Attributes:
        word: one of four.
        text: the same with its number: ``overstated by 10.4 points``.
        sentence: for a reviewer, with budget, numbers and cause.
        causes: what speaks against the number, the strongest first, which is also in ``sentence``.
        clear: whether the checks that are left would change neither the word nor, by much, its number.
        usable: whether ``worst`` may be reported; not where the model hides from attacks, since it is then an upper
            bound that an attack on the undefended parts goes below.
        images: about how many would decide, if ``difference`` stays as it is; None: more would not, or none are needed.
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
    usable: bool = True
    images: int | None = None
    natural: float | None = None
    claimed: float | None = None
    worst: float | None = None
    difference: float | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)


def word_of(difference: float, interval: Interval) -> Word:
    """The word for a number against which nothing speaks but the difference."""
    if difference > TOLERANCE and interval.low > SLACK:
        return "overstated"
    return "holds" if interval.high < TOLERANCE else "not shown"


def deciding(difference: float) -> int | None:
    """About how many images a clear word needs, if they show the same difference; None: no reasonable number."""

    def is_clear(images: int) -> bool:
        return word_of(difference, wilson(difference, images)) != "not shown"

    return 1 + bisect_left(range(1, _MOST), True, key=is_clear) if is_clear(_MOST) else None


def conclude(
    checks: Sequence[Check],
    evidence: Sequence[Findings],
    norm: str,
    budget: str,
    examples: int,
    available: int | None = None,
) -> Verdict:
    """The verdict on what is known so far; ``available``: how many images the test split has, None: as many."""
    facts = found(evidence, budget, examples)
    if facts is None:
        return Verdict("not shown", "not shown", "Nothing has been measured yet.")
    by_name = {check.name: check for check in checks}
    symptoms = {each.check: tuple(by_name[each.check].symptoms(each.rows, facts)) for each in evidence}
    every = tuple(chain.from_iterable(symptoms.values()))
    against, masked = tuple(symptom.text for symptom in every), any(symptom.masks for symptom in every)
    where = f"within {norm} {budget} ({examples} test images)"
    unsteady = tuple(_unsteady(facts))
    if unsteady:
        causes = (*unsteady, *against)
        sentence = f"Robustness {where} is not shown"
        return _verdict(facts, "not shown", sentence, causes, clear=True, usable=False, why=_UNSTEADY)
    if facts.claimed is None or facts.difference is None:
        return _verdict(facts, "not shown", f"Robustness {where} is not measured yet", against)
    ranges = {name: interval(*ends) for name, ends in facts.intervals.items()}
    claim = f"{percent(facts.claimed)} {ranges['claimed']} under PGD-20 {where}"
    worst = f"{percent(facts.worst)} {ranges['worst']}"
    points = f"{100 * facts.difference:.1f} points"
    if facts.claimed <= facts.guess:
        sentence = f"The model is not robust: it has {claim}, no more than guessing ({percent(facts.guess)})"
        natural = (
            f"it gets {percent(facts.natural)} {ranges['natural']} of the clean images, hardly more than guessing: it "
            "may want other pixels than [0, 1], such as normalised ones, or number the classes otherwise"
        )
        causes = (natural,) if facts.intervals["natural"].low <= facts.guess else ()
        return _verdict(facts, "not robust", sentence, causes, clear=True)
    left = len(checks) - len(evidence)
    word = word_of(facts.difference, facts.intervals["difference"])
    if word == "overstated":
        causes, hides = _causes(facts, by_name, evidence, symptoms)
        at_least = "at least " if left or hides else ""
        sentence = (
            f"The {claim} overstate the robustness by {at_least}{points} {ranges['difference']}: "
            f"all attacks together leave {worst}"
        )
        # The last check costs most, and could only add to what is overstated already.
        return _verdict(
            facts, word, sentence, causes, clear=left <= 1, usable=not hides, text=f"overstated by {at_least}{points}"
        )
    images = None
    if not left and not masked and word == "not shown":
        images = deciding(facts.difference)
        against = (*against, _too_few(facts.difference, ranges["difference"], images, examples, available))
    if against:
        sentence = f"The {claim} are not shown to be robust"
        # Of a model that hides, the last check, AutoAttack, could not make the number usable.
        return _verdict(
            facts,
            "not shown",
            sentence,
            against,
            clear=masked and left <= 1,
            usable=not masked,
            images=images,
            decides=every[0].decides if every and not masked else "",
        )
    attacks = listing([row.attack for row in facts.rows if row.left is not None])
    if left:
        return _verdict(facts, "not shown", f"The {claim} withstood {attacks} so far", ())
    sentence = f"The {claim} hold: {attacks} together leave {worst}, {points} fewer {ranges['difference']}"
    return _verdict(facts, "holds", sentence, ())


def _unsteady(facts: Found) -> Iterator[str]:
    """Why one answer of the model says nothing about the next."""
    changed, batched, remembered = (facts.facts.get(name, 0.0) for name in (CHANGED, BATCHED, REMEMBERED))
    if changed > 0:
        spread = [row.accuracy for row in facts.rows if "draw" in row.attack]
        text = f", and the same attack leaves from {percent(min(spread))} to {percent(max(spread))}" if spread else ""
        yield (
            f"the model is randomised: asked about the same images again, it gives other logits for "
            f"{percent(changed)} of them{text}. One run decides nothing: average gradients and verdicts over "
            "many draws (autoattack with version: rand)"
        )
        return
    if batched > ZERO_GRADIENTS:
        yield (
            f"the answer about an image depends on the other images of its batch, or on their order, for "
            f"{percent(batched)} of the images. An accuracy is then one of the batches, not of the images: let the "
            "model use statistics that it keeps (running averages), not the batch's"
        )
    if remembered > ZERO_GRADIENTS:
        yield (
            f"the answer depends on what the model was asked before: a freshly loaded copy answers otherwise about "
            f"{percent(remembered)} of the points. What it remembers is not its robustness: judge it without its memory"
        )
    if not (batched > ZERO_GRADIENTS or remembered > ZERO_GRADIENTS) and facts.disputed > ZERO_GRADIENTS:
        yield (
            f"a freshly loaded copy, asked in another order and in other batches, answers otherwise about up to "
            f"{percent(facts.disputed)} of an attack's adversarial images: the answer depends on something else than "
            "the image. Find it (memory, counters, the batch), and judge the model without it"
        )


def _too_few(difference: float, range_: str, images: int | None, examples: int, available: int | None) -> str:
    """That the images cannot decide, and what would."""
    text = (
        f"all attacks together leave {100 * difference:.1f} points fewer {range_}, which is between holds (the whole "
        f"interval below {100 * TOLERANCE:g}) and overstated (over {100 * TOLERANCE:g}, and the whole interval above "
        f"{100 * SLACK:g}): {examples} images are too few to be sure; --full, on the same ones, may show overstated, "
        "never holds"
    )
    if images is None:
        return f"{text}, and so near to {100 * TOLERANCE:g} no number of them would be enough. Report both numbers"
    if available is not None and images > available:
        return (
            f"{text}. About {images:,} would decide if the difference stays, and the test split has {available:,}. "
            "Report both numbers"
        )
    return f"{text}. About {images:,} would decide if the difference stays (--examples {images})"


def _causes(
    facts: Found, checks: Mapping[str, Check], evidence: Sequence[Findings], symptoms: Mapping[str, Sequence[Symptom]]
) -> tuple[tuple[str, ...], bool]:
    """Of an overstated number: what broke more, the strongest first, then what else speaks against it; and whether
    one of them says that the model hides from attacks."""
    broke = facts.contributions(evidence)
    ordered = sorted((name for name in broke if checks[name].weakness), key=lambda name: -broke[name])
    weak = [name for name in ordered if broke[name] > SLACK] or ordered[:1]  # where none did, the strongest
    others = tuple(chain.from_iterable(found for name, found in symptoms.items() if name not in weak))
    hides = any(checks[name].masks and broke[name] > SLACK for name in weak) or any(
        symptom.masks for symptom in chain.from_iterable(symptoms.values())
    )
    return (*(checks[name].weakness for name in weak), *(symptom.text for symptom in others)), hides


def _verdict(
    facts: Found,
    word: Word,
    sentence: str,
    causes: tuple[str, ...],
    *,
    clear: bool = False,
    usable: bool = True,
    why: str = _UPPER_BOUND,
    text: str = "",
    images: int | None = None,
    decides: str = "",
) -> Verdict:
    whole = f"{sentence}. Cause: {causes[0]}." if causes else f"{sentence}."
    if decides:
        whole = f"{whole} {decides}"
    if not usable:
        whole = f"{whole} {why.format(percent(facts.worst))}"
        text = f"{text or word}; the worst case is no usable number"
    shares = (facts.natural, facts.claimed, facts.worst, facts.difference)
    return Verdict(word, text or word, whole, causes, clear, usable, images, *shares, facts.intervals)
