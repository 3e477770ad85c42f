"""``choose.finalists``: all values with the first seed, the best of them with the others."""

from __future__ import annotations

import dataclasses
import json

import pytest

from calfat_plugin.cli.suite_view import plan_lines
from calfat_plugin.errors import RecipeError
from calfat_plugin.suites.cells import mark_lost
from calfat_plugin.suites.plan import SuitePlan, seconds_left
from calfat_plugin.suites.tuning import tries_text
from tests.cli.runner import calfat
from tests.suites.files import CHOOSING, write_suite
from tests.suites.test_choices import finish

TEXT = CHOOSING.replace("seeds: [100, 101]", "seeds: [100, 101, 102]\n  finalists: 2")
RATES = (0.02, 0.05, 0.1)


def end(plan: SuitePlan, seed: int, *values: float | None) -> None:
    """The choice runs of one seed end, with these PGD-20 accuracies at the three rates in every cell; None: lost."""
    for run in plan.choosing.left:
        value = dict(zip(RATES, values, strict=True))[run.experiment.train.learning_rate]
        if run.seed == seed and value is None:
            run.lost.parent.mkdir(parents=True, exist_ok=True)
            mark_lost(run, "round 1: it diverged")
        elif run.seed == seed:
            finish(run, {"pgd20": value})


def left(plan: SuitePlan, cell: str = "FedPGD") -> list[str]:
    return [f"{run.cell.tried} seed {run.seed}" for run in plan.choosing.left if run.cell.name == cell]


def test_the_first_seed_tries_all_values_and_the_others_the_best_of_them(plan_of):
    plan = plan_of(TEXT)
    assert left(plan) == [f"learning_rate {rate} seed 100" for rate in RATES]
    assert (plan.num_finals, plan.waiting) == (8, ("CalFAT", "FedPGD"))
    assert seconds_left(plan_of(TEXT + "seconds_per_round: 3\n")) == 3 * (6 + 8 + 4)
    for selected in ({"FedPGD"}, {"CalFAT", "FedPGD"}):
        lines = plan_lines(dataclasses.replace(plan, selected=frozenset(selected)))
        finals = "waiting     {}, 4 choice runs: until the first seed has tried all values"
        assert {line for line in lines if "first seed" in line} == {finals.format(cell) for cell in selected}
    end(plan, 100, 0.3, 0.5, 0.6)
    plan = plan_of(TEXT)
    assert left(plan) == [f"learning_rate {rate} seed {seed}" for seed in (101, 102) for rate in (0.05, 0.1)]
    assert (plan.num_finals, plan.waiting, plan.runs) == (0, ("CalFAT", "FedPGD"), ())


def test_a_rate_at_which_one_seed_learns_and_the_next_collapses_is_not_chosen(plan_of, snapshot):
    end(plan_of(TEXT), 100, 0.3, 0.5, 0.6)
    end(plan_of(TEXT), 101, None, 0.5, 0.1)
    end(plan_of(TEXT), 102, None, 0.5, 0.6)
    plan = plan_of(TEXT)
    choice = plan.choices["FedPGD"]
    assert choice.best.name == "learning_rate 0.05"
    snapshot(tries_text(choice))
    assert {run.experiment.train.learning_rate for run in plan.left} == {0.05}


def test_only_a_finalist_is_chosen(plan_of):
    """0.02 has the best value in the end, but was not among the best by the first seed."""
    end(plan_of(TEXT), 100, 0.4, 0.5, 0.6)
    end(plan_of(TEXT), 101, None, 0.2, 0.1)
    end(plan_of(TEXT), 102, None, 0.2, 0.1)
    assert plan_of(TEXT).choices["FedPGD"].best.name == "learning_rate 0.05"


def test_of_equal_values_the_first_are_finalists(plan_of):
    end(plan_of(TEXT), 100, 0.5, 0.5, 0.5)
    assert left(plan_of(TEXT))[:2] == ["learning_rate 0.02 seed 101", "learning_rate 0.05 seed 101"]


def test_a_lost_value_is_no_finalist(plan_of):
    end(plan_of(TEXT), 100, None, 0.5, None)
    assert left(plan_of(TEXT)) == ["learning_rate 0.05 seed 101", "learning_rate 0.05 seed 102"]
    end(plan_of(TEXT), 101, None, 0.5, None)
    end(plan_of(TEXT), 102, None, None, None)
    choice = plan_of(TEXT).choices["FedPGD"]
    assert (choice.best.name, choice.best.mean) == ("learning_rate 0.05", pytest.approx(1 / 3))
    assert "learning_rate 0.02: 0.00 with the first seed, 1 of 1 run lost" in tries_text(choice)


def test_values_that_are_lost_already_have_no_further_runs_to_come(plan_of):
    for run in plan_of(TEXT).choosing.left:
        if run.experiment.train.learning_rate < 0.1:
            run.lost.parent.mkdir(parents=True, exist_ok=True)
            mark_lost(run, "round 1: it diverged")
    assert plan_of(TEXT).num_finals == 2 * 2  # of one value of each cell


@pytest.mark.parametrize(
    ("old", "new"),
    [("finalists: 2", "finalists: 0"), ("finalists: 2", "finalists: yes"), ("[100, 101, 102]", "[100]")],
)
def test_what_is_refused(old, new, plan_of, snapshot):
    with snapshot.raises(RecipeError, "tiny.yaml:13: choose.finalists: "):
        plan_of(TEXT.replace(old, new))


def test_one_command_runs_the_first_seed_then_the_finals_then_the_table(tmp_path, monkeypatch, stand_in):
    """With a stand-in for ``calfat run``, to which rates nearer to 0.05 and 0.1 are better."""
    monkeypatch.setenv("FAKE_BEST", json.dumps({"calfat": 0.02, "fedpgd": 0.1}))
    write_suite(tmp_path, TEXT.replace("[100, 101, 102]", "[100, 101]").replace("[0, 1]", "[0]"))
    checked = calfat("check", "tiny.yaml").out
    assert checked.endswith("A suite of 2 cells, 10 choice runs and 2 runs.\n")
    listed = calfat("suite", "tiny.yaml", "--dry-run").out
    assert "waiting     FedPGD, 2 choice runs: until the first seed has tried all values\n" in listed
    assert listed.endswith("tiny.yaml: good. 2 cells, 12 runs to do.\n")
    done = calfat("suite", "tiny.yaml")
    assert done.code == 0, done
    assert "cost: 10 choice runs and 2 runs to do; " in done.out
    started = [line.split(" in runs/")[0] for line in done.out.splitlines() if line.startswith("running ")]
    firsts = [f"running {cell}, learning_rate {rate}, seed 100" for cell in ("CalFAT", "FedPGD") for rate in RATES]
    finals = [("CalFAT", 0.02), ("CalFAT", 0.05), ("FedPGD", 0.05), ("FedPGD", 0.1)]
    assert started == [
        *firsts,
        *(f"running {cell}, learning_rate {rate}, seed 101" for cell, rate in finals),
        *("running CalFAT seed 0", "running FedPGD seed 0"),
    ]
    assert "| CalFAT | learning_rate 0.02, lower edge of the grid |" in done.out
    again = calfat("suite", "tiny.yaml")
    assert "tiny: no choice run to do" in again.out
