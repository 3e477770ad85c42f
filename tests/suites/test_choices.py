"""Choosing the values of cells: which runs, what wins, what is lost, what the tables say. Without any training."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from calfat_plugin.errors import RunError
from calfat_plugin.experiment import assemble
from calfat_plugin.recipe.document import read_document
from calfat_plugin.registry import Registry
from calfat_plugin.report.scores import INTERVALS
from calfat_plugin.results import EvaluationResult
from calfat_plugin.run_files import read_suite
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.cells import mark_lost
from calfat_plugin.suites.plan import SuitePlan, make_plan, seconds_left
from calfat_plugin.suites.processes import command
from calfat_plugin.suites.record import read_record
from calfat_plugin.suites.runner import record_runs
from calfat_plugin.suites.summary import summarise
from calfat_plugin.suites.tables import as_csv, as_json, latex, markdown, write_tables
from calfat_plugin.suites.tuning import place_in_grid
from tests.suites.fake_run import finished_round
from tests.suites.files import CHOOSING, begun

CALFAT = ("CalFAT: {}", "CalFAT: {calfat.trainer: {name: calfat}}")


def finish(run, *rows: dict[str, float], seconds: float = 4.0, guess: float | None = None) -> None:
    """Leave what a choice run with these monitored rounds leaves; ``guess``: what one answer to all images has."""
    directory = begun(run)
    file = directory.rounds_file(run.experiment)
    file.rewrite([])
    for number, row in enumerate(rows, 1):
        file.append(finished_round(number, row, guess))
    directory.results.write_text(json.dumps({"seconds": seconds, "evaluations": []}))


def measured(plan: SuitePlan, values: dict[str, dict[str, float | None]]) -> None:
    """Finish all choice runs: cell to value tried to PGD-20 accuracy; None: the run is lost."""
    for run in plan.choosing.runs:
        value = values[run.cell.name][run.cell.tried]
        if value is None:
            run.lost.parent.mkdir(parents=True, exist_ok=True)
            mark_lost(run, "round 1: it diverged")
        else:
            finish(run, {"pgd20": value + 0.01 * (run.seed % 100)})


def rates(low: float | None, middle: float | None, high: float | None) -> dict[str, float | None]:
    return {f"learning_rate {rate}": value for rate, value in zip((0.02, 0.05, 0.1), (low, middle, high), strict=True)}


def test_every_cell_tries_every_value_with_every_seed_before_its_own_runs(plan_of):
    plan = plan_of()
    assert [run.name for run in plan.choosing.left] == [
        f"{method}, learning_rate {rate}, seed {seed}"
        for seed in (100, 101)
        for method in ("CalFAT", "FedPGD")
        for rate in (0.02, 0.05, 0.1)
    ]
    assert (plan.runs, plan.waiting, plan.num_runs) == ((), ("CalFAT", "FedPGD"), 4)
    run = plan.choosing.runs[-1]
    assert str(run.directory) == "runs/suites/tiny/fedpgd/choose/learning_rate=0.1/seed-101"
    words = command(plan, run)
    assert words == [
        *("run", "base.yaml", "--set", "train_args.comm_round=1", "--set", "data_args.validation_share=0.2"),
        *("--set", "calfat.trainer=fedpgd", "--set", "train_args.learning_rate=0.1"),
        *("--set", "calfat.evaluators=[]"),
        *("--set", "calfat.monitor={evaluators: [pgd20], every: 1000000}"),
        *("--seed", "101", "--run-dir", str(run.directory)),
    ]
    overrides = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    again = assemble(read_document(words[1]).with_overrides(overrides), run.experiment.registry)
    assert again.as_run() == run.experiment.as_run()


def test_the_best_mean_over_seeds_wins_and_the_table_s_runs_use_it(plan_of):
    measured(plan_of(), {"CalFAT": rates(0.3, 0.5, 0.4), "FedPGD": rates(0.1, 0.2, 0.3)})
    plan = plan_of()
    assert plan.choosing.left == ()
    assert {name: choice.best.name for name, choice in plan.choices.items()} == {
        "CalFAT": "learning_rate 0.05",
        "FedPGD": "learning_rate 0.1",
    }
    assert plan.choices["CalFAT"].best.mean == pytest.approx(0.505)
    assert [(run.name, run.experiment.train.learning_rate) for run in plan.left] == [
        (f"{method} seed {seed}", rate) for seed in (0, 1) for method, rate in (("CalFAT", 0.05), ("FedPGD", 0.1))
    ]
    words = command(plan, plan.runs[0])
    assert "train_args.learning_rate=0.05" in words
    assert not [word for word in words if word.startswith("calfat.")]


@pytest.mark.parametrize(("metric", "best"), [("pgd20", 0.02), ("mean(natural, pgd20)", 0.1)])
def test_the_last_round_counts_of_one_evaluator_or_the_mean_of_several(metric, best, plan_of):
    text = CHOOSING.replace("metric: pgd20", f"metric: {metric}").replace("comm_round: 1", "comm_round: 2")
    plan = plan_of(text)
    assert {run.experiment.monitor.every for run in plan.choosing.runs} == {1_000_000}
    rounds = {  # of 2 rounds (natural, PGD-20)
        0.02: [(0.1, 0.3), (0.2, 0.35)],
        0.05: [(0.6, 0.5), (0.1, 0.1)],
        0.1: [(0.2, 0.2), (0.6, 0.3)],
    }
    for run in plan.choosing.runs:
        rows = [{"natural": n, "pgd20": p} for n, p in rounds[run.experiment.train.learning_rate]]
        finish(run, *rows)
    assert plan_of(text).choices["CalFAT"].best.point[0].value == best


def test_nothing_is_chosen_while_a_run_is_left(plan_of):
    plan = plan_of()
    for run in plan.choosing.runs[:-1]:
        finish(run, {"pgd20": 0.5})
    plan = plan_of()
    assert [run.name for run in plan.choosing.left] == ["FedPGD, learning_rate 0.1, seed 101"]
    assert plan.waiting == ("FedPGD",)
    assert {run.cell.name for run in plan.left} == {"CalFAT"}
    assert "| FedPGD | -" in markdown(summarise(plan))
    assert "1 of 2 cells" not in markdown(summarise(plan))
    assert "2 of 2 cells have seeds left to run." in markdown(summarise(plan))


def test_a_lost_run_counts_as_the_worst_not_as_missing(plan_of):
    """0.1 is best where it did not diverge: one of its two runs did, and so it is not chosen."""
    plan = plan_of()
    for run in plan.choosing.runs:
        rate = run.experiment.train.learning_rate
        if rate == 0.1 and run.seed == 101:
            run.lost.parent.mkdir(parents=True, exist_ok=True)
            mark_lost(run, "round 3: not one client delivered a usable update.")
        else:
            finish(run, {"pgd20": {0.02: 0.3, 0.05: 0.4, 0.1: 0.7}[rate]})
    plan = plan_of()
    choice = plan.choices["CalFAT"]
    assert [(each.name, each.values, each.lost) for each in choice.tries] == [
        ("learning_rate 0.02", (0.3, 0.3), 0),
        ("learning_rate 0.05", (0.4, 0.4), 0),
        ("learning_rate 0.1", (0.7, 0.0), 1),
    ]
    assert choice.best.name == "learning_rate 0.05"
    assert plan.choosing.left == ()
    text = markdown(summarise(plan))
    assert (
        "- CalFAT: tried learning_rate 0.02: 30.00; learning_rate 0.05: 40.00 (chosen); learning_rate 0.1: 35.00, "
        "1 of 2 runs lost\n"
        "- CalFAT: learning_rate 0.1, seed 101 was lost: round 3: not one client delivered a usable update.\n"
    ) in text


def test_how_a_choice_run_ended_says_nothing_of_the_run_of_the_table_with_its_seed(plan_of):
    text = CHOOSING.replace("[100, 101]", "[0]")
    measured(plan_of(text), {name: rates(0.3, 0.5, 0.4) for name in ("CalFAT", "FedPGD")})
    plan = plan_of(text)
    ended = [run.ended("lost", "it diverged") for run in plan.choosing.runs]
    assert [run.state for cell in summarise(plan, ended).cells for run in cell.runs] == ["new"] * 4


def test_where_every_run_was_lost_the_row_says_so(plan_of):
    measured(plan_of(), {"CalFAT": rates(None, None, None), "FedPGD": rates(0.1, 0.2, 0.3)})
    plan = plan_of()
    assert {run.cell.name for run in plan.left} == {"FedPGD"}
    assert (plan.waiting, plan.choices["CalFAT"].best) == ((), None)
    assert "| CalFAT | nothing: every run was lost " in markdown(summarise(plan))


def test_the_table_says_when_the_best_value_lies_at_the_edge_of_the_grid(plan_of):
    """FedPGD's best rate is the largest that was tried, so a larger one may be better; CalFAT's is the smallest."""
    measured(plan_of(), {"CalFAT": rates(0.6, 0.5, 0.4), "FedPGD": rates(0.1, 0.2, 0.3)})
    summary = summarise(plan_of())
    text = markdown(summary)
    assert text.splitlines()[2:6] == [
        "| method | chosen                                     |   n | natural | PGD-20 |",
        "| ------ | ------------------------------------------ | --: | ------: | -----: |",
        "| CalFAT | learning_rate 0.02, lower edge of the grid |   0 |       - |      - |",
        "| FedPGD | learning_rate 0.1, upper edge of the grid  |   0 |       - |      - |",
    ]
    assert (
        f"the model after the final round. {INTERVALS} Values are chosen for each row by pgd20 on the "
        "validation split after the last round, the mean over seeds 100, 101, in runs that never see "
        "the test split; a run that failed counts as 0. Tries of every row: 3."
    ) in text
    assert "edge" not in latex(summary).partition("\\end{table}")[0]
    assert as_csv(summary).startswith("method,chosen,metric,n,")
    assert '\nFedPGD,"learning_rate 0.1, upper edge of the grid",natural,0' in as_csv(summary)


def test_json_has_the_choices_and_the_values_of_all_choice_runs(plan_of):
    measured(plan_of(), {"CalFAT": rates(0.6, None, 0.4), "FedPGD": rates(0.1, 0.2, 0.3)})
    content = json.loads(json.dumps(as_json(summarise(plan_of())), allow_nan=False))
    assert {key: content["choose"][key] for key in ("metric", "seeds")} == {"metric": ["pgd20"], "seeds": [100, 101]}
    choice = content["cells"][0]["choice"]
    assert choice["chosen"] == {"train_args.learning_rate": 0.02}
    assert choice["text"] == "learning_rate 0.02, lower edge of the grid"
    assert [(each["settings"], each["mean"], each["lost"]) for each in choice["tries"]] == [
        ({"train_args.learning_rate": 0.02}, pytest.approx(0.605), 0),
        ({"train_args.learning_rate": 0.05}, 0.0, 2),
        ({"train_args.learning_rate": 0.1}, pytest.approx(0.405), 0),
    ]
    assert choice["tries"][0]["runs"][1] == {
        "seed": 101,
        "directory": "runs/suites/tiny/calfat/choose/learning_rate=0.02/seed-101",
        "status": "finished",
        "value": pytest.approx(0.61),
        "guess": None,
    }
    assert content["cells"][0]["settings"]["train_args.learning_rate"] == 0.02


def test_several_keys_are_tried_in_every_combination(plan_of):
    text = CHOOSING.replace("0.1]}", "0.1], calfat.trainer.scale: [1, 10]}").replace(*CALFAT)
    text = text.replace("    FedPGD: {calfat.trainer: fedpgd}\n", "")
    tries = plan_of(text).choices["CalFAT"].tries
    assert [each.name for each in tries[:3]] == [
        f"learning_rate {each}" for each in ("0.02, scale 1", "0.02, scale 10", "0.05, scale 1")
    ]
    assert tries[1].runs[0].directory.parent.name == "learning_rate=0.02,scale=10"
    for run in plan_of(text).choosing.runs:
        scale = run.experiment.trainer.options.scale
        finish(run, {"pgd20": run.experiment.train.learning_rate * (2 if scale == 1 else 1)})
    chosen = "learning_rate 0.1, upper edge of the grid; scale 1, lower edge of the grid"
    assert chosen in markdown(summarise(plan_of(text)))


def test_tables_with_the_same_cell_share_its_choice_runs(plan_of):
    measured(plan_of(), {"CalFAT": rates(0.3, 0.5, 0.4), "FedPGD": rates(0.1, 0.2, 0.3)})
    other = CHOOSING.replace("    CalFAT: {}\n", "    FedTRADES: {calfat.trainer: fedtrades}\n") + "runs: tiny\n"
    plan = plan_of(other, name="other")
    assert {run.cell.name for run in plan.choosing.left} == {"FedTRADES"}
    assert plan.choices["FedPGD"].best.name == "learning_rate 0.1"


def test_a_finished_choice_run_without_its_metric_is_reported(plan_of, snapshot):
    run = plan_of().choosing.runs[0]
    finish(run, {"pgd20": 0.5})
    rounds = Path(run.directory, "rounds.jsonl")
    written = rounds.read_text()
    for damaged in (written.replace("pgd20", "other"), written.replace('"accuracy": 0.5,', '"accuracy": NaN,')):
        assert damaged != written
        rounds.write_text(damaged)
        with snapshot.raises(RunError):
            plan_of()


@pytest.mark.parametrize(
    ("value", "values", "words"),
    [
        (0.1, [0.02, 0.1, 0.05], "upper edge of the grid"),
        (0.02, [0.02, 0.05], "lower edge of the grid"),
        (2, [1, 2, 3], ""),
        ("8/255", ["2/255", "8/255"], "upper edge of the grid"),
        (1, [1], "the only value tried"),
        ("a", ["a", "b"], ""),
        (True, [True, False], ""),
    ],
)
def test_how_near_the_edge(value, values, words):
    assert place_in_grid(value, values) == words


def test_the_cost_is_estimated_from_rounds_that_were_measured_else_from_the_file(plan_of):
    assert seconds_left(plan_of()) is None
    assert seconds_left(plan_of(CHOOSING + "seconds_per_round: 3\n")) == pytest.approx(3 * (12 + 4))
    assert seconds_left(plan_of(CHOOSING + "seconds_per_round: 3\n", only=["CalFAT"])) == pytest.approx(3 * (6 + 2))
    finish(plan_of().choosing.runs[0], {"pgd20": 0.5}, seconds=5.0)
    assert seconds_left(plan_of(CHOOSING + "seconds_per_round: 3\n")) == pytest.approx(5 * (11 + 4))


def test_rounds_that_a_run_to_be_resumed_has_done_cost_nothing_more(plan_of):
    text = CHOOSING.replace("comm_round: 1", "comm_round: 3") + "seconds_per_round: 2\n"
    run = plan_of(text).choosing.runs[0]
    finish(run, {"pgd20": 0.5}, {"pgd20": 0.5})
    RunDirectory(run.directory).results.unlink()
    assert seconds_left(plan_of(text)) == pytest.approx(2 * (3 * (12 + 4) - 2))


def test_choice_runs_alone_have_what_the_choice_sets(plan_of):
    text = CHOOSING + "  set: {train_args.comm_round: 3}\n  extend: {train_args.learning_rate: 1.7}\n"
    plan = plan_of(text)
    assert {run.experiment.num_rounds for run in plan.choosing.runs} == {3}
    assert plan.choosing.runs[-1].cell.experiment.num_rounds == 3
    for _ in range(2):  # the grid grows, and so do the runs of its next value
        for run in plan_of(text).choosing.left:
            value = {0.02: 0.3, 0.05: 0.4, 0.1: 0.5, 0.17: 0.4}[run.experiment.train.learning_rate]
            finish(run, *[{"pgd20": value}] * run.experiment.num_rounds)
    plan = plan_of(text)
    assert {run.experiment.num_rounds for run in plan.choices["FedPGD"].runs} == {3}
    assert {(run.experiment.num_rounds, run.experiment.train.learning_rate) for run in plan.runs} == {(1, 0.1)}
    words = command(plan, plan.choosing.runs[-1])
    assert words[words.index("train_args.comm_round=3") - 1] == "--set"
    assert "Only these runs have train_args.comm_round=3." in markdown(summarise(plan))


def at_chance(plan: SuitePlan, *values: float, guess: float | None = 0.612) -> None:
    """Finish all choice runs, of the three values that are tried; what one answer to all images has."""
    for run in plan.choosing.runs:
        value = dict(zip((0.02, 0.05, 0.1), values, strict=True))[run.experiment.train.learning_rate]
        finish(run, {"pgd20": value}, guess=guess)


CHANCE = (
    "nothing is chosen: every run ended no better than one answer to all images, which has 61.20. Try other values in "
    "choose.grid, or more rounds, and give the same command again"
)


def test_values_that_all_ended_at_chance_are_no_choice(plan_of):
    """A tie of models that give one answer to everything says nothing of the values."""
    at_chance(plan_of(), 0.612, 0.612, 0.3)
    plan = plan_of()
    assert (plan.left, plan.waiting, plan.choosing.left) == ((), (), ())
    choice = plan.choices["CalFAT"]
    assert (choice.best, choice.guessing, choice.tied) == (None, True, ())
    summary = summarise(plan)
    assert f"- CalFAT: {CHANCE}\n" in markdown(summary)
    assert "| CalFAT | nothing: no value is better than guessing |   0 |" in markdown(summary)
    assert f"% CalFAT: {CHANCE}\n" in latex(summary)
    assert CHANCE in as_csv(summary)
    told = as_json(summary)["cells"][0]["choice"]
    assert (told["chosen"], told["guessing"], told["remarks"]) == (None, True, [CHANCE])
    assert told["tries"][0]["runs"][0]["guess"] == 0.612


@pytest.mark.parametrize("values", [(0.612, 0.612, 0.613), (0.1, 0.613, 0.1)])
def test_one_value_above_chance_is_chosen(values, plan_of):
    at_chance(plan_of(), *values)
    choice = plan_of().choices["CalFAT"]
    assert choice.best.mean == pytest.approx(0.613)
    assert not choice.guessing


def test_where_chance_is_not_known_values_are_chosen(plan_of):
    """Runs of an earlier version do not say what one answer has."""
    at_chance(plan_of(), 0.612, 0.612, 0.612, guess=None)
    choice = plan_of().choices["CalFAT"]
    assert (choice.guessing, choice.best.name) == (False, "learning_rate 0.02")


def test_a_lost_run_is_no_better_than_chance_and_lost_runs_alone_are_another_case(plan_of):
    at_chance(plan_of(), 0.612, 0.612, 0.612)
    for run in plan_of().choosing.runs:
        if run.experiment.train.learning_rate == 0.1:
            shutil.rmtree(run.directory)
            mark_lost(run, "round 1: it diverged")
    assert plan_of().choices["CalFAT"].guessing
    for run in plan_of().choosing.runs:
        if run.state != "lost":
            shutil.rmtree(run.directory)
            mark_lost(run, "round 1: it diverged")
    choice = plan_of().choices["CalFAT"]
    assert (choice.guessing, choice.hopeless) == (False, True)


def test_what_chance_was_is_in_the_record(plan_of, tmp_path):
    """So that another machine says the same."""
    plan = plan_of()
    at_chance(plan, 0.612, 0.612, 0.612)
    suite = load_suite(plan.suite.document.file, record=Path("runs.csv"))
    record_runs(suite, plan.choosing.runs)
    shutil.rmtree(tmp_path / "runs")
    rows = read_record(Path("runs.csv"))
    assert {(row.values["choice"], row.values["guess"]) for row in rows.values()} == {(0.612, 0.612)}
    assert make_plan(suite, Registry.load(entry_points=False)).choices["CalFAT"].guessing


def test_a_tie_says_how_to_run_it_again(plan_of):
    at_chance(plan_of(), 0.7, 0.65, 0.7)
    plan = plan_of()
    tie = (
        "a tie: learning_rate 0.02 and learning_rate 0.1 have the same mean, 70.00, and the first was taken. To run "
        "the tie again, add a seed to choose.seeds, such as 102, and give the same command again: finished runs are "
        "kept"
    )
    assert plan.choices["CalFAT"].best.name == "learning_rate 0.02"
    assert f"- CalFAT: {tie}\n" in markdown(summarise(plan))
    told = as_json(summarise(plan))["cells"][0]["choice"]
    assert told["tied"] == [{"train_args.learning_rate": 0.02}, {"train_args.learning_rate": 0.1}]
    assert told["remarks"] == [tie]


def test_the_page_has_the_remarks_of_a_choice(plan_of, tmp_path):
    at_chance(plan_of(), 0.612, 0.612, 0.612)
    folder = write_tables(summarise(plan_of()))
    assert f"CalFAT: {CHANCE}" in read_suite(folder).notes


def test_nothing_is_chosen_by_an_attack_that_did_not_run(plan_of):
    run = plan_of().choosing.runs[0]
    idle = EvaluationResult.without_number("pgd20", "it wants more classes", settings={}, implementation="nobody")
    file = begun(run).rounds_file(run.experiment)
    file.append(dataclasses.replace(finished_round(1, {}), evaluations={"pgd20": idle}))
    Path(run.directory, "results.json").write_text(json.dumps({"seconds": 4.0, "evaluations": []}))
    with pytest.raises(RunError, match=r"rounds\.jsonl: pgd20 did not run \(it wants more classes\), so nothing"):
        plan_of()
