"""The verdict: a function of the evidence, in the words of docs/evaluation.md."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from calfat_plugin.evaluators.alarms import ZERO_GRADIENTS
from calfat_plugin.judging.check import SLACK, Check, Symptom
from calfat_plugin.judging.findings import BATCHED, CHANGED, REMEMBERED, Findings, Overview, overview_of
from calfat_plugin.maths.intervals import Interval, wilson
from calfat_plugin.report.numbers import interval, listing, percent

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

    if not is_clear(_MOST):
        return None
    return 1 + bisect_left(range(1, _MOST), True, key=is_clear)


def conclude(
    checks: Sequence[Check],
    evidence: Sequence[Findings],
    norm: str,
    budget: str,
    examples: int,
    available: int | None = None,
) -> Verdict:
    """The verdict on what is known so far: that of the first line of the table whose condition holds.

    Args:
        checks: the battery.
        evidence: of the checks that are done.
        norm: of the budget on trial.
        budget: its eps, exact.
        examples: images on trial.
        available: how many images the test split has; None: as many.
    """
    overview = overview_of(evidence, budget, examples)
    if overview is None:
        return Verdict("not shown", "not shown", "Nothing has been measured yet.")
    case = _Case(overview, checks, evidence, f"within {norm} {budget} ({examples} test images)", available)
    for condition, verdict in _TABLE:
        if condition(case):
            return verdict(case)
    return case.holds()


class _Case:
    """What is known so far, the conditions of the table, and its verdicts."""

    def __init__(
        self,
        overview: Overview,
        checks: Sequence[Check],
        evidence: Sequence[Findings],
        where: str,
        available: int | None,
    ) -> None:
        self.overview = overview
        self.checks = {check.name: check for check in checks}
        self.evidence = evidence
        self.where = where
        self.available = available
        self.left = len(checks) - len(evidence)  # checks that are not done
        self.symptoms: dict[str, tuple[Symptom, ...]] = {}  # by the check that found them
        for findings in evidence:
            self.symptoms[findings.check] = tuple(self.checks[findings.check].symptoms(findings.rows, overview))
        self.all_symptoms = list(chain.from_iterable(self.symptoms.values()))
        self.against = tuple(symptom.text for symptom in self.all_symptoms)
        self.is_masked = any(symptom.masks for symptom in self.all_symptoms)
        self.ranges = {name: interval(*ends) for name, ends in overview.intervals.items()}

    @property
    def claimed(self) -> float:
        assert self.overview.claimed is not None  # as of every line of the table below the second
        return self.overview.claimed

    @property
    def difference(self) -> float:
        assert self.overview.difference is not None
        return self.overview.difference

    @property
    def word(self) -> Word:
        return word_of(self.difference, self.overview.intervals["difference"])

    @property
    def claim(self) -> str:
        return f"{percent(self.claimed)} {self.ranges['claimed']} under PGD-20 {self.where}"

    @property
    def worst(self) -> str:
        return f"{percent(self.overview.worst)} {self.ranges['worst']}"

    # --- one answer of the model says nothing about the next ---

    def is_unsteady(self) -> bool:
        return bool(_reasons_unsteady(self.overview))

    def unsteady(self) -> Verdict:
        return self.verdict(
            "not shown",
            f"Robustness {self.where} is not shown",
            (*_reasons_unsteady(self.overview), *self.against),
            clear=True,
            usable=False,
            why_unusable=_UNSTEADY,
        )

    # --- the number on trial is not there yet ---

    def is_not_measured(self) -> bool:
        return self.overview.claimed is None

    def not_measured(self) -> Verdict:
        return self.verdict("not shown", f"Robustness {self.where} is not measured yet", self.against)

    # --- the number is no more than guessing ---

    def is_guessing(self) -> bool:
        return self.claimed <= self.overview.guess

    def not_robust(self) -> Verdict:
        overview = self.overview
        causes: tuple[str, ...] = ()
        if overview.intervals["natural"].low <= overview.guess:
            causes = (
                f"it gets {percent(overview.natural)} {self.ranges['natural']} of the clean images, hardly more than "
                "guessing: it may want other pixels than [0, 1], such as normalised ones, or number the classes "
                "otherwise",
            )
        sentence = f"The model is not robust: it has {self.claim}, no more than guessing ({percent(overview.guess)})"
        return self.verdict("not robust", sentence, causes, clear=True)

    # --- others break clearly more ---

    def is_overstated(self) -> bool:
        return self.word == "overstated"

    def overstated(self) -> Verdict:
        broke = self.overview.contributions(self.evidence)
        # Checks whose attacks broke what PGD-20 did not, the strongest first; where none broke many, the strongest.
        by_strength = [name for name in broke if self.checks[name].weakness]
        by_strength.sort(key=lambda name: -broke[name])
        broke_more = [name for name in by_strength if broke[name] > SLACK]
        if not broke_more:
            broke_more = by_strength[:1]
        causes = [self.checks[name].weakness for name in broke_more]
        for name, symptoms in self.symptoms.items():
            if name not in broke_more:
                causes += [symptom.text for symptom in symptoms]
        hides = self.is_masked or any(self.checks[name].masks and broke[name] > SLACK for name in broke_more)
        points = f"{100 * self.difference:.1f} points"
        if self.left or hides:
            points = f"at least {points}"
        return self.verdict(
            "overstated",
            f"The {self.claim} overstate the robustness by {points} {self.ranges['difference']}: "
            f"all attacks together leave {self.worst}",
            tuple(causes),
            # The last check costs most, and could only add to what is overstated already.
            clear=self.left <= 1,
            usable=not hides,
            text=f"overstated by {points}",
        )

    # --- something speaks against the number ---

    def has_something_against_it(self) -> bool:
        return bool(self.against) or self._has_too_few_images()

    def _has_too_few_images(self) -> bool:
        return not self.left and not self.is_masked and self.word == "not shown"

    def not_shown(self) -> Verdict:
        images = None
        reasons = self.against
        if self._has_too_few_images():
            images = deciding(self.difference)
            reasons = (*reasons, self._too_few(images))
        decides = ""
        if self.all_symptoms and not self.is_masked:
            decides = self.all_symptoms[0].decides
        return self.verdict(
            "not shown",
            f"The {self.claim} are not shown to be robust",
            reasons,
            # Of a model that hides, the last check, AutoAttack, could not make the number usable.
            clear=self.is_masked and self.left <= 1,
            usable=not self.is_masked,
            images=images,
            decides=decides,
        )

    def _too_few(self, images: int | None) -> str:
        """That the images cannot decide, and what would: about so many, or no number of them."""
        tolerance = f"{100 * TOLERANCE:g}"
        text = (
            f"all attacks together leave {100 * self.difference:.1f} points fewer {self.ranges['difference']}, which "
            f"is between holds (the whole interval below {tolerance}) and overstated (over {tolerance}, and the whole "
            f"interval above {100 * SLACK:g}): {self.overview.examples} images are too few to be sure; --full, on the "
            "same ones, may show overstated, never holds"
        )
        if images is None:
            return f"{text}, and so near to {tolerance} no number of them would be enough. Report both numbers"
        if self.available is not None and images > self.available:
            return (
                f"{text}. About {images:,} would decide if the difference stays, and the test split has "
                f"{self.available:,}. Report both numbers"
            )
        return f"{text}. About {images:,} would decide if the difference stays (--examples {images})"

    # --- nothing speaks against it ---

    def is_unfinished(self) -> bool:
        return self.left > 0

    def so_far(self) -> Verdict:
        return self.verdict("not shown", f"The {self.claim} withstood {self._attacks()} so far", ())

    def holds(self) -> Verdict:
        points = f"{100 * self.difference:.1f} points fewer {self.ranges['difference']}"
        sentence = f"The {self.claim} hold: {self._attacks()} together leave {self.worst}, {points}"
        return self.verdict("holds", sentence, ())

    def _attacks(self) -> str:
        return listing([row.attack for row in self.overview.rows if row.left is not None])

    def verdict(
        self,
        word: Word,
        sentence: str,
        causes: tuple[str, ...],
        *,
        text: str = "",
        clear: bool = False,
        usable: bool = True,
        why_unusable: str = _UPPER_BOUND,
        images: int | None = None,
        decides: str = "",
    ) -> Verdict:
        """A verdict with all its shares, whose sentence ends with the first cause and what follows from it."""
        overview = self.overview
        text = text or word
        sentence = f"{sentence}."
        if causes:
            sentence = f"{sentence} Cause: {causes[0]}."
        if decides:
            sentence = f"{sentence} {decides}"
        if not usable:
            sentence = f"{sentence} {why_unusable.format(percent(overview.worst))}"
            text = f"{text}; the worst case is no usable number"
        return Verdict(
            word=word,
            text=text,
            sentence=sentence,
            causes=causes,
            clear=clear,
            usable=usable,
            images=images,
            natural=overview.natural,
            claimed=overview.claimed,
            worst=overview.worst,
            difference=overview.difference,
            intervals=overview.intervals,
        )


#: Conditions in the order in which they are tried, and what follows where one holds. Where none does, the number holds.
_TABLE: tuple[tuple[Callable[[_Case], bool], Callable[[_Case], Verdict]], ...] = (
    (_Case.is_unsteady, _Case.unsteady),
    (_Case.is_not_measured, _Case.not_measured),
    (_Case.is_guessing, _Case.not_robust),
    (_Case.is_overstated, _Case.overstated),
    (_Case.has_something_against_it, _Case.not_shown),
    (_Case.is_unfinished, _Case.so_far),
)


def _reasons_unsteady(overview: Overview) -> list[str]:
    """Why one answer of the model says nothing about the next; none where it does."""
    changed = overview.facts.get(CHANGED, 0.0)
    batched = overview.facts.get(BATCHED, 0.0)
    remembered = overview.facts.get(REMEMBERED, 0.0)
    if changed > 0:
        accuracies = [row.accuracy for row in overview.rows if "draw" in row.attack]
        spread = ""
        if accuracies:
            spread = f", and the same attack leaves from {percent(min(accuracies))} to {percent(max(accuracies))}"
        return [
            f"the model is randomised: asked about the same images again, it gives other logits for "
            f"{percent(changed)} of them{spread}. One run decides nothing: average gradients and verdicts over "
            "many draws (autoattack with version: rand)"
        ]
    reasons = []
    if batched > ZERO_GRADIENTS:
        reasons.append(
            f"the answer about an image depends on the other images of its batch, or on their order, for "
            f"{percent(batched)} of the images. An accuracy is then one of the batches, not of the images: let the "
            "model use statistics that it keeps (running averages), not the batch's"
        )
    if remembered > ZERO_GRADIENTS:
        reasons.append(
            f"the answer depends on what the model was asked before: a freshly loaded copy answers otherwise about "
            f"{percent(remembered)} of the points. What it remembers is not its robustness: judge it without its memory"
        )
    if not reasons and overview.disputed > ZERO_GRADIENTS:
        reasons.append(
            "a freshly loaded copy, asked in another order and in other batches, answers otherwise about up to "
            f"{percent(overview.disputed)} of an attack's adversarial images: the answer depends on something else "
            "than the image. Find it (memory, counters, the batch), and judge the model without it"
        )
    return reasons
