"""``choose.extend``: the next value beyond an end of the grid that is chosen."""

from __future__ import annotations

import json

import pytest

from calfat_plugin.errors import RecipeError
from calfat_plugin.suites import tuning
from calfat_plugin.suites.tuning import chosen_text, how_chosen
from tests.cli.runner import calfat
from tests.suites.files import CHOOSING, write_suite
from tests.suites.test_choices import finish

EXTEND = "  extend: {train_args.learning_rate: 1.7}\n"
GRID = next(line for line in CHOOSING.splitlines(keepends=True) if "learning_rate: [" in line)
TEXT = CHOOSING.replace(GRID, GRID + EXTEND)


def end(plan, values):
    """The choice runs that are left end with the PGD-20 accuracy of their rate."""
    for run in plan.choosing.left:
        finish(run, {"pgd20": values[run.experiment.train.learning_rate]})


def rates(plan, cell="FedPGD"):
    return [each.runs[0].experiment.train.learning_rate for each in plan.choices[cell].tries]


def test_the_grid_of_a_cell_grows_until_the_best_value_has_a_neighbour_on_both_sides(plan_of):
    values = {0.02: 0.3, 0.05: 0.4, 0.1: 0.5, 0.17: 0.6, 0.29: 0.55}
    end(plan_of(TEXT), values)
    plan = plan_of(TEXT)
    assert rates(plan) == [0.02, 0.05, 0.1, 0.17]
    assert (plan.waiting, plan.runs) == (("CalFAT", "FedPGD"), ())
    assert [run.seed for run in plan.choosing.left if run.cell.name == "FedPGD"] == [100, 101]
    end(plan, values)
    end(plan_of(TEXT), values)
    plan = plan_of(TEXT)
    assert rates(plan) == [0.02, 0.05, 0.1, 0.17, 0.29]
    assert (plan.waiting, plan.choosing.left) == ((), ())
    assert {run.experiment.train.learning_rate for run in plan.runs} == {0.17}
    assert chosen_text(plan.choices["FedPGD"]) == "learning_rate 0.17"


def test_rows_may_have_different_numbers_of_tries(plan_of):
    for _ in range(3):
        for run in plan_of(TEXT).choosing.left:
            rate = run.experiment.train.learning_rate
            finish(run, {"pgd20": 0.5 - abs(rate - (0.17 if run.cell.name == "CalFAT" else 0.05))})
    plan = plan_of(TEXT)
    assert "numbers of tries: CalFAT 5, FedPGD 3." in how_chosen(plan.suite.choose, plan.choices)


def test_below_the_grid_and_of_equal_values_the_first(plan_of):
    values = {0.02: 0.5, 0.05: 0.4, 0.1: 0.3, 0.012: 0.5}
    for _ in range(3):
        end(plan_of(TEXT), values)
    plan = plan_of(TEXT)
    assert rates(plan) == [0.02, 0.05, 0.1, 0.012]
    assert plan.choices["FedPGD"].best.name == "learning_rate 0.02"


def test_a_grid_does_not_grow_without_end(plan_of, monkeypatch):
    """A plugin's metric may rise for ever."""
    monkeypatch.setattr(tuning, "MOST_TRIES", 5)
    for _ in range(3):
        for run in plan_of(TEXT).choosing.left:
            finish(run, {"pgd20": run.experiment.train.learning_rate})
    assert rates(plan_of(TEXT)) == [0.02, 0.05, 0.1, 0.17, 0.29]
    assert plan_of(TEXT).waiting == ()


@pytest.mark.parametrize(
    ("key", "values", "best", "chosen"),
    [
        ("adv_ratio", [0.5, 1], 1, "adv_ratio 1, upper edge of the grid"),
        ("epochs", [1, 2, 3], 1, "epochs 1, lower edge of the grid"),
    ],
    ids=["beyond a range", "no whole number"],
)
def test_where_the_next_value_cannot_be_the_end_is_chosen(key, values, best, chosen, plan_of):
    """And another key's end grows all the same."""
    path = "train_args.epochs" if key == "epochs" else "calfat.trainer.adv_ratio"
    text = (
        TEXT.replace("rate: [0.02, 0.05, 0.1]", f"rate: [0.02, 0.05], {path}: {values}")
        .replace("rate: 1.7}", f"rate: 2, {path}: 2}}")
        .replace("CalFAT: {}", "CalFAT: {calfat.trainer: {name: calfat}}")
        .replace("    FedPGD: {calfat.trainer: fedpgd}\n", "")
    )
    for _ in range(3):
        for run in plan_of(text).choosing.left:
            settings = {setting.key: setting.value for setting in run.cell.settings}
            rate = settings["train_args.learning_rate"]
            finish(run, {"pgd20": 0.5 - abs(rate - 0.1) - 0.1 * abs(settings[path] - best)})
    plan = plan_of(text)
    assert plan.waiting == ()
    assert chosen_text(plan.choices["CalFAT"]) == f"learning_rate 0.1; {chosen}"
    assert len(plan.choices["CalFAT"].tries) == 4 * len(values)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("rate: 1.7", new) for new in ("rate: 1", "rate: yes", "rat: 1.7")),
        *(("[0.02,", new) for new in ("[0,", "[yes,")),
    ],
)
def test_what_is_refused(old, new, plan_of, snapshot):
    with snapshot.raises(RecipeError, "tiny.yaml:14: choose.extend.train_args.learning_rat"):
        plan_of(TEXT.replace(old, new))


def test_one_command_tries_the_grid_then_what_lies_beyond_then_runs_the_table(tmp_path, monkeypatch, stand_in):
    """With a stand-in for ``calfat run``, to which rates nearer to 0.05 and 0.17 are better."""
    monkeypatch.setenv("FAKE_BEST", json.dumps({"calfat": 0.05, "fedpgd": 0.17}))
    write_suite(tmp_path, TEXT.replace("[0, 1]", "[0]"))
    checked = calfat("check", "tiny.yaml").out
    assert checked.endswith("A suite of 2 cells, 12 choice runs and 2 runs.\n")
    done = calfat("suite", "tiny.yaml")
    assert done.code == 0, done
    assert "cost: 12 choice runs and 2 runs to do; " in done.out
    started = [line.split(" in runs/")[0] for line in done.out.splitlines() if line.startswith("running ")]
    grid = [(cell, rate) for cell in ("CalFAT", "FedPGD") for rate in (0.02, 0.05, 0.1)]
    choosing = [(cell, rate, seed) for seed in (100, 101) for cell, rate in grid]
    choosing += [("FedPGD", rate, seed) for rate in (0.17, 0.29) for seed in (100, 101)]
    assert started == [
        *(f"running {cell}, learning_rate {rate}, seed {seed}" for cell, rate, seed in choosing),
        *("running CalFAT seed 0", "running FedPGD seed 0"),
    ]
    assert "| FedPGD | learning_rate 0.17 |" in done.out
    assert "tiny: no choice run to do" in calfat("suite", "tiny.yaml").out
