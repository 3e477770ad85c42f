"""The verdict of ``calfat trust``: a function of numbers, tried on made numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import binomtest

from calfat_plugin.maths.intervals import wilson
from calfat_plugin.threat import Bounds, ThreatModel, parse_number
from calfat_plugin.trust.battery import SAMPLE, battery
from calfat_plugin.trust.evidence import Evidence, Row
from calfat_plugin.trust.verdict import Verdict, conclude
from calfat_plugin.trust.white_box import BudgetCurve, unbounded

CHECKS = battery(full=False, surrogates=1)
HONEST = {
    "fgsm": 0.86,
    "pgd20": 0.80,
    "noise100": 0.96,
    "pgd20 of other": 0.92,
    "cw20": 0.79,
    "dlr20": 0.80,
    "margin20": 0.80,
    "pgd5": 0.83,
    "pgd100": 0.79,
    "pgd20 x 5": 0.79,
    "square1000": 0.85,
    "autoattack": 0.78,
}
CURVE = {"0.05": 0.90, "0.2": 0.20, "0.4": 0.01, "0.5": 0.0}
ROWS = {
    "gradients": ("fgsm",),
    "pgd": ("pgd20",),
    "noise": ("noise100",),
    "transfer": ("pgd20 of other",),
    "losses": ("cw20", "dlr20", "margin20"),
    "strength": ("pgd5", "pgd100", "pgd20 x 5"),
    "black-box": ("square1000",),
    f"autoattack-{SAMPLE}": ("autoattack",),
}
GRADIENTS = {"fgsm", "pgd20", "cw20", "dlr20", "margin20", "pgd5", "pgd100", "pgd20 x 5"}


def made(
    attacks: Mapping[str, float] = {},
    curve: Mapping[str, float] = CURVE,
    zero: int = 0,
    changed: float = 0.0,
    until: str = "",
) -> list[Evidence]:
    """Evidence in the battery's order: an honest model's, with these values instead; it ends before ``until``."""
    accuracies, left, found = {**HONEST, **attacks}, 0.98, []
    for check in CHECKS:
        if check.name == until:
            break
        facts = {"natural": 0.98, "guess": 0.11, "changed": changed} if check.name == "answers" else {}
        rows = []
        for attack in ROWS.get(check.name, ()):
            left = min(left, accuracies[attack])
            vanished = (zero if attack == "fgsm" else 0) if attack in GRADIENTS else None
            rows.append(Row(attack, "0.1", accuracies[attack], left, 300, 1.0, vanished))
        if check.name == "budget":
            rows = [Row("pgd20", eps, accuracy, None, 300, 1.0, 0) for eps, accuracy in curve.items()]
        found.append(Evidence(check.name, tuple(rows), facts))
    return found


def verdict(**changes: object) -> Verdict:
    return conclude(CHECKS, made(**changes), "linf", "0.1", 300)  # type: ignore[arg-type]


def test_an_honest_number_holds_and_the_sentence_has_every_attack_of_the_budget() -> None:
    found = verdict()
    assert (found.word, found.text, found.causes, found.clear) == ("holds", "holds", (), False)
    assert (found.natural, found.claimed, found.worst) == (0.98, 0.80, 0.78)
    assert found.difference == pytest.approx(0.02)
    assert found.sentence == (
        "The 80.0 % [75.1, 84.1] under PGD-20 within linf 0.1 (300 test images) hold: fgsm, pgd20, pgd20 of other, "
        "noise100, cw20, dlr20, margin20, pgd5, pgd100, pgd20 x 5, square1000 and autoattack together leave 78.0 % "
        "[73.0, 82.3], 2.0 points fewer [0.9, 4.3]."
    )


def of_binomial(correct: int, number: int) -> tuple[float, float]:
    """Wilson's interval by scipy."""
    found = binomtest(correct, number).proportion_ci(method="wilson")
    return pytest.approx((found.low, found.high))  # type: ignore[no-any-return]


def test_every_share_has_its_interval() -> None:
    found = verdict()
    counts = {"natural": 294, "claimed": 240, "worst": 234, "difference": 6}
    assert {name: tuple(ends) for name, ends in found.intervals.items()} == {
        name: of_binomial(correct, 300) for name, correct in counts.items()
    }
    row = Row("pgd20", "0.1", 0.80, 0.78, 300, 1.0, 0).as_json()
    assert (row["interval"], row["left_interval"]) == (of_binomial(240, 300), of_binomial(234, 300))
    assert Row("pgd20", "0.2", 0.5, None, 300, 1.0).as_json()["left_interval"] is None


def test_what_a_sample_leaves_is_known_as_well_as_so_few_images_show_it() -> None:
    *others, last = made()
    (row,) = last.rows
    sampled = dataclasses.replace(last, rows=(dataclasses.replace(row, examples=64),))
    found = conclude(CHECKS, [*others, sampled], "linf", "0.1", 300)
    assert found.intervals["claimed"] == of_binomial(240, 300)
    assert found.intervals["worst"] == wilson(0.78, 64)
    assert found.difference is not None
    assert found.intervals["difference"] == wilson(found.difference, 64)


def test_a_few_points_of_a_few_images_are_not_shown() -> None:
    found = conclude(CHECKS, of(16, made(attacks={"autoattack": 0.7375})), "linf", "0.1", 16)
    assert (found.word, found.clear) == ("not shown", False)
    assert found.causes == (
        "all attacks together leave 6.2 points fewer [1.1, 28.3], but of too few images to be sure: attack more of "
        "them (--examples, --full)",
    )


@pytest.mark.parametrize(("examples", "word"), [(25, "holds"), (100, "not shown")])
def test_one_image_is_no_symptom(examples: int, word: str) -> None:
    """Noise leaves 4 points fewer than PGD-20: one image of 25, or four of a hundred."""
    assert conclude(CHECKS, of(examples, made(attacks={"noise100": 0.76})), "linf", "0.1", examples).word == word


def of(examples: int, evidence: list[Evidence]) -> list[Evidence]:
    """The same shares of so many images."""
    return [
        dataclasses.replace(each, rows=tuple(dataclasses.replace(row, examples=examples) for row in each.rows))
        for each in evidence
    ]


@pytest.mark.parametrize("check", [check.name for check in CHECKS])
def test_a_number_does_not_hold_before_the_last_check(check: str) -> None:
    found = verdict(until=check)
    assert (found.word, found.clear) == ("not shown", False)


@pytest.mark.parametrize(
    ("changes", "points", "cause"),
    [
        ({"attacks": {"cw20": 0.5}}, "30.0", "losses that do not depend on the scale of the logits"),
        ({"attacks": {"noise100": 0.6}}, "20.0", "random points of the ball break what PGD does not"),
        ({"attacks": {"pgd20 of other": 0.7}}, "10.0", "other models' adversarial examples break"),
        ({"attacks": {"pgd100": 0.7}}, "10.0", "more steps and restarts break more"),
        ({"attacks": {"square1000": 0.2}}, "60.0", "Square, which uses no gradients, breaks"),
        ({"attacks": {"autoattack": 0.7}}, "10.0", "AutoAttack breaks what PGD-20 does not"),
        ({"attacks": {"noise100": 0.7, "cw20": 0.5}}, "30.0", "losses that do not depend"),
        ({"attacks": {"cw20": 0.785, "pgd100": 0.765, "square1000": 0.745}}, "5.5", "more steps and restarts"),
    ],
)
def test_an_overstated_number_names_the_check_that_broke_most(changes: dict, points: str, cause: str) -> None:
    found = verdict(**changes)
    assert (found.word, found.text) == ("overstated", f"overstated by {points} points")
    assert found.causes[0].startswith(cause)
    few, many, low, high = (f"{100 * end:.1f}" for name in ("difference", "worst") for end in found.intervals[name])
    assert found.sentence.startswith(
        "The 80.0 % [75.1, 84.1] under PGD-20 within linf 0.1 (300 test images) overstate the robustness by "
        f"{points} points [{few}, {many}]: all attacks together leave {100 * found.worst:.1f} % [{low}, {high}]. "
        f"Cause: {cause}"
    )


def test_square_is_compared_with_the_best_attack_that_uses_gradients() -> None:
    assert verdict(attacks={"square1000": 0.83}).word == "holds"  # fewer than FGSM leaves, more than CW


def test_five_points_are_within_the_tolerance() -> None:
    assert verdict(attacks={"autoattack": 0.7501}).word == "holds"
    assert verdict(attacks={"autoattack": 0.7499}).text == "overstated by 5.0 points"


def test_only_the_last_check_is_left_out_of_an_overstated_number() -> None:
    attacks = {"cw20": 0.5}
    early, late = (verdict(attacks=attacks, until=name) for name in ("black-box", f"autoattack-{SAMPLE}"))
    assert (early.word, early.clear, late.word, late.clear) == ("overstated", False, "overstated", True)
    assert "overstate the robustness by at least 30.0 points [" in late.sentence


@pytest.mark.parametrize(
    ("changes", "symptom"),
    [
        ({"zero": 30}, "the gradient of the cross-entropy is exactly zero for 10.0 % of the images"),
        (
            {"curve": {**CURVE, "0.2": 0.85}},
            "the accuracy rises with the budget, from 80.0 % at eps 0.1 to 85.0 % at eps 0.2",
        ),
        (
            {"curve": {**CURVE, "0.5": 0.14, "0.4": 0.15}},
            "at eps 0.5 every image can be made the same grey one, yet pgd20 leaves 14.0 %, more than guessing "
            "(11.0 %): the attack fails",
        ),
        ({"attacks": {"pgd100": 0.83}}, "pgd100 leaves 83.0 %, more than pgd20 with 80.0 %: more effort finds less"),
        (
            {"attacks": {"pgd20 x 5": 0.83}},
            "pgd20 x 5 leaves 83.0 %, more than pgd20 with 80.0 %: more effort finds less",
        ),
        ({"attacks": {"pgd5": 0.77}}, "pgd20 leaves 80.0 %, more than pgd5 with 77.0 %: more effort finds less"),
        (
            {"attacks": {"noise100": 0.77}},
            "random noise leaves 77.0 %, fewer than pgd20 with 80.0 %: the gradients point nowhere",
        ),
        (
            {"attacks": {"pgd20 of other": 0.77}},
            "pgd20 of other leaves 77.0 %, fewer than the model's own pgd20 with 80.0 %: its gradients are masked",
        ),
        (
            {"attacks": {"square1000": 0.765}},
            "Square, which uses no gradients, leaves 76.5 %, fewer than the best attack that uses them with 79.0 %: "
            "the gradients are masked",
        ),
    ],
)
def test_a_symptom_without_a_lower_number_is_not_shown(changes: dict, symptom: str) -> None:
    found = verdict(**changes)
    assert (found.word, found.causes) == ("not shown", (symptom,))
    assert found.sentence == (
        "The 80.0 % [75.1, 84.1] under PGD-20 within linf 0.1 (300 test images) are not shown to be robust. Cause: "
        f"{symptom}."
    )


def test_a_model_that_is_no_better_than_guessing_is_not_robust_at_once() -> None:
    found = verdict(attacks={"pgd20": 0.11, "fgsm": 0.3}, until="noise")
    assert (found.word, found.clear) == ("not robust", True)
    assert found.sentence == (
        "The model is not robust: it has 11.0 % [7.9, 15.0] under PGD-20 within linf 0.1 (300 test images), no more "
        "than guessing (11.0 %)."
    )


def test_of_a_randomised_model_one_run_decides_nothing() -> None:
    rows = tuple(Row(f"pgd20, draw {n}", "0.1", 0.6 + n / 100, 0.6, 300, 1.0, 0) for n in (1, 2, 3))
    answers = Evidence("answers", rows, {"natural": 0.98, "guess": 0.11, "changed": 0.4})
    found = conclude(CHECKS, [answers], "linf", "0.1", 300)
    assert (found.word, found.clear) == ("not shown", True)
    assert found.sentence == (
        "Robustness within linf 0.1 (300 test images) is not shown. Cause: the model is randomised: asked about the "
        "same images again, it gives other logits for 40.0 % of them, and the same attack leaves from 61.0 % to 63.0 "
        "%. One run decides nothing: average gradients and verdicts over many draws (autoattack with version: rand)."
    )


def test_nothing_is_said_before_the_first_check() -> None:
    assert conclude(CHECKS, [], "linf", "0.1", 300) == Verdict(
        "not shown", "not shown", "Nothing has been measured yet."
    )


def test_the_battery_is_ordered_by_cost_and_ends_with_autoattack() -> None:
    for checks in (battery(full=False), battery(full=True), battery(full=False, surrogates=3)):
        costs = [check.cost(SAMPLE) for check in checks[3:]]
        assert costs == sorted(costs)
        assert checks[-1].name.startswith("autoattack")
    assert [check.name for check in battery(full=True)][:3] == ["answers", "gradients", "pgd"]
    assert battery(full=True)[-1].name == "autoattack"


def test_evidence_survives_json() -> None:
    for evidence in made(zero=3):
        assert Evidence.from_json(json.loads(json.dumps(evidence.as_json()))) == evidence


def test_the_widest_ball_reaches_grey() -> None:
    assert unbounded(ThreatModel(), 64) == parse_number("0.5")
    assert unbounded(ThreatModel(norm="l2"), 64) == 4
    assert unbounded(ThreatModel(norm="l2"), 2) == parse_number("0.708")
    assert unbounded(ThreatModel(norm="l1"), 64) == 32
    assert unbounded(ThreatModel(norm="l1", bounds=Bounds(-1, 1)), 64) == 64


def test_the_step_grows_and_shrinks_with_the_budget() -> None:
    """A step that stayed would be four balls wide in the smallest, and too short to cross the largest."""
    attacked: list[ThreatModel] = []
    trial: Any = SimpleNamespace(
        threat=ThreatModel(eps="0.1", step_size="0.025"),
        data=SimpleNamespace(x=torch.empty(2, 1, 8, 8)),
        attack=lambda label, evaluator, threat: attacked.append(threat),
    )
    list(BudgetCurve().rows(trial))
    assert [(float(threat.eps), float(threat.step_size)) for threat in attacked] == [
        (0.05, 0.0125),
        (0.2, 0.05),
        (0.4, 0.1),
        (0.5, 0.125),
    ]
