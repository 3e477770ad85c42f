"""Run directories as a report sees them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from calfat_plugin import load_run
from calfat_plugin.errors import RecipeError, RunError
from calfat_plugin.report.charts import losses
from calfat_plugin.report.comparison import find_runs
from calfat_plugin.report.labels import command, highlights
from calfat_plugin.report.run_page import _rounds
from calfat_plugin.report.write import write_comparison, write_run_report
from calfat_plugin.stored_run import Run
from tests.report.made import CLASSES, COUNTS, change_json, made_run
from tests.report.test_pages import full_run
from tests.snapshot import TextSnapshot
from tests.suites.fake_run import written

ATTACKED = written("cw20", 0.5, num_examples=3)  #: in attacks/


def test_everything_of_a_finished_run(tmp_path: Path) -> None:
    run = Run.load(made_run(tmp_path / "runs" / "made" / "0-x", final={"natural": 0.9, "pgd20": 0.4}))
    assert (run.name, run.experiment.seed, run.finished) == ("made", 0, True)
    assert run.monitored == ("natural", "pgd20")
    assert run.curve("natural") == [(1, 0.2), (2, 0.4), (3, 0.6000000000000001), (4, 0.8)]
    assert run.curve("heterogeneity") == [(1, 0.5), (2, 0.25), (3, 0.5 / 3), (4, 0.125)]
    assert {label: result.accuracy for label, result in run.results.items()} == {"natural": 0.9, "pgd20": 0.4}
    assert run.class_names == CLASSES
    assert run.partition.class_counts == COUNTS


def test_rounds_without_an_evaluation_are_left_out_of_a_curve(tmp_path: Path) -> None:
    run = Run.load(made_run(tmp_path / "a", rounds=[{"natural": 0.5}, {}, {"natural": 0.7}]))
    assert run.curve("natural") == [(1, 0.5), (3, 0.7)]
    assert run.monitored == ("natural",)


def test_what_is_no_finite_number_is_left_out(tmp_path: Path) -> None:
    path = made_run(tmp_path / "a")
    rounds = path / "rounds.jsonl"
    rounds.write_text(rounds.read_text().replace('"heterogeneity": 0.25,', '"heterogeneity": NaN,'))
    run = Run.load(path)
    assert [number for number, _ in run.curve("heterogeneity")] == [1, 3, 4]
    assert len(run.records) == 4


def test_clients_of_a_file_of_their_own_are_columns(tmp_path: Path) -> None:
    """Client 10 is not in the first round."""
    path = made_run(tmp_path / "a", "train_args.client_num_in_total=11", counts=COUNTS * 5 + COUNTS[:1])
    rounds = path / "rounds.jsonl"
    rounds.write_text(rounds.read_text().replace(', "10": 11.0', "", 1).replace("9, 10]", "9]", 1))
    run = Run.load(path)
    assert run.curve("loss_10") == [(2, 10.5), (3, 10 + 1 / 3), (4, 10.25)]
    frame = load_run(path).rounds
    assert [math.isnan(frame["loss_10"][0]), *frame["loss_10"][1:]] == [True, 10.5, 10 + 1 / 3, 10.25]
    chart = losses(run)
    assert chart is not None
    assert "the band is from the lowest to the highest of 11 clients" in chart.caption
    assert chart.caption.endswith("Last round: 5.25.")  # 1 / 4 beside the mean of 0 to 10


def test_an_evaluator_whose_name_begins_like_a_column_of_losses_is_no_client(tmp_path: Path) -> None:
    monitor = "calfat.monitor.evaluators=[{name: natural, label: loss_free}]"
    run = Run.load(made_run(tmp_path / "a", monitor, rounds=[{"loss_free": 0.5}] * 2))
    chart = losses(run)
    assert chart is not None
    assert "to the highest of 2 clients" in chart.caption
    assert chart.caption.endswith("Last round: 1.")  # the mean of 1 / 2 and 3 / 2


def test_runs_are_found_at_a_path_and_below_it(tmp_path: Path) -> None:
    made = [made_run(tmp_path / "suite" / cell / seed) for cell in ("b", "a") for seed in ("1", "0")]
    assert find_runs(made[0]) == [made[0]]
    assert find_runs(tmp_path / "suite") == sorted(made)


def test_a_suite_lists_its_runs_also_those_it_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = made_run(tmp_path / "suites" / "table1" / "calfat" / "0")
    made_run(tmp_path / "suites" / "fig3" / "a-cell-of-yesterday" / "0")
    directories = ["runs/suites/table1/calfat/0", "runs/suites/table1/calfat/1"]  # as written from another directory
    cells = [{"name": "CalFAT", "runs": [{"seed": seed, "directory": directories[seed]} for seed in (0, 1)]}]
    (tmp_path / "suites" / "fig3" / "suite.json").write_text(json.dumps({"cells": cells}))
    assert find_runs(tmp_path / "suites" / "fig3") == [shared]
    monkeypatch.chdir(tmp_path / "suites" / "fig3")
    assert find_runs(Path()) == [shared]


def test_a_path_without_runs(tmp_path: Path, snapshot: TextSnapshot) -> None:
    run = made_run(tmp_path / "run")
    for name in ("empty/", "no", "run/rounds.jsonl", "notes"):
        (tmp_path / name).mkdir() if name.endswith("/") else None
        (tmp_path / name).touch() if name == "notes" else None
        with snapshot.raises(RunError, tmp_path / name):
            find_runs(tmp_path / name)
    with snapshot.raises(RunError):
        Run.load(run.parent)
    (tmp_path / "suite.json").write_text(json.dumps({"cells": [{"runs": []}]}))  # which calfat did not write
    with snapshot.raises(RunError, "suite.json"):
        find_runs(tmp_path)


def test_a_damaged_file_is_reported_by_name(tmp_path: Path, snapshot: TextSnapshot) -> None:
    path = made_run(tmp_path / "a", final={"natural": 0.9})
    (path / "results.json").write_text('{"evaluations": [')
    with snapshot.raises(RunError):
        Run.load(path)
    (path / "results.json").write_text("[]")
    with snapshot.raises(RunError):
        Run.load(path)
    (path / "results.json").unlink()
    (path / "rounds.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(RunError, match=r"rounds\.jsonl: cannot be read \('utf-8' codec"):
        Run.load(path)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("results.json", {"evaluations": {}}),
        ("results.json", {"evaluations": [{"accuracy": 0.5}]}),
        ("results.json", {"alarms": [3]}),
        ("results.json", {"evaluations": [written("natural", math.nan)]}),
        ("results.json", {"evaluations": [written("natural", 1, per_class=[0.5])]}),
        ("partition.json", {"class_counts": [[1]]}),
        ("partition.json", {"class_counts": [[-1] * 10]}),
        ("environment.json", {"versions": ["torch"]}),
        ("profile.json", {"parts": [{"name": "round 1", "seconds": 1.0}]}),
        (
            "attacks/best-robust.json",
            {"evaluations": [{"label": "x", "accuracy": 1, "accuracy_release": 1, "num_examples": 3}]},
        ),
        ("results.json", {"alarms": [{"code": "zero-gradients", "text": "no way to go"}]}),
        ("results.json", {"test_selected": {"best-robust": {"evaluator": "pgd20", "accuracy": None, "round": 2}}}),
    ],
)
def test_what_a_page_cannot_show_is_refused_with_its_place(
    file: str, change: dict[str, object], snapshot: TextSnapshot, tmp_path: Path
) -> None:
    path = full_run(tmp_path / "a")
    change_json(path / file, **change)
    with snapshot.raises(RunError, f"{path / file}: {next(iter(change))}"):
        Run.load(path)


def test_null_stands_for_a_key_that_may_be_missing_alone(tmp_path: Path) -> None:
    path = made_run(tmp_path / "a", final={"natural": 0.9})
    (evaluation,) = json.loads((path / "results.json").read_text())["evaluations"]
    change_json(path / "results.json", evaluations=[{**evaluation, "guess": None}])
    assert Run.load(path).evaluations[0].accuracy == 0.9
    change_json(path / "results.json", evaluations=[{**evaluation, "seconds": None}])
    with pytest.raises(
        RunError, match=r"results\.json: evaluations\[0\]\.seconds is nothing \(null\), expected a number"
    ):
        Run.load(path)
    change_json(path / "results.json", evaluations=[{**evaluation, "accuracy": None}])
    with pytest.raises(RunError, match=r"results\.json: evaluations\[0\]\.accuracy is nothing, and no 'not_run' says"):
        Run.load(path)
    idle = {**evaluation, "accuracy": None, "accuracy_release": None, "not_run": "it wants more"}
    change_json(path / "results.json", evaluations=[idle])
    run = Run.load(path)
    assert (run.value("natural"), run.value("natural:release"), run.not_run("natural")) == (None, None, "it wants more")
    assert (run.not_run("natural:tail"), run.not_run("pgd20")) == ("it wants more", "")


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("run/results.json", {"evaluations": None}),
        ("run/results.json", {"evaluations": [written("natural", 0.9, guess=None)]}),
        ("run/attacks/best-robust.json", {"evaluations": [{**ATTACKED, "settings": {"norm": "linf", "eps": None}}]}),
        ("run/attacks/best-robust.json", {"evaluations": [{**ATTACKED, "settings": {"norm": None, "eps": "0.1"}}]}),
        ("suite.json", {"axes": None}),
        ("suite.json", {"metrics": None}),
        ("suite.json", {"cells": None}),
        ("suite.json", {"cells": [{"name": "a", "runs": None, "scores": None}]}),
    ],
)
def test_a_null_in_the_place_of_what_may_be_missing_is_as_if_it_were(
    file: str, change: dict[str, object], tmp_path: Path
) -> None:
    run = full_run(tmp_path / "run")
    (tmp_path / "suite.json").write_text("{}")
    change_json(tmp_path / file, **change)
    write_run_report(run)
    write_comparison([tmp_path])


def test_a_recipe_that_no_run_wrote_is_refused_with_its_place(tmp_path: Path) -> None:
    recipe = made_run(tmp_path / "a") / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("comm_round: 4", "comm_round: many"))
    line = recipe.read_text().partition("comm_round")[0].count("\n") + 1
    with pytest.raises(RecipeError, match=rf"^{recipe}:{line}: train_args\.comm_round: got 'many' \(text\), expected"):
        Run.load(recipe.parent)


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("comm_args.mqtt_password=correct horse battery", "comm_args.mqtt_password=…"),
        ("tracking_args={enable_wandb: false, wandb_key: hunter2}", "tracking_args=…"),
        ("--set=tracking_args.wandb_key=hunter2", "--set=tracking_args.wandb_key=…"),
        ("calfat.threat.eps=8/255", "calfat.threat.eps=8/255"),
        ("runs/keys", "runs/keys"),
    ],
)
def test_the_command_of_a_page_holds_no_secret(word: str, shown: str, tmp_path: Path) -> None:
    path = made_run(tmp_path / "a")
    change_json(path / "environment.json", command=["calfat", "run", word])
    assert command(Run.load(path)) == f"calfat run {shown}"


@pytest.mark.usefixtures("no_figures")
def test_a_run_whose_plugins_are_not_installed_still_has_its_page(tmp_path: Path) -> None:
    """Its options are shown as they are written; nothing of the plugin is asked."""
    path = made_run(tmp_path / "a")
    recipe = path / "recipe.yaml"
    content = yaml.safe_load(recipe.read_text())
    content["calfat"]["trainer"] = {"name": "my-fat", "beta": [1, 2], "loss": {"name": "my-loss", "tau": 0.5}}
    content["calfat"]["evaluators"][0] = {"name": "my-attack", "label": "natural", "eps": "1/3"}
    recipe.write_text(yaml.safe_dump(content, sort_keys=False))
    run = Run.load(path)
    assert (run.experiment.trainer.name, run.experiment.trainer.options) == ("my-fat", {"beta": [1, 2]})
    assert highlights(run)["calfat.trainer.loss.name"] == "my-loss"
    assert run.settings["calfat"]["trainer"] == content["calfat"]["trainer"]
    assert run.settings["calfat"]["evaluators"][0] == content["calfat"]["evaluators"][0]
    assert "<dt>calfat.trainer.beta</dt><dd>[1, 2]</dd>" in write_run_report(path).read_text()


def test_large_numbers_of_rounds_are_whole(tmp_path: Path) -> None:
    rounds = made_run(tmp_path / "run") / "rounds.jsonl"
    rounds.write_text(rounds.read_text().replace("812.5", "12345.6"))
    table = _rounds(Run.load(tmp_path / "run"))
    shown = dict(zip(table.head, table.rows[0], strict=True))
    assert (shown["peak memory, MB"], shown["seconds"]) == ("12,346", "2")
