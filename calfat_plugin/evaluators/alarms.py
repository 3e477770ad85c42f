"""Signs that a robust accuracy is too good to be true, read off finished results. Findings, never errors.

An accuracy under attack is an upper bound that is worth what the attack is worth. Each alarm says which numbers
contradict each other or what the attack could not do, the likely cause, and what to try.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from calfat_plugin.exact import parse_number
from calfat_plugin.results import NOT_RUN, WORST_CASE, EvaluationResult

# Shares of the examples. AutoAttack's own check of Square uses the first; the second lies between the gaps of CalFAT
# (6.4 points, on flattened logits) and FedPGD (2.4) in the CalFAT paper's CIFAR-10 table.
SLACK = 0.002
FLATTENED = 0.04
RISE = 0.005
ZERO_GRADIENTS = 0.01

#: Codes of findings about a model that has learned nothing.
ONE_ANSWER = "one-answer"
GUESSING = "guessing"

_COMPLETE = ("standard", "plus")  # versions of AutoAttack that no other attack here should beat
_WEAKER = ("fgsm", "bim", "pgd", "mi-fgsm", "cw", "transfer", "internal")


@dataclass(frozen=True)
class Alarm:
    """One finding."""

    code: str  # for programs: ``flattened-logits``
    text: str  # for people: what was seen, what it may mean, what to do
    labels: tuple[str, ...]  # the evaluators that it is about


def find_alarms(results: Iterable[EvaluationResult], class_names: Sequence[str] = ()) -> tuple[Alarm, ...]:
    """All findings about one model, from its results on one data set, in any order, at one eps or several.

    Args:
        results: what its evaluators gave.
        class_names: of the data set; empty: classes are named by their numbers.
    """
    every = tuple(results)
    # Comparisons are of numbers; an attack that did not run has none.
    measured = tuple(result for result in every if result.accuracy is not None)
    return (
        *_not_run(every),
        *_no_better_than_guessing(measured, class_names),
        *_autoattack_above(measured),
        *_flattened_logits(measured),
        *_robust_above_natural(measured),
        *_rises_with_eps(measured),
        *_zero_gradients(measured),
        *_warnings(every),
    )


def _not_run(results: Sequence[EvaluationResult]) -> Iterator[Alarm]:
    """Attacks without a number, each once for all eps; and a worst case that lacks attacks."""
    alarms: dict[Alarm, None] = {}  # without those that are there already
    for result in results:
        if result.not_run:
            text = f"{result.label} did not run, so it has no number: {result.not_run}."
            alarms[Alarm(NOT_RUN, text, (result.label,))] = None
        elif _attack(result) == WORST_CASE and result.details.get("not_run"):
            attacks = ", ".join(result.settings["attacks"])
            left_out = ", ".join(result.details["not_run"])
            text = f"{result.label} is of {attacks} alone, because {left_out} did not run."
            alarms[Alarm(NOT_RUN, text, (result.label,))] = None
    yield from alarms


def _no_better_than_guessing(results: Sequence[EvaluationResult], class_names: Sequence[str]) -> Iterator[Alarm]:
    """A model that has learned nothing: under attack it keeps what it has, and seems robust.

    Judged by clean accuracy, and by what is there where that was not measured.
    """
    natural = _natural(results)
    if natural is not None:
        results = [natural]
    for result in results:
        known = [accuracy for accuracy in result.per_class if accuracy is not None]
        if len(known) < 2:  # of one class alone, or nothing is known of classes
            continue
        if sorted(known) == [0.0] * (len(known) - 1) + [1.0]:
            answer: str | int = result.per_class.index(1.0)
            if class_names:
                answer = class_names[result.per_class.index(1.0)]
            yield Alarm(
                ONE_ANSWER,
                f"{result.label} gets class {answer} right for all images and every other class for none: the model "
                f"gives one answer to everything. Its {_percent(result)} is the share of that class, and what any "
                "attack leaves of it is no robustness: an answer that never changes cannot be changed. Train for more "
                "rounds, at another learning rate, or look at the partition.",
                (result.label,),
            )
        elif result.guess is not None and _accuracy(result) <= result.guess and result is natural:
            yield Alarm(
                GUESSING,
                f"{result.label} is {_percent(result)}, no more than the {100 * result.guess:.1f} % that the most "
                "frequent class has, which one answer to all images would give: the model has learned nothing. What an "
                "attack leaves of it says nothing of robustness. Train for more rounds, or at another learning rate.",
                (result.label,),
            )


def _autoattack_above(results: Sequence[EvaluationResult]) -> Iterator[Alarm]:
    for strong in results:
        if _attack(strong) != "autoattack" or strong.settings.get("version") not in _COMPLETE:
            continue
        lowest = _lowest((other for other in results if _attack(other) in _WEAKER), strong)
        if lowest is not None and _clearly_below(lowest, strong, SLACK):
            yield Alarm(
                "autoattack-above",
                f"{_name(strong)} leaves {_percent(strong)}, more than {lowest.label} with {_percent(lowest)}. "
                "AutoAttack should be the strongest here: its gradients are masked (a randomised model? flattened or "
                "saturated logits?), or it ran with fewer iterations. Report the lower number.",
                (strong.label, lowest.label),
            )


def _flattened_logits(results: Sequence[EvaluationResult]) -> Iterator[Alarm]:
    unscaled = [result for result in results if _takes_steps(result) and _logit_scale(result) == 1]
    for other in results:
        scaled = _takes_steps(other) and _logit_scale(other) > 1
        if not scaled and _attack(other) != "cw":
            continue
        lowest = _lowest(unscaled, other)
        if lowest is not None and _clearly_below(other, lowest, FLATTENED):
            advice = f"Evaluate {lowest.label} with logit_scale: 10 beside it, and report the lower number."
            if scaled:
                advice = f"Report {other.label}."
            yield Alarm(
                "flattened-logits",
                f"{other.label} leaves {_percent(other)}, far fewer than {_name(lowest)} with {_percent(lowest)}. The "
                "logits may be small, so that the cross-entropy hardly guides PGD, as with CalFAT's "
                f"release preset, which trains 10 f. {advice}",
                (other.label, lowest.label),
            )


def _robust_above_natural(results: Sequence[EvaluationResult]) -> Iterator[Alarm]:
    natural = _natural(results)
    if natural is None:
        return
    for result in results:
        if result.num_examples == natural.num_examples and _clearly_below(natural, result, 0.0):
            yield Alarm(
                "robust-above-natural",
                f"{_name(result)} counts {_percent(result)} right both clean and under attack, more than the "
                f"{_percent(natural)} right clean. That cannot be: the two were not measured on the same model and "
                "examples, or the evaluator counts otherwise.",
                (result.label, natural.label),
            )


def _rises_with_eps(results: Sequence[EvaluationResult]) -> Iterator[Alarm]:
    sweeps: dict[tuple[str, str, int], list[EvaluationResult]] = {}
    for result in results:
        if "eps" in result.settings:
            same_attack = (result.label, result.settings["norm"], result.num_examples)
            sweeps.setdefault(same_attack, []).append(result)
    for sweep in sweeps.values():
        ordered = sorted(sweep, key=lambda result: parse_number(result.settings["eps"]))
        for smaller, larger in pairwise(ordered):
            if _clearly_below(smaller, larger, RISE):
                yield Alarm(
                    "rises-with-eps",
                    f"{larger.label} leaves {_percent(larger)} at eps {larger.settings['eps']}, more than the "
                    f"{_percent(smaller)} at the smaller eps {smaller.settings['eps']}. The larger ball holds the "
                    "smaller one, so the attack fails to use it: steps too long or too few, or masked gradients. Take "
                    "more steps, a smaller step_size, or AutoAttack.",
                    (larger.label,),
                )


def _zero_gradients(results: Sequence[EvaluationResult]) -> Iterator[Alarm]:
    for result in results:
        count = result.details.get("zero_gradients", 0)
        if count > ZERO_GRADIENTS * result.num_examples:
            scale = _logit_scale(result)
            advice = (
                "A softmax that saturates can be undone with a logit_scale below 1; other masking needs Square "
                "(autoattack runs it) or an adaptive attack."
            )
            if scale > 1:
                advice = f"logit_scale: {scale:g} saturates the softmax; take a smaller one."
            yield Alarm(
                "zero-gradients",
                f"{_name(result)} began at a gradient of exactly zero (or of no number) for {count} of "
                f"{result.num_examples} examples, which it then cannot move. {advice}",
                (result.label,),
            )


def _warnings(results: Sequence[EvaluationResult]) -> Iterator[Alarm]:
    """What evaluators said themselves, each text once."""
    labels_of_warning: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for warning in result.details.get("warnings", ()):
            labels = labels_of_warning.setdefault((warning["code"], warning["text"]), [])
            if result.label not in labels:
                labels.append(result.label)
    for (code, text), labels in labels_of_warning.items():
        yield Alarm(code, f"{', '.join(labels)}: {text}", tuple(labels))


def _attack(result: EvaluationResult) -> object:
    """What kind of attack a built-in evaluator says it is; anything for others."""
    return result.settings.get("attack")


def _natural(results: Sequence[EvaluationResult]) -> EvaluationResult | None:
    """The first result on clean images."""
    for result in results:
        if _attack(result) == "none":
            return result
    return None


def _takes_steps(result: EvaluationResult) -> bool:
    return _attack(result) in ("pgd", "bim")


def _logit_scale(result: EvaluationResult) -> float:
    scale: float = result.settings.get("logit_scale", 1)
    return scale


def _lowest(results: Iterable[EvaluationResult], like: EvaluationResult) -> EvaluationResult | None:
    """The result that leaves least, of those with the budget and the number of examples of ``like``."""

    def setting(result: EvaluationResult) -> tuple[object, ...]:
        return result.num_examples, result.settings.get("norm"), result.settings.get("eps")

    comparable = (result for result in results if setting(result) == setting(like))
    return min(comparable, key=_accuracy, default=None)


def _clearly_below(low: EvaluationResult, high: EvaluationResult, share: float) -> bool:
    return clearly_below(_accuracy(low), _accuracy(high), high.num_examples, share)


def clearly_below(low: float, high: float, examples: int, share: float) -> bool:
    """Whether an accuracy is below another by more than a share of the examples, and by more than one if share > 0."""
    images = round((high - low) * examples)
    if share == 0:
        return images > 0
    return images > max(share * examples, 1)


def _name(result: EvaluationResult) -> str:
    if "eps" not in result.settings:
        return result.label
    return f"{result.label} ({result.settings['norm']} {result.settings['eps']})"


def _percent(result: EvaluationResult) -> str:
    return f"{100 * _accuracy(result):.1f} %"


def _accuracy(result: EvaluationResult) -> float:
    """The number of a result that has one."""
    assert result.accuracy is not None
    return result.accuracy
