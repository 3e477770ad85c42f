"""Every alarm: its whole text, and the numbers next to it that must stay silent."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from calfat_plugin.cli.results import show_alarms
from calfat_plugin.evaluators.alarms import Alarm, find_alarms
from calfat_plugin.results import EvaluationResult

N = 1000


def result(
    label: str, attack: str | None, accuracy: float, *, details: Any = None, **settings: Any
) -> EvaluationResult:
    examples = settings.pop("examples", N)
    if attack not in (None, "none"):
        settings = {"norm": "linf", "eps": "8/255", **settings}
    if attack is not None:
        settings["attack"] = attack
    if attack == "autoattack":
        settings.setdefault("version", "standard")
    return EvaluationResult(
        label, examples, accuracy, accuracy, (), (), settings, "calfat-plugin", 1.0, details=details or {}
    )


def natural(accuracy: float = 0.9) -> EvaluationResult:
    return result("natural", "none", accuracy)


# --- AutoAttack above others ------------------------------------------------------------------------------------------


def test_autoattack_above_pgd():
    assert find_alarms([natural(), result("pgd20", "pgd", 0.4), result("autoattack", "autoattack", 0.45)]) == (
        Alarm(
            "autoattack-above",
            "autoattack (linf 8/255) leaves 45.0 %, more than pgd20 with 40.0 %. AutoAttack should be the strongest "
            "here: its gradients are masked (a randomised model? flattened or saturated logits?), or it ran with fewer "
            "iterations. Report the lower number.",
            ("autoattack", "pgd20"),
        ),
    )


@pytest.mark.parametrize("attack", ["fgsm", "bim", "pgd", "mi-fgsm", "cw", "deepfool"])
def test_autoattack_should_beat_every_other_attack(attack):
    (alarm,) = find_alarms([result("other", attack, 0.4), result("autoattack", "autoattack", 0.43)])
    assert (alarm.code, alarm.labels) == ("autoattack-above", ("autoattack", "other"))


@pytest.mark.parametrize(
    "others",
    [
        (result("pgd20", "pgd", 0.448),),  # within 0.2 points
        (result("pgd20", "pgd", 0.4, eps="4/255"),),  # another budget
        (result("pgd20", "pgd", 0.4, norm="l2"),),
        (result("pgd20", "pgd", 0.4, examples=500),),  # other examples
        (result("square", "autoattack", 0.4, version="custom"),),
        (result("theirs", None, 0.4),),  # a plugin's: nothing is known about it
    ],
)
def test_autoattack_near_others_or_elsewhere_is_silent(others):
    assert find_alarms([natural(), *others, result("autoattack", "autoattack", 0.45)]) == ()


def test_one_example_more_is_no_alarm_on_a_small_set():
    small = [result("pgd20", "pgd", 0.4, examples=10), result("aa", "autoattack", 0.5, examples=10)]
    assert find_alarms(small) == ()


# --- flattened logits -------------------------------------------------------------------------------------------------


def test_the_papers_gap_of_calfat_is_reported_and_that_of_fedpgd_is_not():
    calfat = [result("bim", "bim", 0.32), result("pgd20", "pgd", 0.3112), result("cw", "cw", 0.2469)]
    assert find_alarms(calfat) == (
        Alarm(
            "flattened-logits",
            "cw leaves 24.7 %, far fewer than pgd20 (linf 8/255) with 31.1 %. The logits may be small, so that the "
            "cross-entropy hardly guides PGD, as with CalFAT's release preset, which trains 10 f. Evaluate "
            "pgd20 with logit_scale: 10 beside it, and report the lower number.",
            ("cw", "pgd20"),
        ),
    )
    assert find_alarms([result("pgd20", "pgd", 0.2674), result("cw", "cw", 0.2438)]) == ()


def test_a_scaled_pgd_far_below_the_plain_one():
    (alarm,) = find_alarms([result("pgd20", "pgd", 0.31), result("pgd20x10", "pgd", 0.25, logit_scale=10.0)])
    assert alarm.code == "flattened-logits"
    assert alarm.text.endswith("which trains 10 f. Report pgd20x10.")


def test_cw_is_compared_with_the_lowest_plain_pgd_only():
    assert find_alarms([result("bim", "bim", 0.4), result("pgd20", "pgd", 0.3), result("cw", "cw", 0.28)]) == ()
    assert find_alarms([result("weak", "pgd", 0.4, logit_scale=0.1), result("cw", "cw", 0.28)]) == ()


# --- robust above natural ---------------------------------------------------------------------------------------------


def test_robust_above_natural():
    assert find_alarms([natural(0.5), result("pgd20", "pgd", 0.501)]) == (
        Alarm(
            "robust-above-natural",
            "pgd20 (linf 8/255) counts 50.1 % right both clean and under attack, more than the 50.0 % right clean. "
            "That cannot be: the two were not measured on the same model and examples, or the evaluator counts "
            "otherwise.",
            ("pgd20", "natural"),
        ),
    )
    assert find_alarms([natural(0.5), result("pgd20", "pgd", 0.5)]) == ()


# --- rising with eps --------------------------------------------------------------------------------------------------


def test_accuracy_that_rises_with_eps():
    sweep = [
        result("fgsm", "fgsm", accuracy, eps=eps)
        for eps, accuracy in (("16/255", 0.45), ("2/255", 0.7), ("8/255", 0.4))
    ]
    assert find_alarms([natural(), *sweep]) == (
        Alarm(
            "rises-with-eps",
            "fgsm leaves 45.0 % at eps 16/255, more than the 40.0 % at the smaller eps 8/255. The larger ball holds "
            "the smaller one, so the attack fails to use it: steps too long or too few, or masked gradients. Take more "
            "steps, a smaller step_size, or AutoAttack.",
            ("fgsm",),
        ),
    )


@pytest.mark.parametrize("changes", [{"norm": "l2"}, {"label": "other"}, {"accuracy": 0.404}])
def test_other_attacks_norms_and_small_rises_are_silent(changes):
    later = {"label": "pgd20", "attack": "pgd", "accuracy": 0.45, "eps": "16/255", **changes}
    assert find_alarms([result("pgd20", "pgd", 0.4), result(**later)]) == ()


# --- zero gradients and what evaluators say themselves ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "advice"),
    [
        (
            1.0,
            "A softmax that saturates can be undone with a logit_scale below 1; other masking needs Square (autoattack "
            "runs it) or an adaptive attack.",
        ),
        (10.0, "logit_scale: 10 saturates the softmax; take a smaller one."),
    ],
)
def test_zero_gradients(scale, advice):
    many, few = (
        result("pgd20", "pgd", 0.4, details={"zero_gradients": count}, logit_scale=scale) for count in (11, 10)
    )
    assert find_alarms([many]) == (
        Alarm(
            "zero-gradients",
            "pgd20 (linf 8/255) began at a gradient of exactly zero for 11 of 1000 examples, which it then cannot move"
            f". {advice}",
            ("pgd20",),
        ),
    )
    assert find_alarms([few]) == ()


def test_warnings_of_evaluators_are_passed_on_once_each():
    said = {"warnings": [{"code": "probabilities", "text": "the model returns probabilities."}]}
    results = [result(label, "pgd", 0.4, details=said) for label in ("pgd20", "bim")]
    assert find_alarms(results) == (
        Alarm("probabilities", "pgd20, bim: the model returns probabilities.", ("pgd20", "bim")),
    )


def test_a_sound_evaluation_raises_none():
    sound = [natural(0.8), result("fgsm", "fgsm", 0.5), result("pgd20", "pgd", 0.45), result("cw", "cw", 0.44)]
    assert find_alarms([*sound, result("autoattack", "autoattack", 0.43)]) == ()
    assert find_alarms([]) == ()


# --- on the console ---------------------------------------------------------------------------------------------------


def test_findings_are_shown_with_their_code_and_nothing_without(snapshot):
    stream = io.StringIO()
    console = Console(file=stream, width=40)
    show_alarms(console, ())
    assert stream.getvalue() == ""
    show_alarms(console, (Alarm("a-b", "[red]text[/red] that is longer than one line of it.", ()),))
    show_alarms(console, (Alarm("a", "b", ()), Alarm("c", "d", ())))
    snapshot(stream.getvalue())
