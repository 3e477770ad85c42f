from __future__ import annotations

from pathlib import Path

import pytest

from calfat_plugin.experiment import same_but_rounds
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import SuitePlan, make_plan

ROOT = Path(__file__).resolve().parents[2]
SUITES = sorted(path.stem for path in (ROOT / "suites").glob("*.yaml"))
TABLES = [f"table{number}" for number in range(1, 11)]
CHOOSING = [name for name in SUITES if name.startswith(("digits_table", "fmnist_"))]
SHARING = [name for name in SUITES if "\nruns: " in (ROOT / f"suites/{name}.yaml").read_text(encoding="utf-8")]
PLANS: dict[str, SuitePlan] = {}


@pytest.fixture(autouse=True)
def _in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def plan_of(name, registry):
    """The plan without looking at runs of this working copy."""
    if name not in PLANS:
        PLANS[name] = make_plan(load_suite(f"suites/{name}.yaml"), registry, seeds=[])
    return PLANS[name]


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_resolves_without_a_warning(name, registry):
    plan = plan_of(name, registry)
    assert plan.cells
    assert plan.warnings == ()


@pytest.mark.parametrize("name", SHARING)
def test_shared_runs_are_the_same_runs(name, registry):
    plan = plan_of(name, registry)
    owner = {cell.folder: cell for cell in plan_of(plan.suite.runs, registry).cells}
    shared = [cell for cell in plan.cells if cell.folder in owner]
    assert shared
    for cell in shared:
        assert same_but_rounds(cell.experiment.as_run(), owner[cell.folder].experiment.as_run()) == []


@pytest.mark.parametrize("name", SUITES)
def test_only_the_suites_of_the_papers_setting_have_one_partition(name, registry):
    seeds = {cell.experiment.partition.options.seed for cell in plan_of(name, registry).cells if not cell.skipped}
    assert seeds == {2021 if name.startswith(("table", "fig")) else None}


def test_the_paper_s_setting_holds_where_a_table_does_not_change_it(registry):
    """methods.md 3.1: five clients, all in every round, 150 rounds, lr 0.01, momentum 0.9, eps 8/255, K 10."""
    for name in TABLES:
        for cell in plan_of(name, registry).cells:
            run = cell.experiment
            train, threat = run.train, run.threat
            assert (train.comm_round, train.epochs, train.learning_rate, train.momentum) == (150, 1, 0.01, 0.9)
            assert (str(threat.eps), str(threat.step_size), threat.steps) == ("8/255", "2/255", 10)
            assert run.clients_per_round == train.client_num_in_total
            assert train.client_num_in_total == (int(cell.labels[0]) if name == "table7" else 5)
            assert train.weight_decay == (2e-3 if run.data.dataset in ("cifar10", "cifar100") else 2e-4)
            assert run.data.partition_alpha == (float(cell.labels[0]) if name in ("table8", "table9") else 0.1)


def test_reported_numbers_are_those_of_the_paper():
    """A spot check by hand against methods.md 13, one number a table."""
    expected = {
        "table1": ("CIFAR-100/CalFAT", "autoattack", 11.49),
        "table2": ("FedMART + Calibration", "pgd20", 27.19),
        "table3": ("SCAFFOLD/CalFAT", "natural", 67.16),
        "table5": ("VGG-8/CalFAT", "pgd20", 40.09),
        "table6": ("FedTRADES", "natural", 74.29),
        "table7": ("50/CalFAT", "autoattack", 13.22),
        "table8": ("0.3/CalFAT", "cw20", 27.76),
        "table9": ("0.2/CCE + CKL", "pgd20", 29.36),
        "table10": ("CIFAR-100/0", "pgd20", 2.60),
    }
    for name, (cell, metric, percent) in expected.items():
        reported = load_suite(f"suites/{name}.yaml").reported
        assert reported.percent[cell].percent[metric] == percent
        assert reported.source_of(cell) == f"arXiv:2205.14926, Table {name.removeprefix('table')}"


@pytest.mark.parametrize("name", CHOOSING)
def test_twins_choose_learning_rates_by_the_same_rules(name, registry):
    """Every row tries the same rates; choice runs use other seeds than the table, and a validation split."""
    plan = plan_of(name, registry)
    choose = plan.suite.choose
    assert choose.metric == ("natural", "pgd20")
    assert (choose.seeds, choose.finalists) == ((100, 101, 102), 2)
    assert not set(choose.seeds) & set(plan.suite.seeds)
    (rates,) = {tuple(each.point[0].value for each in choice.tries) for choice in plan.choices.values()}
    digits = name.startswith("digits")
    assert rates == ((0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if digits else (0.003, 0.01, 0.03, 0.1, 0.3))
    assert {run.experiment.data.validation_share for run in plan.choosing.runs} <= {0.1, 0.2}
    assert {run.experiment.evaluators for run in plan.choosing.runs} == {()}
    assert plan.suite.seconds_per_round


@pytest.mark.parametrize("name", [name for name in CHOOSING if name.endswith(("1", "3", "7", "8"))])
def test_fedrbn_is_beside_the_others_on_the_network_that_it_makes(name, registry):
    """Its dual normalisation has the same parameters as the batch normalisation of the rows + BN."""
    cells = plan_of(name, registry).cells
    norms = {cell.labels[-1]: cell.experiment.model.options.norm for cell in cells}
    assert {norms[label] for label in norms if label.endswith("+ BN")} == {"batch"}
    assert {"FedPGD + BN", "CalFAT + BN"} < set(norms)
    assert (norms["FedRBN"], norms["FedPGD"]) == ("none", "none")
