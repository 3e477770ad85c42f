"""Every alarm: its whole text, and the numbers next to it that must stay silent."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from calfat_plugin.evaluators.alarms import Alarm, find_alarms
from calfat_plugin.report.run_tables import show_alarms
from calfat_plugin.results import EvaluationResult
from tests.snapshot import TextSnapshot

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


def told(*results: EvaluationResult) -> list[tuple[str, tuple[str, ...]]]:
    return [(alarm.code, alarm.labels) for alarm in find_alarms(results)]


def pgd(accuracy: float, label: str = "pgd20", **more: Any) -> EvaluationResult:
    return result(label, "pgd", accuracy, **more)


def autoattack(accuracy: float, **more: Any) -> EvaluationResult:
    return result("autoattack", "autoattack", accuracy, **more)


def classes(one: EvaluationResult, *per_class: float | None) -> EvaluationResult:
    return dataclasses.replace(one, per_class=per_class)


def sweep(*points: tuple[str, float]) -> tuple[EvaluationResult, ...]:
    return tuple(result("fgsm", "fgsm", accuracy, eps=eps) for eps, accuracy in points)


SAID = {"warnings": [{"code": "probabilities", "text": "the model returns probabilities."}]}
ALARMS: dict[str, tuple[EvaluationResult, ...]] = {
    "autoattack-above": (natural(), pgd(0.4), autoattack(0.45)),
    "flattened-logits": (result("bim", "bim", 0.32), pgd(0.3112), result("cw", "cw", 0.2469)),  # the paper's of CalFAT
    "flattened-logits, scaled": (pgd(0.31), pgd(0.25, "pgd20x10", logit_scale=10.0)),
    "robust-above-natural": (natural(0.5), pgd(0.501)),
    "rises-with-eps": (natural(), *sweep(("16/255", 0.45), ("2/255", 0.7), ("8/255", 0.4))),
    "zero-gradients": (pgd(0.4, details={"zero_gradients": 11}, logit_scale=1.0),),
    "zero-gradients, scaled": (pgd(0.4, details={"zero_gradients": 11}, logit_scale=10.0),),
    "not-run": (natural(), EvaluationResult.without_number("apgd-t", "it needs more", settings={}, implementation="")),
    "one-answer": (classes(natural(0.612), 0.0, 1.0, 0.0), pgd(0.612)),
    "one-answer, under attack alone": (classes(pgd(0.612), 1.0, None, 0.0),),
    "guessing": (dataclasses.replace(classes(natural(0.1), 0.2, 0.1, 0.0), guess=0.1), pgd(0.1)),
    "probabilities": (pgd(0.4, details=SAID), result("bim", "bim", 0.4, details=SAID)),  # each is passed on once
}


@pytest.mark.parametrize("kind", ALARMS)
def test_an_alarm_is_raised(kind: str, snapshot: TextSnapshot) -> None:
    (alarm,) = find_alarms(ALARMS[kind])
    assert alarm.code == kind.partition(",")[0]
    snapshot(f"{alarm.text} {alarm.labels}")


@pytest.mark.parametrize("attack", ["fgsm", "bim", "pgd", "mi-fgsm", "cw"])
def test_autoattack_should_beat_every_other_attack(attack: str) -> None:
    found = told(result("other", attack, 0.4), autoattack(0.43))
    assert found == [("autoattack-above", ("autoattack", "other"))]


@pytest.mark.parametrize(
    "results",
    [
        (pgd(0.448), autoattack(0.45)),  # within 0.2 points
        (pgd(0.4, eps="4/255"), autoattack(0.45)),  # another budget
        (pgd(0.4, norm="l2"), autoattack(0.45)),
        (pgd(0.4, examples=500), autoattack(0.45)),  # other examples
        (result("square", "autoattack", 0.4, version="custom"), autoattack(0.45)),
        (pgd(0.4), result("square", "autoattack", 0.45, version="custom")),  # not all of it
        (result("theirs", None, 0.4), autoattack(0.45)),  # a plugin's: nothing is known about it
        (pgd(0.4, examples=10), autoattack(0.5, examples=10)),  # one example of a small set
        (pgd(0.2674), result("cw", "cw", 0.2438)),  # the paper's gap of FedPGD
        (result("bim", "bim", 0.4), pgd(0.3), result("cw", "cw", 0.28)),  # only the lowest plain PGD is compared
        (pgd(0.4, "weak", logit_scale=0.1), result("cw", "cw", 0.28)),
        (natural(0.5), pgd(0.5)),
        *((pgd(0.4), result(**{"label": "pgd20", "attack": "pgd", "accuracy": 0.45, "eps": "16/255", **changes}))
          for changes in ({"norm": "l2"}, {"label": "other"}, {"accuracy": 0.404})),
        (pgd(0.4, details={"zero_gradients": 10}),),
        (classes(natural(0.612), 0.0, 1.0, 0.001), pgd(0.612)),  # another class is right now and then
        (classes(natural(0.6), 0.0, 0.99, 0.0),),
        (classes(natural(1.0), None, 1.0, None),),  # images of one class alone
        (dataclasses.replace(classes(natural(0.101), 0.2, 0.1), guess=0.1),),
        (dataclasses.replace(classes(pgd(0.05), 0.1, 0.0), guess=0.1),),  # an attack may leave less than guessing
        (classes(natural(), 0.9, 0.9), classes(pgd(0.5), 0.0, 1.0)),  # clean answers are not one
        (natural(0.8), result("fgsm", "fgsm", 0.5), pgd(0.45), result("cw", "cw", 0.44), autoattack(0.43)),
        (),
    ],
)  # fmt: skip
def test_what_is_near_or_elsewhere_is_silent(results: tuple[EvaluationResult, ...]) -> None:
    assert told(*results) == []


def test_the_one_answer_has_the_name_of_its_class() -> None:
    (alarm,) = find_alarms([classes(natural(0.612), 0.0, 1.0, 0.0)], ("cat", "dog", "owl"))
    assert alarm.text.startswith("natural gets class dog right for all images and every other class for none")
    assert "Its 61.2 % is the share of that class" in alarm.text


# --- on the console ---------------------------------------------------------------------------------------------------


def test_findings_are_shown_with_their_code_and_nothing_without(snapshot):
    stream = io.StringIO()
    console = Console(file=stream, width=40)
    show_alarms(console, ())
    assert stream.getvalue() == ""
    show_alarms(console, (Alarm("a-b", "[red]text[/red] that is longer than one line of it.", ()),))
    show_alarms(console, (Alarm("a", "b", ()), Alarm("c", "d", ())))
    snapshot(stream.getvalue())
