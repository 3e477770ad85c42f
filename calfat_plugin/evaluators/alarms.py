"""Alarms: signs that a robust accuracy is too good to be true, found in finished results. They never stop a run.

An accuracy under attack is an upper bound on the robustness: a stronger attack may leave less. If the attack was weak,
the bound says little. Each alarm says which numbers contradict each other or what the attack could not do, what the
likely cause is, and what to try.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from calfat_plugin.exact import parse_number
from calfat_plugin.results import NOT_RUN, WORST_CASE, EvaluationResult

# Thresholds of the alarms. All of them are shares of the examples: 0.002 is 0.2 points of accuracy.

#: How far AutoAttack may stay above a weaker attack: what AutoAttack's own check of Square allows.
SLACK = 0.002
#: How far PGD may stay above CW or scaled PGD. In the CIFAR-10 table of the CalFAT paper CalFAT, whose logits are
#: flattened, has a gap of 6.4 points and FedPGD one of 2.4; this threshold lies between the two.
FLATTENED = 0.04
#: How far the accuracy may rise from one eps to a larger one.
RISE = 0.005
#: How many examples may start at a gradient of exactly zero.
ZERO_GRADIENTS = 0.01

#: Codes of findings about a model that has learned nothing.
ONE_ANSWER = "one-answer"
GUESSING = "guessing"

# Versions of AutoAttack that should leave no more than any of the weaker attacks.
_COMPLETE_VERSIONS = ("standard", "plus")
_WEAKER_ATTACKS = ("fgsm", "bim", "pgd", "mi-fgsm", "cw", "transfer", "internal")


@dataclass(frozen=True)
class Alarm:
    """One finding."""

    code: str  # for programs: ``flattened-logits``
    text: str  # for people: what was seen, what it may mean, what to do
    labels: tuple[str, ...]  # the evaluators that it is about


def find_alarms(results: Iterable[EvaluationResult], class_names: Sequence[str] = ()) -> tuple[Alarm, ...]:
    """All findings about one model, from its results on one data set, in any order, at one eps or several.

    Args:
        results: the results of all evaluators of this model.
        class_names: names of the classes of the data set; empty: the texts give classes by their numbers.
    """
    all_results = tuple(results)
    # An attack that did not run has no accuracy to compare.
    measured = tuple(result for result in all_results if result.accuracy is not None)
    return (
        *_not_run(all_results),
        *_no_better_than_guessing(measured, class_names),
        *_autoattack_above(measured),
        *_flattened_logits(measured),
        *_robust_above_natural(measured),
        *_rises_with_eps(measured),
        *_zero_gradients(measured),
        *_warnings(all_results),
    )


def _not_run(results: Sequence[EvaluationResult]) -> list[Alarm]:
    """Attacks that did not run, and worst cases that lack such attacks.

    At several eps the same attack has several results, and their alarms may be equal: each alarm is listed once.
    """
    alarms: list[Alarm] = []
    for result in results:
        if result.not_run:
            text = f"{result.label} did not run, so it has no number: {result.not_run}."
        elif _attack(result) == WORST_CASE and result.details.get("not_run"):
            attacks = ", ".join(result.settings["attacks"])
            left_out = ", ".join(result.details["not_run"])
            text = f"{result.label} is of {attacks} alone, because {left_out} did not run."
        else:
            continue
        alarm = Alarm(NOT_RUN, text, (result.label,))
        if alarm not in alarms:
            alarms.append(alarm)
    return alarms


def _no_better_than_guessing(results: Sequence[EvaluationResult], class_names: Sequence[str]) -> Iterator[Alarm]:
    """A model that has learned nothing: an attack hardly lowers its accuracy, so it seems robust.

    The result on clean images alone is judged, if there is one. If not, all results are: one answer to everything shows
    in each of them. Only clean accuracy is compared with guessing, for an attack can lower any accuracy that far.
    """
    natural = _natural(results)
    judged = results
    if natural is not None:
        judged = [natural]
    for result in judged:
        accuracies = [accuracy for accuracy in result.per_class if accuracy is not None]
        if len(accuracies) < 2:  # not known, or the data set has examples of one class alone
            continue
        all_others_wrong = accuracies.count(0.0) == len(accuracies) - 1
        if all_others_wrong and accuracies.count(1.0) == 1:
            class_number = result.per_class.index(1.0)
            answer = str(class_number)
            if class_names:
                answer = class_names[class_number]
            yield Alarm(
                ONE_ANSWER,
                f"{result.label} gets class {answer} right for all images and every other class for none: the "
                f"model gives one answer to everything. Its {_percent(result)} is the share of that class, and what "
                "any attack leaves of it is no robustness: an answer that never changes cannot be changed. Train for "
                "more rounds, at another learning rate, or look at the partition.",
                (result.label,),
            )
        elif result is natural and result.guess is not None and _accuracy(result) <= result.guess:
            yield Alarm(
                GUESSING,
                f"{result.label} is {_percent(result)}, no more than the {100 * result.guess:.1f} % that the most "
                "frequent class has, which one answer to all images would give: the model has learned nothing. What an "
                "attack leaves of it says nothing of robustness. Train for more rounds, or at another learning rate.",
                (result.label,),
            )


def _autoattack_above(results: Sequence[EvaluationResult]) -> Iterator[Alarm]:
    """An AutoAttack that leaves more than an attack that should be weaker."""
    weaker_attacks = [result for result in results if _attack(result) in _WEAKER_ATTACKS]
    for autoattack in results:
        if _attack(autoattack) != "autoattack" or autoattack.settings.get("version") not in _COMPLETE_VERSIONS:
            continue
        strongest = _strongest_comparable(weaker_attacks, autoattack)
        if strongest is not None and _leaves_clearly_less(strongest, autoattack, SLACK):
            yield Alarm(
                "autoattack-above",
                f"{_label_and_budget(autoattack)} leaves {_percent(autoattack)}, more than {strongest.label} with "
                f"{_percent(strongest)}. AutoAttack should be the strongest here: its gradients are masked (a "
                "randomised model? flattened or saturated logits?), or it ran with fewer iterations. Report the lower "
                "number.",
                (autoattack.label, strongest.label),
            )


def _flattened_logits(results: Sequence[EvaluationResult]) -> Iterator[Alarm]:
    """PGD or BIM that leaves far more than PGD or BIM on scaled logits, or than CW."""
    plain_attacks = [result for result in results if _takes_steps(result) and _logit_scale(result) == 1]
    for other in results:
        is_scaled = _takes_steps(other) and _logit_scale(other) > 1
        if not is_scaled and _attack(other) != "cw":
            continue
        plain = _strongest_comparable(plain_attacks, other)
        if plain is not None and _leaves_clearly_less(other, plain, FLATTENED):
            if is_scaled:
                advice = f"Report {other.label}."
            else:
                advice = f"Evaluate {plain.label} with logit_scale: 10 beside it, and report the lower number."
            yield Alarm(
                "flattened-logits",
                f"{other.label} leaves {_percent(other)}, far fewer than {_label_and_budget(plain)} with "
                f"{_percent(plain)}. The logits may be small, so that the cross-entropy hardly guides PGD, as with "
                f"CalFAT's release preset, which trains 10 f. {advice}",
                (other.label, plain.label),
            )


def _robust_above_natural(results: Sequence[EvaluationResult]) -> Iterator[Alarm]:
    """An accuracy under attack that is above the clean accuracy. The way this package counts excludes that."""
    natural = _natural(results)
    if natural is None:
        return
    for result in results:
        if result.num_examples == natural.num_examples and _leaves_clearly_less(natural, result, 0.0):
            yield Alarm(
                "robust-above-natural",
                f"{_label_and_budget(result)} counts {_percent(result)} right both clean and under attack, more than "
                f"the {_percent(natural)} right clean. That cannot be: the two were not measured on the same model and "
                "examples, or the evaluator counts otherwise.",
                (result.label, natural.label),
            )


def _rises_with_eps(results: Sequence[EvaluationResult]) -> Iterator[Alarm]:
    """An attack that leaves more at a larger eps."""
    # A sweep: the results of one attack at several eps. Its key: label, norm and number of examples.
    sweeps: dict[tuple[str, str, int], list[EvaluationResult]] = {}
    for result in results:
        if "eps" in result.settings:
            key = (result.label, result.settings["norm"], result.num_examples)
            sweeps.setdefault(key, []).append(result)
    for sweep in sweeps.values():
        by_eps = sorted(sweep, key=lambda result: parse_number(result.settings["eps"]))
        for smaller, larger in pairwise(by_eps):
            if _leaves_clearly_less(smaller, larger, RISE):
                yield Alarm(
                    "rises-with-eps",
                    f"{larger.label} leaves {_percent(larger)} at eps {larger.settings['eps']}, more than the "
                    f"{_percent(smaller)} at the smaller eps {smaller.settings['eps']}. The larger ball holds the "
                    "smaller one, so the attack fails to use it: steps too long or too few, or masked gradients. Take "
                    "more steps, a smaller step_size, or AutoAttack.",
                    (larger.label,),
                )


def _zero_gradients(results: Sequence[EvaluationResult]) -> Iterator[Alarm]:
    """An attack that could not move many examples, because their gradient was zero at the start."""
    for result in results:
        count = result.details.get("zero_gradients", 0)
        if count > ZERO_GRADIENTS * result.num_examples:
            scale = _logit_scale(result)
            if scale > 1:
                advice = f"logit_scale: {scale:g} saturates the softmax; take a smaller one."
            else:
                advice = (
                    "A softmax that saturates can be undone with a logit_scale below 1; other masking needs Square "
                    "(autoattack runs it) or an adaptive attack."
                )
            yield Alarm(
                "zero-gradients",
                f"{_label_and_budget(result)} began at a gradient of exactly zero (or of no number) for {count} of "
                f"{result.num_examples} examples, which it then cannot move. {advice}",
                (result.label,),
            )


def _warnings(results: Sequence[EvaluationResult]) -> Iterator[Alarm]:
    """Warnings that evaluators put in their results: each text once, with the labels of all that gave it."""
    labels_of_warning: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for warning in result.details.get("warnings", ()):
            labels = labels_of_warning.setdefault((warning["code"], warning["text"]), [])
            if result.label not in labels:
                labels.append(result.label)
    for (code, text), labels in labels_of_warning.items():
        yield Alarm(code, f"{', '.join(labels)}: {text}", tuple(labels))


def _attack(result: EvaluationResult) -> object:
    """The kind of attack as built-in evaluators write it in their settings. A plugin's may be anything, or None."""
    return result.settings.get("attack")


def _natural(results: Sequence[EvaluationResult]) -> EvaluationResult | None:
    """The first result on clean images, if there is one."""
    for result in results:
        if _attack(result) == "none":
            return result
    return None


def _takes_steps(result: EvaluationResult) -> bool:
    return _attack(result) in ("pgd", "bim")


def _logit_scale(result: EvaluationResult) -> float:
    scale: float = result.settings.get("logit_scale", 1)
    return scale


def _strongest_comparable(attacks: Sequence[EvaluationResult], other: EvaluationResult) -> EvaluationResult | None:
    """The result with the lowest accuracy among those with the same norm, eps and number of examples as ``other``.

    None if ``attacks`` holds no such result.
    """

    def conditions(result: EvaluationResult) -> tuple[object, ...]:
        return result.num_examples, result.settings.get("norm"), result.settings.get("eps")

    comparable = [attack for attack in attacks if conditions(attack) == conditions(other)]
    return min(comparable, key=_accuracy, default=None)


def _leaves_clearly_less(lower: EvaluationResult, higher: EvaluationResult, share: float) -> bool:
    """Whether the accuracy of ``lower`` is clearly below that of ``higher``, as in ``clearly_below``."""
    return clearly_below(_accuracy(lower), _accuracy(higher), higher.num_examples, share)


def clearly_below(low: float, high: float, examples: int, share: float) -> bool:
    """Whether the accuracy ``low`` is below ``high`` by more than ``share`` of the examples.

    With a share of 0 a single example is enough. With any other share the two must differ by more than one example.
    """
    difference = round((high - low) * examples)  # in examples
    if share == 0:
        return difference > 0
    return difference > max(share * examples, 1)


def _label_and_budget(result: EvaluationResult) -> str:
    """``pgd20 (linf 8/255)``; of a result without a budget its label alone."""
    if "eps" not in result.settings:
        return result.label
    return f"{result.label} ({result.settings['norm']} {result.settings['eps']})"


def _percent(result: EvaluationResult) -> str:
    return f"{100 * _accuracy(result):.1f} %"


def _accuracy(result: EvaluationResult) -> float:
    """The accuracy of an attack that ran."""
    assert result.accuracy is not None
    return result.accuracy
