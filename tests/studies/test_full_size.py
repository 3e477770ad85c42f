"""The study at full size: its plan says what its suites and the published records say."""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace

import pytest

from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from tests.cli.runner import ROOT

STUDY = ROOT / "studies" / "full_size"
PLAN = (STUDY / "README.md").read_text(encoding="utf-8")


def script(name):
    """A script of the study as a module."""
    spec = importlib.util.spec_from_file_location(name, STUDY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planned(row):
    """The cells of a row of the plan's table: digits, Fashion-MNIST, CIFAR-10."""
    (line,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", PLAN, re.MULTILINE)
    return [cell.strip() for cell in line.split("|")]


def test_the_power_analysis_is_that_of_the_published_records():
    assert re.search(r"<!-- power -->\n(.*?)<!-- end -->", PLAN, re.DOTALL)[1] == script("power").table()


@pytest.mark.parametrize(("place", "name"), [(0, "digits"), (1, "fmnist"), (2, "cifar10")])
def test_the_plan_says_what_the_suite_runs(place, name, monkeypatch, tmp_path):
    suite = load_suite(STUDY / f"full_{name}.yaml")
    monkeypatch.chdir(tmp_path)
    # Where there is no run of it; what is tried for each cell, which takes long to plan, is not looked at.
    plan = make_plan(suite.model_copy(update={"choose": None}), Registry.load())
    experiments = {cell.name: cell.experiment for cell in plan.cells}
    assert {each.num_rounds for each in experiments.values()} == {
        int(planned("rounds of one local epoch, with 4 replays")[place])
    }
    assert planned("pairs, main rows")[place] == f"{suite.seeds[0]} to {suite.seeds[-1]}"
    assert len(suite.seeds) == suite.seeds[-1] - suite.seeds[0] + 1
    (rates,) = suite.choose.grid.values()
    assert planned("learning rates")[place] == ", ".join(map(str, rates))
    chosen = {str(seed) for seed in suite.choose.seeds}
    assert set(re.findall(r"\b5\d\d\d\b", planned("chosen on the pairs")[place])) <= chosen
    assert not chosen & set(map(str, suite.seeds))
    for cell, experiment in experiments.items():
        attack = "free" if not ("PGD-10" in cell or "standard" in cell) else "pgd"
        assert experiment.threat.inner.name == attack, cell
        assert experiment.as_run()["calfat"]["partition"]["seed"] is None


@pytest.mark.parametrize(("last", "verdict"), [(0.509, ": trained to the end"), (0.511, "NOT trained to the end")])
def test_a_row_that_still_rises_by_a_point_is_not_trained_to_the_end(last, verdict):
    rows = {
        ("a", seed, number): {"pgd20": value + shift, "steps": 10 * number}
        for seed, shift in ((1, 0.1), (2, -0.1))
        for number, value in ((10, 0.1), (40, 0.5), (50, last))
    }
    (line,) = script("curves").ended(rows)
    assert (line.startswith("a: 2 runs, 500 steps, PGD-20 "), "from round 40 to 50" in line) == (True, True)
    assert line.endswith(verdict)


@pytest.mark.parametrize(("inner", "replays"), [({}, 1), ({"inner": {"name": "free", "replays": 4}}, 4)])
def test_a_curve_counts_the_steps_of_every_round(inner, replays, tmp_path, monkeypatch):
    """Two clients of 100 and 300 images in batches of 128: (1 + 3) / 2 steps a round; a round of one epoch."""
    curves = script("curves")
    recipe = {"calfat": {"threat": inner}, "train_args": {"batch_size": 128, "epochs": 1}}
    monkeypatch.setattr(curves.calfat, "load_run", lambda _: SimpleNamespace(recipe=recipe))
    head = "round,natural,pgd20,num_examples_0,num_examples_1,passes"
    (tmp_path / "rounds.csv").write_text(f"{head}\n1,,,100,300,400\n2,0.5,0.25,100,300.0,400\n")
    (row,) = curves.monitored(tmp_path)
    assert row == {"round": "2", "natural": "0.5", "pgd20": "0.25", "steps": 4 * replays, "passes": 800}
