"""Recipes and the commands of docs/methods.md have the learning rates that the short study chose."""

from __future__ import annotations

import re
import shlex
from functools import cache

import pytest
import yaml

from calfat_plugin.entries import TrainerEntry
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe import read_document
from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from studies.records import rates
from tests.cli.runner import RECIPES, ROOT

STUDY = ROOT / "studies" / "short"
REGISTRY = Registry.load(entry_points=False)
BASELINES = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8").partition("## 5. Baselines")[2]
ROW = re.compile(r"^\| .* \| `calfat run (.*)` \| (.*) \| (.*) \|$", re.MULTILINE)


@cache
def chosen_rates(data: str) -> list[tuple[Experiment, str]]:
    """What the study trained under label skew, each with the rate that it chose."""
    of_cell = rates(STUDY / f"study_{data}_runs.csv")
    trained = []
    for cell in make_plan(load_suite(STUDY / f"study_{data}.yaml"), REGISTRY).cells:
        if cell.experiment is not None and cell.name.startswith("0.1/") and cell.name in of_cell:
            trained.append((cell.experiment, of_cell[cell.name]))
    return trained


def rate_of(experiment: Experiment, data: str) -> str | None:
    """The rate that the experiment's method chose on a data set; None where it was not tuned."""
    trainer = experiment.trainer
    for studied, rate in chosen_rates(data):
        if (studied.trainer.name, studied.trainer.options) == (trainer.name, trainer.options):
            return rate
    return None


@pytest.mark.parametrize("data", ["digits", "fmnist"])
def test_the_main_recipes_have_the_papers_constants_at_the_rate_that_they_chose(data: str) -> None:
    """Of the former floor: that of today was not tuned."""
    written = yaml.safe_load((RECIPES / f"calfat_{data}.yaml").read_text(encoding="utf-8"))
    chosen = rates(STUDY / f"study_{data}_runs.csv")["0.1/CalFAT, the paper's constants"]
    assert written["calfat"]["trainer"] == "calfat"
    assert str(written["train_args"]["learning_rate"]) == chosen


@pytest.mark.parametrize("data", ["digits", "fmnist"])
def test_a_recipe_has_the_rate_that_its_method_chose_or_says_that_it_is_not_tuned(data: str) -> None:
    tuned = []
    for file in RECIPES.glob(f"*_{data}.yaml"):
        experiment = assemble(read_document(file), REGISTRY)
        if experiment.threat.inner.name != "pgd":
            continue  # test_passes.py looks at its rate
        text = file.read_text(encoding="utf-8")
        rate = rate_of(experiment, data)
        assert rate in (None, f"{experiment.train.learning_rate:g}"), file
        assert ("is not tuned" in text, "(studies/short)" in text) == (rate is None, rate is not None), file
        if rate is not None:
            tuned.append(experiment.trainer.name)
    assert sorted(tuned) == ["fedpgd", "standard"]  # CalFAT's were tuned for another floor


def test_every_method_without_a_recipe_has_a_command_with_its_rates() -> None:
    methods = []
    for command, on_digits, on_fmnist in ROW.findall(BASELINES):
        file, *words = shlex.split(command)
        assert set(words[::2]) == {"--set"}
        experiment = assemble(read_document(ROOT / file).with_overrides(words[1::2]), REGISTRY)
        assert experiment.warnings == ()
        assert on_digits.strip("()") == f"{experiment.train.learning_rate:g}"
        for data, shown in (("digits", on_digits), ("fmnist", on_fmnist)):
            rate = rate_of(experiment, data)
            assert shown == (rate or f"({shown.strip('()')})"), (command, data)
        methods.append(experiment.trainer.name)
    assert methods.count("calfat") == 1  # with the release's constants
    assert {*methods, "fedpgd", "standard"} == {entry.name for entry, _ in REGISTRY.offers(TrainerEntry)}
