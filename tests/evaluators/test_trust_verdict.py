"""The verdict of ``calfat trust``: a function of numbers, tried on made numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calfat_plugin.evaluators.gradient import PGDOptions
from calfat_plugin.exact import parse_number
from calfat_plugin.judging.battery import SAMPLE, AutoAttackCheck, BudgetCurve, battery, unbounded
from calfat_plugin.judging.findings import CLAIM, Findings, Overview, Row
from calfat_plugin.judging.verdict import Verdict, conclude, deciding, word_of
from calfat_plugin.maths.intervals import wilson
from calfat_plugin.threat import Bounds, ThreatModel
from tests.snapshot import TextSnapshot

CHECKS = battery(full=False, surrogates=True)
HONEST = {
    "fgsm": 0.86,
    "pgd20": 0.80,
    "noise100": 0.96,
    "pgd20 of other": 0.92,
    "pgd20 of surrogate": 0.90,
    "cw20 of surrogate": 0.90,
    "mi-fgsm20 of surrogate": 0.89,
    "cw20": 0.79,
    "dlr20": 0.80,
    "margin20": 0.80,
    "pgd5": 0.83,
    "pgd100": 0.79,
    "pgd20 x 5": 0.79,
    "waking 2 dead units": 0.93,
    "square1000": 0.85,
    "autoattack": 0.78,
}
CURVE = {"0.05": 0.90, "0.2": 0.20, "0.4": 0.01, "0.5": 0.0}
ROWS = {
    "gradients": ("fgsm",),
    "pgd": ("pgd20",),
    "noise": ("noise100",),
    "transfer": ("pgd20 of other",),
    "surrogate": ("pgd20 of surrogate", "cw20 of surrogate", "mi-fgsm20 of surrogate"),
    "losses": ("cw20", "dlr20", "margin20"),
    "strength": ("pgd5", "pgd100", "pgd20 x 5"),
    "dead-units": ("waking 2 dead units",),
    "black-box": ("square1000",),
    f"autoattack-{SAMPLE}": ("autoattack",),
}
FACTS = {
    "answers": {"natural": 0.98, "guess": 0.11, "changed": 0.0, "batched": 0.0, "remembered": 0.0, "repeated": 0.0},
    "slopes": {"unrelated": 0.0, "one-hot": 0.0},
}
GRADIENTS = {"fgsm", "pgd20", "cw20", "dlr20", "margin20", "pgd5", "pgd100", "pgd20 x 5"}


def made(
    attacks: Mapping[str, float] = {},
    curve: Mapping[str, float] = CURVE,
    zero: int = 0,
    zero_margin: int = 0,
    facts: Mapping[str, float] = {},
    until: str = "",
) -> list[Findings]:
    """Findings in the battery's order: an honest model's, with these values instead; it ends before ``until``."""
    accuracies, left, found = {**HONEST, **attacks}, 0.98, []
    for check in CHECKS:
        if check.name == until:
            break
        known = {name: facts.get(name, share) for name, share in FACTS.get(check.name, {}).items()}
        rows = []
        for attack in ROWS.get(check.name, ()):
            left = min(left, accuracies[attack])
            zeros = zero if attack == "fgsm" else zero_margin if check.name == "losses" else 0
            vanished = zeros if attack in GRADIENTS else None
            rows.append(Row(attack, "0.1", accuracies[attack], left, 300, 1.0, vanished))
        if check.name == "budget":
            rows = [Row("pgd20", eps, accuracy, None, 300, 1.0, 0) for eps, accuracy in curve.items()]
        found.append(Findings(check.name, tuple(rows), known))
    return found


def verdict(**changes: object) -> Verdict:
    return conclude(CHECKS, made(**changes), "linf", "0.1", 300)  # type: ignore[arg-type]


def test_an_honest_number_holds_and_the_sentence_has_every_attack_of_the_budget(snapshot: TextSnapshot) -> None:
    found = verdict()
    assert (found.word, found.text, found.causes, found.clear) == ("holds", "holds", (), False)
    assert (found.natural, found.claimed, found.worst) == (0.98, 0.80, 0.78)
    assert found.difference == pytest.approx(0.02)
    snapshot(found.sentence)


def test_what_the_last_images_leave_is_a_share_of_all() -> None:
    """AutoAttack attacks a few; ``left`` is counted over all of them, and so are the intervals."""
    *others, last = made()
    (row,) = last.rows
    few = dataclasses.replace(last, rows=(dataclasses.replace(row, examples=32, of=300),))
    found = conclude(CHECKS, [*others, few], "linf", "0.1", 300)
    shares = {"natural": 0.98, "claimed": 0.80, "worst": 0.78, "difference": 0.02}
    assert found.intervals == {name: wilson(share, 300) for name, share in shares.items()}
    assert few.rows[0].left_interval == wilson(0.78, 300)
    assert few.rows[0].interval is None  # they were picked for being near to an error, and stand for no others
    assert row.interval == wilson(0.78, 300)


@pytest.mark.parametrize(
    ("left", "images", "available", "needed", "cause"),
    [
        (0.7375, 16, 359, 42, "About 42 would decide if the difference stays (--examples 42)"),
        (0.80, 60, None, 73, "About 73 would decide if the difference stays (--examples 73)"),
        (0.77, 300, 359, 457, "if the difference stays, and the test split has 359. Report both numbers"),
        (0.75, 300, 359, None, "and so near to 5 no number of them would be enough. Report both numbers"),
    ],
)
def test_too_few_images_are_not_shown_and_what_would_decide_is_said(
    left: float, images: int, available: int | None, needed: int | None, cause: str
) -> None:
    others = dict.fromkeys(("cw20", "pgd100", "pgd20 x 5"), 0.80)
    evidence = of(images, made(attacks={**others, "autoattack": left}))
    found = conclude(CHECKS, evidence, "linf", "0.1", images, available)
    assert (found.word, found.text, found.usable, found.clear) == ("not shown", "not shown", True, False)
    assert (found.images, found.causes[0].endswith(cause)) == (needed, True)
    assert (
        f"overstated (over 5, and the whole interval above 2): {images} images are too few to be sure"
        in found.causes[0]
    )


@pytest.mark.parametrize("difference", [0.0, 0.004, 0.02, 0.03, 0.049, 0.051, 0.07, 0.1, 0.15])
def test_so_many_images_decide_and_one_fewer_does_not(difference: float) -> None:
    images = deciding(difference)
    assert images is not None
    words = [word_of(difference, wilson(difference, number)) for number in (images - 1, images, 10 * images)]
    clear = "holds" if difference < 0.05 else "overstated"
    assert words == ["not shown", clear, clear]


def of(examples: int, evidence: list[Findings]) -> list[Findings]:
    """The same shares of so many images."""
    return [
        dataclasses.replace(each, rows=tuple(dataclasses.replace(row, examples=examples) for row in each.rows))
        for each in evidence
    ]


@pytest.mark.parametrize("check", [check.name for check in CHECKS])
def test_a_number_does_not_hold_before_the_last_check(check: str) -> None:
    found = verdict(until=check)
    assert (found.word, found.clear) == ("not shown", False)
    assert (found.sentence == "Nothing has been measured yet.") == (check == CHECKS[0].name)


@pytest.mark.parametrize(
    ("changes", "points", "cause", "hides"),
    [
        ({"attacks": {"cw20": 0.5}}, "30.0", "losses that do not depend on the scale of the logits", False),
        ({"attacks": {"noise100": 0.6}}, "20.0", "random points of the ball break what PGD does not", True),
        ({"attacks": {"pgd20 of other": 0.7}}, "10.0", "other models' adversarial examples break", True),
        ({"attacks": {"cw20 of surrogate": 0.7}}, "10.0", "adversarial examples of a surrogate, a network", True),
        ({"attacks": {"waking 2 dead units": 0.01}}, "79.0", "images that wake dead units (a ReLU whose input", True),
        ({"attacks": {"pgd100": 0.7}}, "10.0", "more steps and restarts break more", False),
        ({"attacks": {"square1000": 0.2}}, "60.0", "Square, which uses no gradients, breaks", True),
        ({"attacks": {"autoattack": 0.7}}, "10.0", "AutoAttack breaks what PGD-20 does not", False),
        ({"attacks": {"noise100": 0.7, "cw20": 0.5}}, "30.0", "losses that do not depend", False),
        ({"attacks": {"cw20": 0.785, "pgd100": 0.762, "square1000": 0.745}}, "5.5", "more steps and restarts", False),
        ({"attacks": {"cw20": 0.785, "pgd100": 0.766, "square1000": 0.749}}, "5.1", "more steps and restarts", False),
        ({"attacks": {"cw20": 0.75, "pgd100": 0.6}}, "20.0", "more steps and restarts", False),
        ({"attacks": {"cw20": 0.5}, "facts": {"unrelated": 0.2}}, "30.0", "losses that do not depend", True),
    ],
)
def test_an_overstated_number_names_the_check_that_broke_most(
    changes: dict, points: str, cause: str, hides: bool
) -> None:
    found = verdict(**changes)
    at_least, end = ("at least ", "; the worst case is no usable number") if hides else ("", "")
    assert (found.word, found.text) == ("overstated", f"overstated by {at_least}{points} points{end}")
    assert found.usable is not hides
    assert found.causes[0].startswith(cause)
    few, many, low, high = (f"{100 * end:.1f}" for name in ("difference", "worst") for end in found.intervals[name])
    assert found.sentence.startswith(
        "The 80.0 % [75.1, 84.1] under PGD-20 within linf 0.1 (300 test images) overstate the robustness by "
        f"{at_least}{points} points [{few}, {many}]: all attacks together leave {100 * found.worst:.1f} % [{low}, "
        f"{high}]. "
        f"Cause: {cause}"
    )


def test_five_points_are_within_the_tolerance() -> None:
    found = {left: conclude(CHECKS, of(10**6, made(attacks={"autoattack": left})), "linf", "0.1", 10**6).text
             for left in (0.749, 0.75, 0.751)}  # fmt: skip
    assert found == {0.749: "overstated by 5.1 points", 0.75: "not shown", 0.751: "holds"}


def test_only_the_last_check_is_left_out_where_it_could_change_nothing() -> None:
    """Of an overstated number, and of a model that hides: AutoAttack could make its number no more usable."""
    last = f"autoattack-{SAMPLE}"
    for changes, early in (({"attacks": {"cw20": 0.5}}, "black-box"), ({"facts": {"unrelated": 0.5}}, "surrogate")):
        assert [verdict(**changes, until=name).clear for name in (early, last)] == [False, True]
    assert verdict(attacks={"cw20": 0.5}, until=last).word == "overstated"
    assert "overstate the robustness by at least 30.0 points [" in verdict(attacks={"cw20": 0.5}, until=last).sentence


@pytest.mark.parametrize(
    ("changes", "worst"),
    [
        ({"zero": 30}, ""),
        ({"curve": {**CURVE, "0.2": 0.85}}, "78.0 %"),
        ({"curve": {**CURVE, "0.5": 0.14, "0.4": 0.15}}, "78.0 %"),
        ({"attacks": {"pgd100": 0.83}}, ""),
        ({"attacks": {"pgd20 x 5": 0.83}}, ""),
        ({"attacks": {"pgd5": 0.776}}, ""),
        ({"attacks": {"noise100": 0.765}}, "76.5 %"),
        ({"attacks": {"pgd20 of other": 0.765}}, "76.5 %"),
        ({"attacks": {"mi-fgsm20 of surrogate": 0.765}}, "76.5 %"),
        ({"attacks": {"square1000": 0.765}}, "76.5 %"),
        ({"facts": {"unrelated": 0.25}}, "78.0 %"),
        ({"facts": {"one-hot": 1.0}}, "78.0 %"),
        ({"facts": {"repeated": 0.5}}, "78.0 %"),
        ({"zero_margin": 30}, "78.0 %"),
        ({"attacks": {"waking 2 dead units": 0.765}}, "76.5 %"),
    ],
)  # fmt: skip
def test_a_symptom_without_a_lower_number_is_not_shown(changes: dict, snapshot: TextSnapshot, worst: str) -> None:
    """Where the model hides from attacks, what withstands them is no usable number."""
    found = verdict(**changes)
    assert (found.word, len(found.causes), found.usable) == ("not shown", 1, not worst)
    assert found.text == ("not shown; the worst case is no usable number" if worst else "not shown")
    assert found.causes[0] in found.sentence
    assert (f"The worst case, {worst}, is no usable number" in found.sentence) == bool(worst)
    assert "--full" in found.sentence  # whether it would decide is said of each
    snapshot(found.sentence)


@pytest.mark.parametrize(
    "changes",
    [
        *({"facts": facts} for facts in ({"unrelated": 0.1}, {"one-hot": 0.1}, {"repeated": 0.01}, {"batched": 0.01})),
        {"attacks": {"square1000": 0.83}},  # fewer than FGSM leaves, more than the best that uses gradients: CW
    ],
)
def test_a_few_images_hide_nothing(changes: dict) -> None:
    """A kink of a ReLU, or rounding."""
    assert verdict(**changes).word == "holds"


def test_a_margin_that_reaches_grey_where_the_cross_entropy_does_not_is_no_symptom() -> None:
    """tanh(40 x) in front of an honest network: its pixels saturate at a budget five times the one on trial."""
    evidence = made(curve={**CURVE, "0.4": 0.2, "0.5": 0.2})
    where = next(index for index, each in enumerate(evidence) if each.check == "budget")
    margin = dataclasses.replace(evidence[where].rows[-1], attack="margin20", accuracy=0.08)
    evidence[where] = dataclasses.replace(evidence[where], rows=(*evidence[where].rows, margin))
    assert conclude(CHECKS, evidence, "linf", "0.1", 300).word == "holds"
    blind = dataclasses.replace(margin, accuracy=0.14)
    evidence[where] = dataclasses.replace(evidence[where], rows=(*evidence[where].rows[:-1], blind))
    assert conclude(CHECKS, evidence, "linf", "0.1", 300).causes == (
        "at eps 0.5 every image can be made the same grey one, yet what pgd20 and margin20 leaves, 14.0 %, is more "
        "than "
        "guessing (11.0 %): the attack fails",
    )


@pytest.mark.parametrize(("facts", "disputed"), [({"batched": 0.3}, 0), ({"remembered": 0.3}, 0), ({}, 30)])
def test_no_number_is_usable_of_a_model_whose_answer_depends_on_more_than_the_image(
    facts: dict[str, float], disputed: int, snapshot: TextSnapshot
) -> None:
    evidence = made(facts=facts, until="slopes")
    last = dataclasses.replace(evidence[-1].rows[-1], disputed=disputed)
    found = conclude(CHECKS, [*evidence[:-1], dataclasses.replace(evidence[-1], rows=(last,))], "linf", "0.1", 300)
    assert (found.word, found.clear, found.usable) == ("not shown", True, False)
    (cause,) = found.causes
    assert cause in found.sentence
    snapshot(found.sentence)


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        # Randomised, and no better than guessing.
        ({"facts": {"changed": 0.4}, "attacks": {"pgd20": 0.1}}, "Robustness within linf 0.1 (300 test images) is not"),
        # No better than guessing, and others break still more.
        ({"attacks": {"pgd20": 0.1, "cw20": 0.0}}, "The model is not robust: it has 10.0 %"),
        # Others break more, and a symptom.
        (
            {"attacks": {"cw20": 0.3}, "zero": 100},
            "The 80.0 % [75.1, 84.1] under PGD-20 within linf 0.1 (300 test images) over",
        ),
        # A symptom, and checks that are left.
        (
            {"zero": 100, "until": "strength"},
            "The 80.0 % [75.1, 84.1] under PGD-20 within linf 0.1 (300 test images) are not",
        ),
    ],
)
def test_where_several_conditions_hold_the_first_of_the_table_gives_the_verdict(
    changes: dict[str, Any], begins: str
) -> None:
    assert verdict(**changes).sentence.startswith(begins)


def test_a_model_that_is_no_better_than_guessing_is_not_robust_at_once(snapshot: TextSnapshot) -> None:
    found = verdict(attacks={"pgd20": 0.11, "fgsm": 0.3}, until="noise")
    assert (found.word, found.clear, found.causes) == ("not robust", True, ())
    snapshot(found.sentence)
    found = verdict(attacks={"pgd20": 0.01, "fgsm": 0.03}, facts={"natural": 0.13}, until="noise")
    assert (found.word, found.clear) == ("not robust", True)
    snapshot(found.sentence)


def test_of_a_randomised_model_one_run_decides_nothing(snapshot: TextSnapshot) -> None:
    rows = tuple(Row(f"pgd20, draw {n}", "0.1", 0.6 + n / 100, 0.6, 300, 1.0, 0) for n in (1, 2, 3))
    answers = Findings("answers", rows, {"natural": 0.98, "guess": 0.11, "changed": 0.4})
    found = conclude(CHECKS, [answers], "linf", "0.1", 300)
    assert (found.word, found.clear) == ("not shown", True)
    snapshot(found.sentence)


def test_the_battery_has_the_gradients_first_and_autoattack_last() -> None:
    first = ["answers", "gradients", "pgd", "slopes", "losses"]
    then = ["noise", "budget", "strength", "dead-units", "black-box", "surrogate"]
    assert [check.name for check in battery(full=True)] == [*first, *then, "autoattack"]
    every = [check.name for check in battery(full=False, surrogates=True)]
    assert every == [*first, "transfer", *then, f"autoattack-{SAMPLE}"]
    assert [check.name for check in battery(full=False, square=False)] == [
        *first,
        *(name for name in then if name != "black-box"),
        f"autoattack-{SAMPLE}",
    ]


def test_an_attack_takes_what_its_label_says() -> None:
    every = {attack.label: attack for check in battery(full=True) for attack in check.attacks}
    options: dict[str, Any] = {label: vars(attack.evaluator)["options"] for label, attack in every.items()}
    taken = {label: (how.steps, how.restarts) for label, how in options.items() if isinstance(how, PGDOptions)}
    few = {"pgd5": (5, 1), "pgd100": (100, 1), "pgd20 x 5": (20, 5)}
    assert taken == dict.fromkeys(("pgd20", "cw20", "dlr20", "margin20"), (20, 1)) | few
    assert (options["noise100"].draws, options["square1000"].queries) == (100, 1000)
    assert {label for label, attack in every.items() if attack.resumable} == {"square1000"}
    assert {label: attack.classes for label, attack in every.items() if attack.classes > 2} == {"dlr20": 3}


def test_autoattack_comes_to_the_nearest_first_as_published() -> None:
    asked: list[Any] = []

    def attack(label: str, evaluator: Any, *, only: torch.Tensor, resumable: bool) -> Row:
        how = evaluator.options
        asked.append((label, how.version, how.iterations, how.queries, only.tolist(), resumable))
        return Row(label, "", 0.5 if label == "autoattack" else 1.0, None, 2, 0.0)

    trial: Any = SimpleNamespace(nearest_to_an_error=lambda steps: torch.tensor([4, 2, 0, 1, 3]), attack=attack)
    assert len(list(AutoAttackCheck(examples=2).rows(trial))) == 2  # all withstand the second time
    list(AutoAttackCheck(examples=5, iterations=7, queries=9).rows(trial))
    assert asked == [
        ("autoattack", "standard", 100, 5000, [2, 4], True),
        ("autoattack (2)", "standard", 100, 5000, [0, 1], True),
        ("autoattack", "standard", 7, 9, [0, 1, 2, 3, 4], True),
    ]


def test_evidence_survives_json() -> None:
    for evidence in made(zero=3):
        assert Findings.from_json(json.loads(json.dumps(evidence.as_json()))) == evidence


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
        task=SimpleNamespace(
            threat=ThreatModel(eps="0.1", step_size="0.025"), data=SimpleNamespace(x=torch.empty(2, 1, 8, 8))
        ),
        attack=lambda label, evaluator, threat: attacked.append(threat) or Row(label, "", 0.0, None, 2, 0.0),
    )
    list(BudgetCurve().rows(trial))
    found = [(float(threat.eps), float(threat.step_size)) for threat in attacked]
    assert found == [(0.05, 0.0125), (0.2, 0.05), (0.4, 0.1), (0.5, 0.125)]


@pytest.mark.parametrize(("eps", "attacks"), [("0.1", [CLAIM] * 4 + ["margin20"]), ("0.5", [CLAIM] * 1)])
def test_a_budget_that_reaches_grey_is_attacked_by_both_losses(eps: str, attacks: list[str]) -> None:
    """Where it is the one on trial, ``ScaleFree`` has attacked it, and its row counts."""
    attacked: list[str] = []

    def attack(label: str, evaluator: Any, threat: ThreatModel) -> Row:
        attacked.append(label)
        return Row(label, str(threat.eps), 0.5, None, 300, 0.0)

    threat = ThreatModel(eps=eps, step_size="eps/4")  # type: ignore[arg-type]
    task = SimpleNamespace(threat=threat, data=SimpleNamespace(x=torch.empty(2, 1, 8, 8)))
    trial: Any = SimpleNamespace(task=task, attack=attack)
    list(BudgetCurve().rows(trial))
    assert attacked == attacks
    rows = [Row(CLAIM, "0.25", 0.5, None, 300, 0.0)]
    for margin, fails in ((0.05, False), (0.4, True)):
        known = (*rows, Row("margin20", "0.5", margin, margin, 300, 0.0))
        overview = Overview(natural=0.9, guess=0.11, facts={}, budget="0.5", claimed=0.4, examples=300, rows=known)
        assert bool(list(BudgetCurve().symptoms(rows, overview))) is fails


def test_autoattack_has_nothing_to_do_where_everything_is_broken() -> None:
    trial: Any = SimpleNamespace(nearest_to_an_error=lambda steps: torch.empty(0, dtype=torch.int64), attack=None)
    assert list(AutoAttackCheck(examples=32).rows(trial)) == []


@pytest.mark.parametrize(
    ("check", "left", "usable"), [("surrogate", 0.73, False), ("surrogate", 0.779, True), ("dead-units", 0.73, True)]
)
def test_images_that_only_a_surrogate_breaks_show_that_the_model_hides(check: str, left: float, usable: bool) -> None:
    """Alone it leaves more than PGD-20 does, but it breaks other images. Not so what wakes units: it climbs the margin,
    too, and an honest model is not accused of what that breaks."""
    evidence = made()
    for index, each in enumerate(evidence):
        if each.check in (check, f"autoattack-{SAMPLE}"):
            end = left if each.check == check else 0.72
            rows = tuple(dataclasses.replace(row, left=end) for row in each.rows)
            evidence[index] = dataclasses.replace(each, rows=rows)
    found = conclude(CHECKS, evidence, "linf", "0.1", 300)
    assert (found.word, found.usable) == ("overstated", usable)
