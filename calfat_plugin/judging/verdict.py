"""The verdict of ``calfat trust``, computed from the findings of the checks that are done so far.

The number on trial is the accuracy under PGD-20. ``conclude`` goes through the possible verdicts in a fixed order and
gives the first that fits. docs/evaluation.md defines the words.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from calfat_plugin.judging.check import SLACK, Check, Symptom
from calfat_plugin.judging.findings import BATCHED, CHANGED, REMEMBERED, Findings, Overview, overview_of
from calfat_plugin.maths.intervals import Interval, wilson
from calfat_plugin.report.numbers import interval as interval_text
from calfat_plugin.report.numbers import listing, percent

Word = Literal["holds", "overstated", "not robust", "not shown"]

#: How far (a share of the images) all attacks together may go below PGD-20 while the number still holds. Our choice:
#: honest adversarially trained networks lose a few points, and more where eps is large (up to 8 were seen); CalFAT's
#: release preset, with flattened logits, loses about 10.
TOLERANCE = 0.05
# The largest share of images whose logits may differ when the other images of the batch, the earlier questions or the
# copy of the model differ. It is not 0, because rounding depends on the batch. judging/questions.py uses the same 1 %.
_UNSTEADY_SHARE = 0.01
# Last sentences of a verdict whose worst case is no usable number: the model hides from attacks, or is unsteady.
_UPPER_BOUND = (
    "The worst case, {}, is no usable number, only an upper bound: the model hides from attacks. Attack it without the "
    "part that does (the evaluator transfer takes such a model), and report what that leaves; --full attacks the same "
    "model."
)
_UNSTEADY = "No number of such a model is usable."
_MOST_IMAGES = 1_000_000  # no larger number of images is advised


@dataclass(frozen=True)
class Verdict:
    """What may be said about the number on trial, the accuracy under PGD-20.

    Attributes:
        word: ``holds``, ``overstated``, ``not robust`` or ``not shown``.
        text: the word, with the number of points if it is ``overstated``: ``overstated by 10.4 points``. It also says
            if the worst case is no usable number.
        sentence: the verdict for a reviewer, with budget, numbers and the first cause.
        causes: what speaks against the number. The first is also in ``sentence``; for ``overstated`` it is the check
            that broke most images.
        clear: whether ``calfat trust`` may stop here and leave out the checks that are not done yet. True for
            ``not robust``, and for a model whose answers depend on more than the image. True for ``overstated``, and
            for a model that hides from attacks, once at most the last check is left: that check costs most, and can
            only lower ``worst``. Otherwise False, also when no check is left, as for ``holds``.
        usable: whether ``worst`` may be reported. False for a model whose answers depend on more than the image, and
            for one that hides from attacks: an attack on the undefended parts would leave less.
        images: about how many images would decide, if ``difference`` stays as it is. None: the number of images is not
            what keeps the verdict open, or no number up to a million would decide.
        natural: clean accuracy; None before the first check.
        claimed: accuracy under PGD-20; None: not measured.
        worst: the accuracy that all attacks leave together; None before the first check.
        difference: ``claimed`` minus ``worst``, at least 0; None: PGD-20 is not measured.
        intervals: name to 95 % interval, for each of the shares ``natural``, ``claimed``, ``worst`` and ``difference``
            that is measured.
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
    """The word that follows from the difference alone, if nothing else speaks against the number.

    Args:
        difference: the difference in ``Verdict``.
        interval: its 95 % interval.
    """
    if difference > TOLERANCE and interval.low > SLACK:
        return "overstated"
    if interval.high < TOLERANCE:
        return "holds"
    return "not shown"


def deciding(difference: float) -> int | None:
    """The smallest number of images that would decide between ``holds`` and ``overstated`` at this difference.

    None: up to a million images would not decide.
    """

    def would_decide(images: int) -> bool:
        return word_of(difference, wilson(difference, images)) != "not shown"

    if not would_decide(_MOST_IMAGES):
        return None
    # The interval gets narrower with every image, so all numbers above the smallest one decide, too. Position 0 of the
    # range is 1 image.
    return 1 + bisect_left(range(1, _MOST_IMAGES), True, key=would_decide)


def conclude(
    checks: Sequence[Check],
    evidence: Sequence[Findings],
    norm: str,
    budget: str,
    examples: int,
    available: int | None = None,
) -> Verdict:
    """The verdict on what is known so far. Where several verdicts fit, the first one below is given.

    Args:
        checks: all checks of the battery.
        evidence: the findings of the checks that are done.
        norm: the norm of the budget on trial.
        budget: the eps of the budget on trial, as exact text (``8/255``).
        examples: number of images on trial.
        available: how many images the test split has, which limits what is advised; None: not known, no limit.
    """
    overview = overview_of(evidence, budget, examples)
    if overview is None:
        return Verdict("not shown", "not shown", "Nothing has been measured yet.")
    setting = f"within {norm} {budget} ({examples} test images)"
    case = _Case(overview, checks, evidence, setting, available)
    if case.is_unsteady():
        return case.unsteady()
    if case.is_not_measured():
        return case.not_measured()
    if case.is_guessing():
        return case.not_robust()
    if case.is_overstated():
        return case.overstated()
    if case.has_something_against_it():
        return case.not_shown()
    if case.is_unfinished():
        return case.so_far()
    return case.holds()


class _Case:
    """What is known so far. For each verdict: the condition under which it fits, and the method that makes it."""

    def __init__(
        self,
        overview: Overview,
        checks: Sequence[Check],
        evidence: Sequence[Findings],
        setting: str,
        available: int | None,
    ) -> None:
        self.overview = overview
        self.checks = {check.name: check for check in checks}
        self.evidence = evidence
        self.setting = setting  # norm, budget and number of images, as sentences give them
        self.available = available
        self.checks_left = len(checks) - len(evidence)
        self.reasons_unsteady = _reasons_unsteady(overview)
        self.symptoms_of: dict[str, tuple[Symptom, ...]] = {}  # name of a check to the symptoms that it found
        self.symptoms: list[Symptom] = []  # of all checks
        for findings in evidence:
            check = self.checks[findings.check]
            symptoms = tuple(check.symptoms(findings.rows, overview))
            self.symptoms_of[check.name] = symptoms
            self.symptoms += symptoms
        self.symptom_texts = tuple(symptom.text for symptom in self.symptoms)
        self.model_hides = any(symptom.masks for symptom in self.symptoms)  # from attacks
        # Name to ``[79.3, 86.7]`` for each share that is measured.
        self.interval_texts = {name: interval_text(*ends) for name, ends in overview.intervals.items()}

    # The next two are None until PGD-20 is measured. They are only read behind ``is_not_measured``.

    @property
    def claimed(self) -> float:
        assert self.overview.claimed is not None
        return self.overview.claimed

    @property
    def difference(self) -> float:
        assert self.overview.difference is not None
        return self.overview.difference

    @property
    def word_by_difference(self) -> Word:
        return word_of(self.difference, self.overview.intervals["difference"])

    @property
    def claim_text(self) -> str:
        return f"{percent(self.claimed)} {self.interval_texts['claimed']} under PGD-20 {self.setting}"

    @property
    def worst_text(self) -> str:
        return f"{percent(self.overview.worst)} {self.interval_texts['worst']}"

    # --- one answer of the model says nothing about the next ---

    def is_unsteady(self) -> bool:
        return len(self.reasons_unsteady) > 0

    def unsteady(self) -> Verdict:
        return self._verdict(
            "not shown",
            f"Robustness {self.setting} is not shown",
            (*self.reasons_unsteady, *self.symptom_texts),
            clear=True,
            usable=False,
            why_unusable=_UNSTEADY,
        )

    # --- the number on trial is not there yet ---

    def is_not_measured(self) -> bool:
        return self.overview.claimed is None

    def not_measured(self) -> Verdict:
        return self._verdict("not shown", f"Robustness {self.setting} is not measured yet", self.symptom_texts)

    # --- the number is no more than guessing ---

    def is_guessing(self) -> bool:
        return self.claimed <= self.overview.guess

    def not_robust(self) -> Verdict:
        overview = self.overview
        causes: tuple[str, ...] = ()
        if overview.intervals["natural"].low <= overview.guess:
            natural = f"{percent(overview.natural)} {self.interval_texts['natural']}"
            causes = (
                f"it gets {natural} of the clean images, hardly more than guessing: it may want other pixels than "
                "[0, 1], such as normalised ones, or number the classes otherwise",
            )
        guess = percent(overview.guess)
        sentence = f"The model is not robust: it has {self.claim_text}, no more than guessing ({guess})"
        return self._verdict("not robust", sentence, causes, clear=True)

    # --- other attacks break clearly more than PGD-20 ---

    def is_overstated(self) -> bool:
        return self.word_by_difference == "overstated"

    def overstated(self) -> Verdict:
        # Check to the share of images that its attacks broke and that withstood all checks before it.
        share_broken = self.overview.contributions(self.evidence)
        # Only a check with a weakness can name the cause. The check that broke most comes first.
        can_name_cause = [name for name in share_broken if self.checks[name].weakness != ""]
        can_name_cause.sort(key=lambda name: share_broken[name], reverse=True)
        broke_many = [name for name in can_name_cause if share_broken[name] > SLACK]
        blamed = broke_many
        if not blamed:  # many checks broke a few images each
            blamed = can_name_cause[:1]
        causes = [self.checks[name].weakness for name in blamed]
        for name, symptoms in self.symptoms_of.items():
            if name not in blamed:
                causes += [symptom.text for symptom in symptoms]
        hides = self.model_hides or any(self.checks[name].masks for name in broke_many)
        points = f"{100 * self.difference:.1f} points"
        if self.checks_left > 0 or hides:  # another attack may break still more
            points = f"at least {points}"
        return self._verdict(
            "overstated",
            f"The {self.claim_text} overstate the robustness by {points} {self.interval_texts['difference']}: "
            f"all attacks together leave {self.worst_text}",
            tuple(causes),
            # The last check costs most, and what it breaks can only add to the difference.
            clear=self.checks_left <= 1,
            usable=not hides,
            text=f"overstated by {points}",
        )

    # --- something speaks against the number ---

    def has_something_against_it(self) -> bool:
        return len(self.symptoms) > 0 or self._has_too_few_images()

    def _has_too_few_images(self) -> bool:
        """Whether all checks are done, and the interval of the difference is too wide to decide.

        More images do not help if the model hides from attacks.
        """
        return self.checks_left == 0 and not self.model_hides and self.word_by_difference == "not shown"

    def not_shown(self) -> Verdict:
        images = None
        causes = self.symptom_texts
        if self._has_too_few_images():
            images = deciding(self.difference)
            causes = (*causes, self._too_few_images(images))
        decides = ""
        if self.symptoms and not self.model_hides:
            decides = self.symptoms[0].decides  # of the first symptom, which is the cause in the sentence
        return self._verdict(
            "not shown",
            f"The {self.claim_text} are not shown to be robust",
            causes,
            # If the model hides, the last check, AutoAttack, costs most and cannot make the number usable.
            clear=self.model_hides and self.checks_left <= 1,
            usable=not self.model_hides,
            images=images,
            decides=decides,
        )

    def _too_few_images(self, images: int | None) -> str:
        """The cause "too few images", and what would decide.

        Args:
            images: how many images would decide; None: no number would.
        """
        tolerance = f"{100 * TOLERANCE:g}"
        text = (
            f"all attacks together leave {self._points_fewer()}, which is between holds (the whole interval below "
            f"{tolerance}) and overstated (over {tolerance}, and the whole interval above {100 * SLACK:g}): "
            f"{self.overview.examples} images are too few to be sure; --full, on the same ones, may show overstated, "
            "never holds"
        )
        if images is None:
            return f"{text}, and so near to {tolerance} no number of them would be enough. Report both numbers"
        if self.available is not None and images > self.available:
            return (
                f"{text}. About {images:,} would decide if the difference stays, and the test split has "
                f"{self.available:,}. Report both numbers"
            )
        return f"{text}. About {images:,} would decide if the difference stays (--examples {images})"

    # --- nothing speaks against the number ---

    def is_unfinished(self) -> bool:
        return self.checks_left > 0

    def so_far(self) -> Verdict:
        return self._verdict("not shown", f"The {self.claim_text} withstood {self._attacks()} so far", ())

    def holds(self) -> Verdict:
        leave = f"{self._attacks()} together leave {self.worst_text}, {self._points_fewer()}"
        sentence = f"The {self.claim_text} hold: {leave}"
        return self._verdict("holds", sentence, ())

    def _points_fewer(self) -> str:
        return f"{100 * self.difference:.1f} points fewer {self.interval_texts['difference']}"

    def _attacks(self) -> str:
        """The attacks at the budget on trial. Rows of other budgets have no ``left``."""
        return listing([row.attack for row in self.overview.rows if row.left is not None])

    def _verdict(
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
        """A verdict with all shares that are measured.

        Args:
            word: as in ``Verdict``, like the arguments that are not named here.
            sentence: its beginning, without a full stop. The first cause, ``decides`` and ``why_unusable`` follow.
            causes: as in ``Verdict``.
            text: the text for the console; empty: the word.
            why_unusable: a sentence for a verdict that is not ``usable``; ``{}`` in it stands for the worst case.
            decides: sentences that say what would settle whether the number holds.
        """
        overview = self.overview
        if not text:
            text = word
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


def _reasons_unsteady(overview: Overview) -> list[str]:
    """Why one answer of the model says nothing about the next one: its answers depend on more than the image.

    No reasons: the model is steady. If it is randomised, that is the only reason, because it explains the others.
    Disputed images are a reason only where neither the batch nor a memory explains them.
    """
    changed = overview.facts.get(CHANGED, 0.0)
    batched = overview.facts.get(BATCHED, 0.0)
    remembered = overview.facts.get(REMEMBERED, 0.0)
    if changed > 0:
        spread = ""
        # The check ``answers`` repeats PGD-20 on a randomised model; its labels are ``pgd20, draw 1`` and so on.
        accuracies = [row.accuracy for row in overview.rows if "draw" in row.attack]
        if accuracies:
            spread = f", and the same attack leaves from {percent(min(accuracies))} to {percent(max(accuracies))}"
        return [
            f"the model is randomised: asked about the same images again, it gives other logits for "
            f"{percent(changed)} of them{spread}. One run decides nothing: average gradients and verdicts over "
            "many draws (autoattack with version: rand)"
        ]
    reasons = []
    if batched > _UNSTEADY_SHARE:
        reasons.append(
            f"the answer about an image depends on the other images of its batch, or on their order, for "
            f"{percent(batched)} of the images. An accuracy is then one of the batches, not of the images: let the "
            "model use statistics that it keeps (running averages), not the batch's"
        )
    if remembered > _UNSTEADY_SHARE:
        reasons.append(
            f"the answer depends on what the model was asked before: a freshly loaded copy answers otherwise about "
            f"{percent(remembered)} of the points. What it remembers is not its robustness: judge it without its memory"
        )
    if not reasons and overview.disputed > _UNSTEADY_SHARE:
        reasons.append(
            "a freshly loaded copy, asked in another order and in other batches, answers otherwise about up to "
            f"{percent(overview.disputed)} of an attack's adversarial images: the answer depends on something else "
            "than the image. Find it (memory, counters, the batch), and judge the model without it"
        )
    return reasons
