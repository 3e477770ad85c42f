"""The suites of the CalFAT paper's tables and figures: they resolve, and have its setting and its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from calfat_plugin.experiment import assemble, same_but_rounds
from calfat_plugin.recipe.document import read_document
from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import SuitePlan, make_plan

FOLDER = Path(__file__).resolve().parents[2] / "studies" / "paper"
SUITES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
TABLES = [name for name in SUITES if name.startswith("table")]
SMALL = [name for name in SUITES if name.startswith("small_")]
SHARING = [name for name in SUITES if "\nruns: " in (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")]
PLANS: dict[str, SuitePlan] = {}
CHANGED = (  # by a small table, of its recipe
    *("calfat.trainer", "calfat.aggregator", "calfat.model.norm", "train_args.learning_rate", "train_args.client_num_"),
    *("calfat.partition.", "data_args.partition_alpha", "data_args.validation_share"),
    *("calfat.evaluators", "calfat.monitor.", "calfat.reported"),
)


@pytest.fixture(scope="module")
def registry():
    return Registry.load(entry_points=False)


@pytest.fixture(autouse=True)
def _away_from_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def plan_of(name, registry):
    if name not in PLANS:
        PLANS[name] = make_plan(load_suite(FOLDER / f"{name}.yaml"), registry, seeds=[])
    return PLANS[name]


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_resolves_without_a_warning(name, registry):
    plan = plan_of(name, registry)
    assert plan.cells
    assert plan.warnings == ()


def test_every_table_is_there_but_the_fourth_which_is_made_of_a_run_of_the_first():
    numbers = {int(name.removeprefix("table")) for name in TABLES}
    assert numbers == {*range(1, 11)} - {4}
    assert {int(name.removeprefix("small_table")) for name in SMALL} == numbers - {5, 6}
    assert SHARING == ["fig1"]


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
    assert seeds == {None if name in SMALL else 2021}


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
        reported = load_suite(FOLDER / f"{name}.yaml").reported
        assert reported.percent[cell].percent[metric] == percent
        assert reported.source_of(cell) == f"arXiv:2205.14926, Table {name.removeprefix('table')}"


@pytest.mark.parametrize("name", SMALL)
def test_rows_of_the_small_tables_choose_learning_rates_by_the_same_rules(name, registry):
    """Every row tries the same rates; choice runs use other seeds than the table, and a validation split."""
    plan = plan_of(name, registry)
    choose = plan.suite.choose
    assert choose.metric == ("natural", "pgd20")
    assert choose.seeds == (100, 101, 102)
    assert choose.extend == {"train_args.learning_rate": 2}
    assert not set(choose.seeds) & set(plan.suite.seeds)
    (rates,) = {tuple(tried.point[0].value for tried in choice.tries) for choice in plan.choices.values()}
    assert rates == (0.02, 0.05, 0.1, 0.2)
    assert {run.experiment.data.validation_share for run in plan.choosing.runs} == {0.2}
    assert {run.experiment.evaluators for run in plan.choosing.runs} == {()}
    assert plan.suite.seconds_per_round


@pytest.mark.parametrize("name", SMALL)
def test_a_small_table_is_of_the_recipes_of_digits_and_fashion_mnist(name, registry):
    """But for what is measured, for the rounds, and for the split of one digit in five for validation."""
    plan = plan_of(name, registry)
    assert next(iter(plan.suite.axes)) == "data set"
    for label, data in (("digits", "digits"), ("Fashion-MNIST", "fmnist")):
        recipe = assemble(read_document(f"calfat_{data}"), registry).as_run()
        cells = [cell for cell in plan.cells if cell.labels[0] == label]
        assert 2 * len(cells) == len(plan.cells)
        for cell in cells:
            different = same_but_rounds(recipe, cell.experiment.as_run())
            assert [key for key in different if not key.startswith(CHANGED)] == []


@pytest.mark.parametrize("name", ["small_table1", "small_table3", "small_table7", "small_table8"])
def test_fedrbn_is_beside_the_others_on_the_network_that_it_makes(name, registry):
    """Its dual normalisation has the same parameters as the batch normalisation of the rows + BN."""
    cells = plan_of(name, registry).cells
    norms = {cell.labels[-1]: cell.experiment.model.options.norm for cell in cells}
    assert {norms[label] for label in norms if label.endswith("+ BN")} == {"batch"}
    assert {"FedPGD + BN", "CalFAT + BN"} < set(norms)
    assert (norms["FedRBN"], norms["FedPGD"]) == ("none", "none")
