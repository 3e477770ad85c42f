"""One-step attacks at full size and a budget by class: the plan says what its suites run."""

from __future__ import annotations

import pytest

from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from tests.cli.runner import ROOT

STUDY = ROOT / "studies" / "one_step"
PLAN = " ".join((STUDY / "README.md").read_text(encoding="utf-8").split())
FULL = load_suite(ROOT / "studies" / "full_size" / "full_fmnist.yaml")


def experiments_of(name, monkeypatch, tmp_path):
    suite = load_suite(STUDY / f"{name}.yaml")
    monkeypatch.chdir(tmp_path)
    plan = make_plan(suite.model_copy(update={"choose": None}), Registry.load())
    return suite, {cell.name: cell.experiment for cell in plan.cells}


@pytest.mark.parametrize("name", ["one_step_fmnist", "longtail_fmnist"])
def test_pairs_rates_and_rounds_are_those_of_the_plan(name, monkeypatch, tmp_path):
    suite, experiments = experiments_of(name, monkeypatch, tmp_path)
    assert f"`{name}.yaml`" in PLAN
    assert list(suite.seeds) == list(FULL.seeds)[:5]
    assert list(suite.choose.seeds) == list(FULL.choose.seeds) == [5001, 5002]
    (rates,) = suite.choose.grid.values()
    assert f"grid {', '.join(map(str, rates))}," in PLAN
    assert {each.num_rounds for each in experiments.values()} == {50}
    for experiment in experiments.values():
        assert experiment.as_run()["calfat"]["partition"]["seed"] is None
        data = experiment.as_run()["data_args"]
        assert {key: data[key] for key in ("max_train_examples", "validation_share", "max_test_examples")} == {
            key: FULL.set[f"data_args.{key}"] for key in ("max_train_examples", "validation_share", "max_test_examples")
        }


def test_rows_have_the_attacks_and_budgets_of_the_plan(monkeypatch, tmp_path):
    _, rows = experiments_of("one_step_fmnist", monkeypatch, tmp_path)
    attacks = {"sora": "sora", "N-FGSM": "n-fgsm", "ATAS": "atas"}
    assert {name: each.threat.inner.name for name, each in rows.items()} == {
        f"{method}/{label}": attack for method in ("FedPGD", "CalFAT") for label, attack in attacks.items()
    }
    _, rows = experiments_of("longtail_fmnist", monkeypatch, tmp_path)
    budgets = {"plain": None, "by class": (0.3, 0.8), "warm-up alone": (0.0, 0.8)}
    for name, each in rows.items():
        by_class = each.threat.by_class
        assert (by_class and (by_class.alpha, by_class.warmup)) == budgets[name.partition("/")[2]]
        assert each.as_run()["calfat"]["partition"]["imbalance"] == 100
        assert each.as_run()["data_args"]["partition_method"] == "longtail"
