from __future__ import annotations

import json

import pytest

from calfat_plugin.errors import OptionError, RecipeError, RunError
from calfat_plugin.experiment import assemble
from calfat_plugin.recipe.document import read_document
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from calfat_plugin.suites.processes import command
from tests.cli.runner import COMMAND, REPORTING, ROOT, python
from tests.suites.files import BASE, SUITE, begun, write_suite

GRID = SUITE.replace(
    "axes:\n",
    'axes:\n  beta:\n    "0.1": {data_args.partition_alpha: 0.1}\n    "0.3": {data_args.partition_alpha: 0.3}\n',
)


pytestmark = pytest.mark.usefixtures("in_a_folder")


def begin(plan, *, results=False):
    """Make the directory of the first run, with a finished round."""
    directory = begun(plan.runs[0])
    directory.last_checkpoint.touch()
    if results:
        directory.results.write_text("{}", encoding="utf-8")


def test_every_cell_runs_with_every_seed_and_seed_by_seed(plan_of):
    plan = plan_of(GRID)
    assert [run.name for run in plan.runs] == [
        f"{beta}/{method} seed {seed}" for seed in (0, 1) for beta in ("0.1", "0.3") for method in ("CalFAT", "FedPGD")
    ]
    assert str(plan.runs[-1].directory) == "runs/suites/tiny/0.3_fedpgd/seed-1"
    assert plan.left == plan.runs
    experiment = plan.cells[-1].experiment
    assert (experiment.trainer.name, experiment.data.partition_alpha, experiment.num_rounds) == ("fedpgd", 0.3, 1)


def test_the_command_of_a_run_says_all_that_the_suite_says(plan_of, registry):
    plan = plan_of(GRID, overrides=["train_args.batch_size=32"], seeds=[7])
    words = command(plan, plan.runs[-1])
    assert words == [
        *("run", "base.yaml", "--set", "train_args.comm_round=1", "--set", "data_args.partition_alpha=0.3"),
        *("--set", "calfat.trainer=fedpgd", "--set", "train_args.batch_size=32"),
        *("--seed", "7", "--run-dir", "runs/suites/tiny/0.3_fedpgd/seed-7"),
    ]
    overrides = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    again = assemble(read_document(words[1]).with_overrides(overrides), registry)
    assert again.as_run() == plan.cells[-1].experiment.as_run()


def test_a_key_that_is_set_again_is_in_the_command_once(plan_of, registry):
    text = GRID.replace("comm_round: 1}", "comm_round: 1, calfat.monitor.every: 2}")
    overrides = ["calfat.monitor={every: 3}", "train_args.comm_round=3", " calfat.monitor.max_examples =5"]
    plan = plan_of(text, overrides=overrides)
    words = command(plan, plan.runs[-1])
    given = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    assert given == ["data_args.partition_alpha=0.3", "calfat.trainer=fedpgd", *overrides]
    again = assemble(read_document(words[1]).with_overrides(given), registry)
    assert again.as_run() == plan.cells[-1].experiment.as_run()


def test_only_some_cells_are_run_and_all_are_shown(plan_of):
    plan = plan_of(GRID, only=["0.3/*", "0.1/FedPGD"])
    assert [run.cell.name for run in plan.left if run.seed == 0] == ["0.1/FedPGD", "0.3/CalFAT", "0.3/FedPGD"]
    assert len(plan.cells) == 4


def test_skipped_cells_are_not_even_resolved(plan_of):
    plan = plan_of(SUITE.replace("fedpgd", "fedpgd9") + "skip: {FedPGD: not written yet}\n")
    assert [(cell.name, cell.skipped, cell.experiment is None) for cell in plan.cells] == [
        ("CalFAT", "", False),
        ("FedPGD", "not written yet", True),
    ]
    assert {run.cell.name for run in plan.runs} == {"CalFAT"}


NORMS = SUITE.replace("trainer: fedpgd", "trainer: fedpgd, calfat.threat.norm: l2")


@pytest.mark.parametrize("shared", ["", ", calfat.threat.eps: 0.2"])  # which is for the norm of the base recipe
def test_an_axis_of_norms_needs_an_eps_of_each(plan_of, shared):
    assert NORMS != SUITE
    with pytest.raises(RecipeError) as caught:
        plan_of(NORMS.replace("comm_round: 1", f"comm_round: 1{shared}"))
    line = 1 + NORMS[: NORMS.index("calfat.threat.norm")].count("\n")
    assert str(caught.value).startswith(f"tiny.yaml:{line}: calfat.threat.norm: l2 needs an eps beside it; ")
    assert str(caught.value).endswith(" (In cell 'FedPGD' of tiny.yaml.)")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("norm: l2", "norm: l2, calfat.threat.eps: 0.7"),
        ("norm: l2", "eps: 0.7, calfat.threat.norm: l2"),
        ("comm_round: 1", "comm_round: 1, calfat.threat.norm: l2, calfat.threat.eps: 0.7"),
    ],
)
def test_a_suite_with_an_eps_for_its_norm_is_planned(plan_of, old, new):
    threat = plan_of(NORMS.replace(old, new)).cells[-1].experiment.threat
    assert (threat.norm, float(threat.eps)) == ("l2", 0.7)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("train_arg.comm_round: 1", "train_arg: there is no such section. Did you mean 'train_args'?"),
        ("calfat.monitr.every: 1", "calfat.monitr: unknown key. Did you mean 'monitor'?"),
    ],
)
def test_a_misspelt_setting_is_at_its_line_of_the_suite(plan_of, setting, complaint):
    with pytest.raises(RecipeError) as caught:
        plan_of(SUITE.replace("train_args.comm_round: 1", setting))
    assert str(caught.value) == f"tiny.yaml:3: {complaint} (In cell 'CalFAT' of tiny.yaml.)"


@pytest.mark.parametrize(
    ("old", "new", "asked"),
    [
        ("", "", {"only": ["CalFTA"]}),
        ("", "", {"overrides": ["calfat.trainer=fedtrades"]}),
        ("comm_round: 1", "comm_round: none", {}),
        ("natural: natural", "fgsm: FGSM", {}),
        ("    FedPGD", "    Ours: {calfat.trainer: calfat}\n    FedPGD", {}),
        ("pgd20: PGD-20}", "pgd20: PGD-20, passes: n}\ncompare: {row: CalFAT, metrics: [pgd20, passes]}", {}),
    ],
    ids=["selector", "override of an axis", "bad value", "unmeasured metric", "twins", "figure compared"],
)
def test_what_is_refused(plan_of, old, new, asked, snapshot):
    with snapshot.raises((RecipeError, OptionError)):
        plan_of(SUITE.replace(old, new, 1), **asked)


def test_the_worst_case_of_two_attacks_is_a_metric(plan_of):
    worst = SUITE.replace("metrics: {natural: natural,", "metrics: {natural: natural, worst-case: worst,")
    with pytest.raises(RecipeError, match="'worst-case' is not among what is measured"):
        plan_of(worst)
    two = worst.replace("set: {", "set: {calfat.evaluators: [natural, fgsm, pgd20], ")
    assert plan_of(two).runs
    with pytest.raises(RecipeError, match="'worst-case' is not among what is measured"):
        plan_of(two.replace("set: {", "set: {calfat.evaluation.evidence_mb: 0, "))


def test_states_follow_the_run_directories(plan_of):
    begin(plan_of(SUITE))
    plan = plan_of(SUITE)
    assert [run.state for run in plan.runs] == ["unfinished", "new", "new", "new"]
    assert command(plan, plan.runs[0])[-1] == "--resume"
    (plan.runs[0].directory / "results.json").write_text("{}", encoding="utf-8")
    plan = plan_of(SUITE)
    assert [run.state for run in plan.runs] == ["finished", "new", "new", "new"]
    assert plan.runs[0] not in plan.left


def test_a_changed_cell_is_refused_with_what_differs(plan_of, snapshot):
    begin(plan_of(SUITE.replace("comm_round: 1", "comm_round: 5")), results=True)
    text = SUITE.replace("{train_args.comm_round: 1}", "{train_args.comm_round: 4, train_args.learning_rate: 0.1}")
    with snapshot.raises(RunError):
        plan_of(text)


def test_a_run_that_finished_no_round_is_resumed_with_its_own_recipe_only(plan_of):
    begin(plan_of(SUITE))
    RunDirectory(plan_of(SUITE).runs[0].directory).last_checkpoint.unlink()
    plan = plan_of(SUITE)
    assert plan.runs[0].state == "unfinished"
    assert command(plan, plan.runs[0])[-1] == "--resume"
    with pytest.raises(RunError, match="differs from the suite's current one"):
        plan_of(SUITE.replace("comm_round: 1", "comm_round: 1, train_args.learning_rate: 0.1"))


def test_a_cosine_of_fewer_rounds_is_refused_once(plan_of):
    text = SUITE.replace("{train_args.comm_round: 1}", "{train_args.comm_round: 5, train_args.lr_schedule: cosine}")
    begin(plan_of(text), results=True)
    for rounds in (4, 6):
        with pytest.raises(RunError, match=rf"seed-0: train_args.comm_round: 5 then, {rounds} now\nUndo"):
            plan_of(text.replace("comm_round: 5", f"comm_round: {rounds}"))


def test_suites_may_share_their_runs(plan_of):
    plan = plan_of(SUITE + "runs: other\n")
    assert str(plan.runs[0].directory) == "runs/suites/other/calfat/seed-0"
    assert str(plan.suite.directory) == "runs/suites/tiny"


def test_a_run_s_recipe_reports_what_is_published_of_its_own_cell(tmp_path, registry):
    """Not the base recipe's numbers, which are about another setting; and they make no two runs differ."""
    base = BASE + "  reported: {source: Table 1, natural: 64.69}\n"
    text = SUITE + "reported: {source: Table 2, percent: {CalFAT: {natural: 57.31}}}\n"
    plan = make_plan(load_suite(write_suite(tmp_path, text, base=base)), registry)
    calfat, fedpgd = (cell.experiment.reported for cell in plan.cells)
    assert (calfat.source, calfat.percent) == ("Table 2", {"natural": 57.31})
    assert (fedpgd.source, fedpgd.percent) == ("", {})
    assert command(plan, plan.runs[1])[-7:-4] == ["calfat.trainer=fedpgd", "--set", "calfat.reported={}"]

    begin(plan, results=True)
    plain = make_plan(load_suite(write_suite(tmp_path, SUITE, base=BASE)), registry)
    assert [run.state for run in plain.runs[:2]] == ["finished", "new"]
    twins = SUITE.replace("FedPGD: {calfat.trainer: fedpgd}", "FedPGD: {}") + text.removeprefix(SUITE)
    with pytest.raises(RecipeError, match="the cells 'CalFAT' and 'FedPGD' are the same run"):
        make_plan(load_suite(write_suite(tmp_path, twins, base=base)), registry)


def test_checking_a_suite_imports_nothing_heavy(tmp_path):
    ended = python(
        REPORTING + COMMAND, "suite", str(ROOT / "studies" / "paper" / "small_table1.yaml"), "--dry-run", cwd=tmp_path
    )
    assert (ended.code, ended.err) == (0, "imported:\n")


STOPPED = {"round": 4, "patience": 1, "evaluator": "pgd20", "best_round": 3, "accuracy": 0.5}


@pytest.mark.parametrize(
    ("then", "now", "stopped", "state"),
    [
        ("2", "2", True, "finished"),
        ("2", "3", True, "unfinished"),  # it goes further
        ("2", "null", True, "unfinished"),
        ("2", "3", False, "finished"),  # all rounds are done
        ("null", "null", False, "finished"),
        ("2", "1", True, None),  # it might have stopped earlier
        ("null", "3", False, None),
    ],
)
def test_a_run_that_stopped_early_is_finished_until_it_has_more_patience(then, now, stopped, state, plan_of):
    text = SUITE.replace(
        "comm_round: 1", "comm_round: 9, data_args.validation_share: 0.2, train_args.patience: PATIENCE"
    )
    run = plan_of(text.replace("PATIENCE", then)).runs[0]
    directory = begun(run)
    directory.results.write_text(json.dumps({"evaluations": [], **({"stopped_early": STOPPED} if stopped else {})}))
    if state is None:
        with pytest.raises(RunError, match=r"train_args\.patience: .* then, .* now"):
            plan_of(text.replace("PATIENCE", now))
    else:
        assert plan_of(text.replace("PATIENCE", now)).runs[0].state == state
