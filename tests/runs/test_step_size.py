"""The step follows eps in training and in evaluation; one that does not fit is reported wherever a number is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calfat_plugin import load_run
from calfat_plugin.exact import exact_text
from calfat_plugin.experiment import Experiment, assemble, same_but_rounds
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.registry import Registry
from tests.report.made import made_run

REGISTRY = Registry.load(entry_points=False)
SHORT = (
    "steps x step_size, 2 x 0.05 = 0.1, is less than eps 0.3, so no image gets to the edge of the ball. Take a "
    "step_size that follows eps, such as eps/2, or more steps."
)
LONG = "step_size 0.05 is more than eps 0.01. Take one that follows eps, such as eps/4."
EVALUATORS = "[natural, fgsm, bim2, pgd2, pgd6, {name: pgd, label: tiny, eps: 0.01, steps: 6}]"


def experiment(threat: str, evaluators: str = "[natural]", trainer: str = "fedpgd", **how: Any) -> Experiment:
    lines = (
        f"trainer: {trainer}",
        f"threat: {threat}",
        f"evaluators: {evaluators}",
        "monitor: {evaluators: [{name: pgd2, label: seen}]}",
    )
    text = "".join(["calfat:\n", *(f"  {line}\n" for line in lines)])
    return assemble(parse_document(text, "mine.yaml"), REGISTRY, **how)


def steps_of(found: Experiment) -> dict[str, str]:
    """Label to the step that an evaluator takes, and that of training."""
    threat = found.threat
    own = {pick.label: pick.options.threat(threat).step_size for pick in found.evaluators if pick.label != "natural"}
    return {"training": exact_text(threat.step_size), **{label: exact_text(step) for label, step in own.items()}}


EACH = (
    "[fgsm, pgd20, mi-fgsm, {name: bim, label: own eps, eps: 0.2}, {name: cw, label: own step, step_size: 0.03}, "
    "{name: pgd, label: l2, norm: l2, eps: 2}, {name: pgd, label: l2 step, norm: l2, eps: 2, step_size: eps/8}]"
)


@pytest.mark.parametrize(
    ("threat", "steps"),
    [
        ("{eps: 0.1}", ["0.025", "0.1", "0.025", "0.01", "0.05", "0.03", "0.5", "0.25"]),
        ("{eps: 0.3, step_size: eps/10}", ["0.03", "0.3", "0.03", "0.03", "0.02", "0.03", "0.5", "0.25"]),
        ("{eps: 0.3, step_size: 0.02}", ["0.02", "0.3", "0.02", "0.03", "0.02", "0.03", "0.5", "0.25"]),
        ("{eps: 8/255}", ["2/255", "8/255", "2/255", "4/1275", "0.05", "0.03", "0.5", "0.25"]),
    ],
)
def test_whose_step_follows_which_eps(threat: str, steps: list[str]) -> None:
    labels = ("training", "fgsm", "pgd20", "mi-fgsm", "own eps", "own step", "l2", "l2 step")
    assert steps_of(experiment(threat, EACH)) == dict(zip(labels, steps, strict=True))


def test_warnings_name_all_whom_a_bad_step_concerns() -> None:
    absolute = "{eps: 0.3, step_size: 0.05, steps: 2}"
    evaluators = EVALUATORS.replace("natural, ", "natural, fab, autoattack, ")
    tiny = f"mine.yaml:4: calfat.evaluators[7]: tiny: {LONG}"
    assert experiment(absolute, evaluators).warnings == (
        f"mine.yaml:3: calfat.threat: training, bim2, pgd2, seen: {SHORT}",
        tiny,
    )
    for how, labels in (({"trainer": "standard"}, "bim2, pgd2, seen"), ({"trains": False}, "bim2, pgd2")):
        found = experiment(absolute, evaluators, **how).warnings
        assert found == (f"mine.yaml:4: calfat.evaluators[4]: {labels}: {SHORT}", tiny)
    assert experiment("{eps: 0.3, step_size: eps/2, steps: 2}", EVALUATORS).warnings == ()


def test_the_alarms_of_a_run_are_about_groups_too(tmp_path: Path) -> None:
    overrides = ("calfat.threat={eps: 0.1}", "calfat.clients=[{ids: 0, threat: {eps: 0.3, step_size: 0.05, steps: 2}}]")
    results = json.loads((made_run(tmp_path / "run", *overrides, final={"natural": 0.9}) / "results.json").read_text())
    found = [alarm["text"] for alarm in results["alarms"] if alarm["code"] == "step-size"]
    assert found == [alarm.text for alarm in load_run(tmp_path / "run").alarms] == [f"training of group1: {SHORT}"]


def test_an_absolute_step_of_before_is_the_same_recipe() -> None:
    multiple, same, longer = (experiment(f"{{eps: 0.1, step_size: {step}}}") for step in ("eps/4", "0.025", "0.026"))
    assert (same.as_run()["calfat"]["threat"]["step_size"], multiple.as_run()["calfat"]["threat"]["step_size"]) == (
        "0.025",
        "eps/4",
    )
    assert same_but_rounds(multiple.as_run(), same.as_run()) == []
    assert same_but_rounds(multiple.as_run(), longer.as_run()) == ["calfat.threat.step_size"]
    wider = experiment("{eps: 0.2}").as_run()
    assert same_but_rounds(multiple.as_run(), wider) == ["calfat.threat.eps"]
