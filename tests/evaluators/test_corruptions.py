"""The evaluators of what no attack of one ball covers: common corruptions, and the panel of threats."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
import torch
from torch import nn

from calfat_plugin.builtin import calfat_evaluators
from calfat_plugin.datasets import ImageData
from calfat_plugin.errors import OptionError
from calfat_plugin.evaluators.autoattack.autoattack import AutoAttack
from calfat_plugin.evaluators.corruptions import CorruptionOptions, Corruptions
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.evaluators.panel import Panel, PanelOptions
from calfat_plugin.maths.corruptions import CORRUPTIONS, severities
from calfat_plugin.options import parse_options
from calfat_plugin.seeds import generator
from calfat_plugin.threat import ThreatModel

ENTRIES = {entry.name: entry for entry in calfat_evaluators()}
KEPT = Fraction(1, 10)


# --- corruptions ------------------------------------------------------------------------------------------------------


def test_the_accuracy_is_the_worst_case_and_the_metric_the_mean(digits_model, digits, make_task):
    data = digits.subset(range(60))
    result = Corruptions(CorruptionOptions()).evaluate(make_task(digits_model, data), "corruptions")
    noise, verdicts = generator(0, "evaluate/corruptions", round=0), {}
    with torch.no_grad():
        for kind in CORRUPTIONS:
            for severity, version in enumerate(severities(kind, data.x, noise), start=1):
                verdicts[f"{kind}-{severity}"] = digits_model(version).argmax(1) == data.y
    every = torch.stack(list(verdicts.values()))

    assert len(verdicts) == 35
    assert result.accuracy == float(every.all(dim=0).double().mean())
    assert result.metrics == {"mean": pytest.approx(float(every.double().mean()))}
    assert result.details == {name: int(right.sum()) for name, right in verdicts.items()}
    assert 0 < result.accuracy < result.metrics["mean"] < 1
    assert "eps" not in result.settings


def test_the_final_point_is_the_first_version_that_the_model_gets_wrong(make_task):
    class Bright(nn.Module):
        """Class 1 from a mean of 0.62 on."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean = x.flatten(1).mean(dim=1)
            return torch.stack((torch.full_like(mean, 0.62), mean), dim=1)

    data = ImageData(torch.full((30, 1, 4, 4), 0.5), torch.zeros(30, dtype=torch.long))
    task = make_task(Bright().eval(), data, num_classes=2)
    found = Corruptions(CorruptionOptions(kinds="brightness, blur")).craft(
        task, data.x, data.y, torch.Generator().manual_seed(0)
    )
    # Some are brightened, by 0.15 at the first severity that is too much; the others end as they are after a blur.
    assert sorted({round(value, 5) for value in found.flatten().tolist()}) == [0.5, 0.65]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("corruptions", {"kinds": "noise, blurr"}),
        ("corruptions", {"kinds": "noise, noise"}),
        ("corruptions", {"kinds": ""}),
        ("panel", {"linf": 8}),
        ("panel", {"l1": 0}),
        ("panel", {"attack": "pdg"}),
    ],
)
def test_options_that_make_no_sense_are_reported(name, options, snapshot):
    with snapshot.raises(OptionError, next(iter(options))):
        parse_options(
            ENTRIES[name].config,
            options,
            owner=name,
            fail=lambda at, reason: OptionError(f"{at[0]}: {reason}" if at else reason),
        )


def test_a_radius_longer_than_any_image_is_refused_before_a_run():
    with pytest.raises(OptionError, match=r"^eps is longer than any image, at most 10000 pixel ranges; got 10001$"):
        ENTRIES["panel"].check(PanelOptions(l2=Fraction(10_001)), None)
    ENTRIES["panel"].check(PanelOptions(linf=None), None)


# --- the panel --------------------------------------------------------------------------------------------------------

SMALL = PanelOptions(linf=KEPT, l2=Fraction(1, 2), l1=Fraction(3, 2), steps=5)
BALLS = {"linf": KEPT, "l2": Fraction(1, 2), "l1": Fraction(3, 2)}


def alone(norm, task):
    """What the panel's member measures by itself."""
    eps = BALLS[norm]
    options = PGDOptions(norm=norm, eps=eps, step_size=eps / 4, steps=5)
    return PGD(options).evaluate(task, f"panel/{norm}")


def test_a_panel_is_the_worst_case_and_the_mean_of_its_threats(digits_model, digits, make_task):
    data = digits.subset(range(60))
    task = make_task(digits_model, data, batch_size=25)
    broken: dict[str, set[int]] = {"by hand": set(), "panel": set()}

    def by_hand(where, x_adv):
        wrong = digits_model(x_adv).argmax(1) != data.y[where]
        broken["by hand"].update(where[wrong].tolist())

    watched = dataclasses.replace(task, on_examples=by_hand)
    members = {norm: alone(norm, watched) for norm in BALLS}
    members["corruptions"] = Corruptions(CorruptionOptions()).evaluate(watched, "panel/corruptions")
    figures = {norm: members[norm].accuracy for norm in BALLS}
    figures["corruptions"] = members["corruptions"].metrics["mean"]
    broken["by hand"].update((~task.clean_correct).nonzero().flatten().tolist())

    def by_panel(where, x_adv):
        assert (digits_model(x_adv).argmax(1) != data.y[where]).all()
        broken["panel"].update(where.tolist())

    result = Panel(SMALL).evaluate(dataclasses.replace(task, on_examples=by_panel), "panel")

    assert result.metrics == {"mean": pytest.approx(sum(figures.values()) / 4), **figures}
    assert result.accuracy == result.accuracy_release == (60 - len(broken["by hand"])) / 60
    assert result.accuracy < min(figures.values())  # no threat alone is the worst for all
    assert broken["panel"] | set((~task.clean_correct).nonzero().flatten().tolist()) == broken["by hand"]
    names = {name: found["attack"] for name, found in result.settings["threats"].items()}
    assert names == {**dict.fromkeys(BALLS, "pgd"), "corruptions": "corruptions"}
    assert [result.settings["threats"][norm]["eps"] for norm in BALLS] == ["0.1", "0.5", "1.5"]
    assert result.details["threats"]["l1"]["accuracy"] == figures["l1"]


def test_the_runs_own_threat_model_plays_no_part(digits_model, digits, make_task):
    task = make_task(digits_model, digits.subset(range(20)))
    other = dataclasses.replace(task, threat=ThreatModel("l2", 3))
    assert Panel(SMALL).evaluate(task, "panel").metrics == Panel(SMALL).evaluate(other, "panel").metrics


def test_a_threat_can_be_left_out_and_progress_counts_the_others(digits_model, digits, make_task):
    seen = []
    task = make_task(digits_model, digits, on_progress=lambda *numbers: seen.append(numbers))
    options = dataclasses.replace(SMALL, l2=None, l1=None, max_examples=20, batch_size=10)
    result = Panel(options).evaluate(task, "panel")
    assert set(result.metrics) == {"mean", "linf", "corruptions"}
    assert (result.num_examples, [done for done, *_ in seen]) == (20, [10, 20, 30, 40])
    assert {total for _, total, _ in seen} == {40}
    assert seen[-1][2] == 40 * round(result.accuracy * 20) // 20


def test_with_autoattack_in_the_balls_what_it_breaks_counts(digits_model, digits, make_task, tmp_path, monkeypatch):
    def quick(options):
        return AutoAttack(dataclasses.replace(options, iterations=5, queries=20))

    monkeypatch.setattr("calfat_plugin.evaluators.panel.AutoAttack", quick)
    task = make_task(digits_model, digits, scratch=tmp_path)
    options = PanelOptions(linf=Fraction(1, 5), l2=None, l1=None, attack="autoattack", max_examples=6)
    result = Panel(options).evaluate(task, "panel")
    assert result.settings["threats"]["linf"]["attack"] == "autoattack"
    assert result.accuracy <= result.metrics["linf"] == result.details["threats"]["linf"]["accuracy"]
    assert list(tmp_path.iterdir()) == []  # a rest of another process would hide what it broke
    asked = []
    with digits_model.register_forward_pre_hook(lambda module, inputs: asked.append(len(inputs[0]))):
        Panel(dataclasses.replace(options, linf=Fraction(1, 10**4))).evaluate(task, "panel")
    assert 0 not in asked  # where AutoAttack breaks nothing, nothing is judged


def test_findings_say_which_threat_they_are_about(make_task):
    class Flat(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(torch.cat((x.flatten(1) * 0, x.new_ones(len(x), 1)), dim=1), dim=1)

    data = ImageData(torch.rand(4, 1, 3, 3, generator=torch.Generator().manual_seed(0)), torch.full((4,), 9))
    result = Panel(SMALL).evaluate(make_task(Flat().eval(), data), "panel")
    assert result.details["zero_gradients"] == 4
    assert [warning["code"] for warning in result.details["warnings"]] == ["probabilities"] * 4
    assert [warning["text"].split(":")[0] for warning in result.details["warnings"]] == [*BALLS, "corruptions"]


def test_an_image_that_is_wrong_clean_counts_as_broken(make_task):
    class Always(nn.Module):
        """Class 0, whatever it sees."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat((x.flatten(1)[:, :1] * 0 + 9, x.flatten(1)), dim=1)

    data = ImageData(torch.full((5, 1, 3, 3), 0.5), torch.zeros(5, dtype=torch.long))
    task = make_task(Always().eval(), data, clean_correct=torch.tensor([False, True, True, False, True]))
    result = Panel(SMALL).evaluate(task, "panel")
    assert result.accuracy == result.accuracy_release == 0.6
    assert {norm: result.metrics[norm] for norm in BALLS} == dict.fromkeys(BALLS, 0.6)
