"""Every record of a study can be continued: its rows are of the recipes that its suite has today."""

from __future__ import annotations

from pathlib import Path

import pytest

from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from calfat_plugin.suites.record import digest, read_record

STUDIES = Path(__file__).parents[2] / "studies"
#: Records that a suite of their folder wrote, and what begins its name.
RECORDS = {
    "attackers/attackers_digits.csv": "attackers_digits",
    "attackers/attackers_digits_rates.csv": "attackers_digits_rates",
    "full_size/cifar10_runs.csv": "full_cifar10",
    "full_size/digits_runs.csv": "full_digits",
    "full_size/fmnist_runs.csv": "full_fmnist",
    "one_step/longtail_fmnist_runs.csv": "longtail_fmnist",
    "one_step/one_step_fmnist_runs.csv": "one_step_fmnist",
    "passes/overfitting_digits.csv": "overfitting_digits",
    "passes/passes_digits.csv": "passes_digits",
    "passes/passes_fmnist.csv": "passes_fmnist",
    "short/study_cifar10_choice.csv": "study_cifar10",
    "short/study_digits_runs.csv": "study_digits",
    "short/study_fmnist_runs.csv": "study_fmnist",
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_row_is_of_the_recipe_that_its_suite_has_today(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of a default, a suite or what a digest is made of would throw hours of training away in silence."""
    record = STUDIES / name
    monkeypatch.chdir(record.parent)
    plan = make_plan(load_suite(f"{RECORDS[name]}.yaml", record=record), Registry.load(entry_points=False))
    runs = (*plan.runs, *(plan.choosing.runs if plan.choosing else ()))
    today = {run.key[:2]: digest(run.experiment) for run in runs}
    recorded = {key[:2]: row.recipe for key, row in read_record(record).items()}
    assert recorded
    assert recorded == {key: today.get(key) for key in recorded}
