"""Evaluators that are added to a finished run: nothing is trained, what is there stays, and the bits are as if they had
been there from the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calfat_plugin.disk import read_json
from calfat_plugin.evaluators import evidence
from calfat_plugin.evaluators.evidence import read_evidence, write_evidence
from calfat_plugin.federation import measurements
from calfat_plugin.federation.measurements import Measurements
from calfat_plugin.federation.worker import Worker
from calfat_plugin.runs import writer
from calfat_plugin.runs.directory import RunDirectory
from tests.cli.runner import Ended, calfat

RECIPE = """\
data_args: {dataset: digits, max_train_examples: 64, max_test_examples: 24}
model_args: {model: cnn_small}
train_args: {comm_round: 1, batch_size: 32, client_num_in_total: 2, client_num_per_round: 2}
calfat:
  trainer: standard
  threat: {eps: 0.1, step_size: 0.05, steps: 2}
  evaluators: [natural, {name: pgd, steps: 2}]
  monitor: {evaluators: [natural]}
  runtime: {threads: 1}
"""
PGD = "{name: pgd, steps: 2}"
CW = "{name: cw, steps: 2}"


def run(*words: str, directory: str = "run") -> Ended:
    return calfat("run", "r.yaml", "--run-dir", directory, "--plain", "--no-page", *words)


def asking(*picks: str) -> tuple[str, str]:
    return "--set", f"calfat.evaluators=[{', '.join(picks)}]"


def add(*picks: str, directory: str = "run") -> Ended:
    return run("--resume", *asking(*picks), directory=directory)


def results(directory: str = "run") -> dict[str, Any]:
    """Without what the clock says."""
    found = read_json(Path(directory, "results.json"))
    del found["seconds"]
    for evaluation in found["evaluations"]:
        del evaluation["seconds"]
    return found


def labels(directory: str = "run") -> list[str]:
    return [evaluation["label"] for evaluation in results(directory)["evaluations"]]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, and one that had the added evaluator from the start."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        (folder / "r.yaml").write_text(RECIPE)
        assert run().code == 0
        assert run(*asking("natural", PGD, CW), directory="from_the_start").code == 0
    return folder


@pytest.fixture
def finished(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the evaluators that final evaluations of this process measure; no client may train."""
    found: list[str] = []
    measure = measurements.measure

    def noting(task: Any, evaluators: Any, **how: Any) -> Any:
        ready = list(evaluators)
        found.extend(label for label, _ in ready)
        return measure(task, ready, **how)

    def training(*arguments: Any) -> None:
        raise AssertionError("a client trains")

    monkeypatch.setattr(measurements, "measure", noting)
    monkeypatch.setattr(Worker, "fit", training)
    return found


@pytest.mark.usefixtures("finished")
def test_only_the_added_evaluator_measures_and_the_bits_are_as_from_the_start(measured: list[str]) -> None:
    before, rows = results(), Path("run/rounds.csv").read_bytes()
    assert add("natural", PGD, CW).code == 0
    assert measured == ["cw"]
    assert results() == results("from_the_start")
    assert results()["evaluations"][:2] == before["evaluations"]
    assert labels() == ["natural", "pgd", "cw", "worst-case"]
    assert Path("run/evidence.safetensors").read_bytes() == Path("from_the_start/evidence.safetensors").read_bytes()
    assert Path("run/rounds.csv").read_bytes() == rows
    again = add("natural", PGD, CW)
    assert (again.code, measured) == (2, ["cw"])
    assert "this run is finished" in again.err


@pytest.mark.usefixtures("finished")
def test_the_added_evaluation_can_be_replayed_and_the_time_adds_up() -> None:
    seconds = read_json(Path("run/results.json"))["seconds"]
    assert add("natural", PGD, CW).code == 0
    assert read_json(Path("run/results.json"))["seconds"] > seconds
    replayed = calfat("replay", "run", "--json")
    assert replayed.code == 0
    numbers = json.loads(replayed.out)["numbers"]
    assert {number["label"]: number["stands"] for number in numbers} == dict.fromkeys(
        ("natural", "pgd", "cw", "worst-case"), True
    )


@pytest.mark.usefixtures("finished")
def test_an_evaluator_that_comes_first_in_the_recipe_stands_first(measured: list[str]) -> None:
    before = results()
    assert add(CW, "natural", PGD).code == 0
    assert measured == ["cw"]
    assert labels() == ["cw", "natural", "pgd", "worst-case"]
    assert results()["evaluations"][1:3] == before["evaluations"]


@pytest.mark.usefixtures("finished")
def test_the_newest_finished_run_is_found_for_what_it_lacks(measured: list[str]) -> None:
    """Without --run-dir, which a run of the command line seldom has."""
    shutil.copytree("run", "runs/r/0-20260101-120000")
    ended = calfat("run", "r.yaml", "--plain", "--no-page", "--resume", *asking("natural", PGD, CW))
    assert (ended.code, measured) == (0, ["cw"])
    assert labels("runs/r/0-20260101-120000") == ["natural", "pgd", "cw", "worst-case"]
    assert calfat("run", "r.yaml", "--plain", "--resume", *asking("natural", PGD, CW)).code == 2


# --- stopped half-way -------------------------------------------------------------------------------------------------


def stopping(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (evidence.Collector, "finished"),  # the attack is done, nothing is written
        (writer, "write_json"),  # the evidence is in its place, the results are not
        (RunDirectory, "write_recipe"),  # the results are, the recipe is not
    ],
    ids=["measured", "evidence written", "results written"],
)
@pytest.mark.usefixtures("finished")
def test_an_addition_that_is_stopped_loses_nothing_and_ends_with_the_same_bits(place: Any, name: str) -> None:
    before, recipe = results(), Path("run/recipe.yaml").read_bytes()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(place, name, stopping)
        stopped = add("natural", PGD, CW)
    # A suite takes the recipe's word for what was measured, so it comes last.
    assert Path("run/recipe.yaml").read_bytes() == recipe
    assert stopped.code == 130
    assert stopped.err.startswith("stopped. What was measured before is kept.")
    assert "--resume --run-dir run" in stopped.err
    assert results()["evaluations"][:2] == before["evaluations"]
    assert add("natural", PGD, CW).code == 0
    assert results() == results("from_the_start")
    assert Path("run/evidence.safetensors").read_bytes() == Path("from_the_start/evidence.safetensors").read_bytes()
    assert calfat("replay", "run").code == 0
    assert not Path("run/evaluation").exists()


@pytest.mark.usefixtures("finished")
def test_what_a_stopped_addition_kept_is_not_of_one_with_other_options() -> None:
    """A stronger attack leaves images of its own, which must not count for the weaker one that takes its place."""
    assert run(*asking("natural", PGD, "{name: cw, steps: 1}"), directory="weaker").code == 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(evidence.Collector, "finished", stopping)
        assert add("natural", PGD, "{name: cw, steps: 20, eps: 0.1}").code == 130
    assert list(Path("run/evaluation").rglob("evidence-*.bin"))
    assert add("natural", PGD, "{name: cw, steps: 1}").code == 0
    assert results() == results("weaker")


# --- other options, fewer evaluators ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("finished")
def test_other_options_under_the_same_label_are_refused(measured: list[str]) -> None:
    before = Path("run/results.json").read_bytes()
    ended = add("natural", "{name: pgd, steps: 3}", CW)
    assert (ended.code, measured) == (2, [])
    assert "calfat.evaluators.pgd.steps: 2 when started, 3 now. Two settings under one label" in ended.err
    assert Path("run/results.json").read_bytes() == before
    assert add("natural", PGD, "{name: pgd, label: pgd3, steps: 3}").code == 0
    assert labels() == ["natural", "pgd", "pgd3", "worst-case"]


@pytest.mark.usefixtures("finished")
def test_a_removed_evaluator_keeps_its_results_and_its_options(measured: list[str]) -> None:
    assert add("natural", CW).code == 0
    assert measured == ["cw"]
    assert labels() == ["natural", "cw", "pgd", "worst-case"]
    recipe = Path("run/recipe.yaml")
    assert "- name: pgd\n" in recipe.read_text()
    assert calfat("check", recipe).code == 0
    assert add("natural", "{name: pgd, steps: 3}", CW).code == 2
    assert add("natural", PGD, CW).code == 2  # nothing is missing
    assert measured == ["cw"]


@pytest.mark.usefixtures("finished")
def test_more_rounds_measure_all_anew() -> None:
    ended = add("natural", CW)
    assert ended.code == 0
    assert run("--resume", *asking("natural", PGD), "--set", "train_args.comm_round=2").code == 0
    assert labels() == ["natural", "pgd"]
    assert "cw" not in Path("run/recipe.yaml").read_text()
    assert run(*asking("natural", PGD), "--set", "train_args.comm_round=2", directory="two").code == 0
    assert results()["evaluations"] == results("two")["evaluations"]


# --- without evidence -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("finished")
def test_without_the_evidence_of_earlier_attacks_there_is_no_worst_case() -> None:
    Path("run/evidence.safetensors").unlink()
    assert add("natural", PGD, CW, "{name: fgsm}").code == 0
    assert labels() == ["natural", "pgd", "cw", "fgsm"]
    replayed = json.loads(calfat("replay", "run", "--json").out)
    assert [number["label"] for number in replayed["numbers"]] == ["natural", "cw", "fgsm"]
    assert replayed["without_evidence"] == ["pgd"]


@pytest.mark.usefixtures("finished")
def test_evidence_of_another_model_is_refused_and_stays() -> None:
    path = Path("run/evidence.safetensors")
    other = read_evidence(path)
    other.facts["weights"] = "0" * 64  # type: ignore[index]
    write_evidence(path, other)
    before = path.read_bytes(), Path("run/results.json").read_bytes()
    ended = add("natural", PGD, CW)
    assert ended.code == 2
    assert "is about other weights" in ended.err
    assert (path.read_bytes(), Path("run/results.json").read_bytes()) == before


# --- pages, loggers, clients ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("finished", "no_figures")
def test_a_page_that_is_there_is_drawn_again() -> None:
    assert calfat("report", "run").code == 0
    assert add("natural", PGD, CW).code == 0
    assert ">cw<" in Path("run/report.html").read_text().replace("\n", "").replace(" ", "")
    assert not Path("from_the_start/report.html").exists()


@pytest.mark.usefixtures("finished")
def test_clients_whose_models_are_gone_cannot_be_measured_and_nothing_is_lost() -> None:
    before = Path("run/results.json").read_bytes()
    ended = add("natural", PGD, "personalised")
    assert ended.code == 2
    assert "or for no evaluator that measures clients" in ended.err
    assert Path("run/results.json").read_bytes() == before


# --- what evaluators of plugins draw ----------------------------------------------------------------------------------


def test_what_an_evaluator_draws_does_not_depend_on_those_before_it() -> None:
    drawn: dict[str, list[list[float]]] = {"first": [], "second": []}
    for name, before in (("first", ["a"]), ("second", ["b", "a"])):
        evaluators = [(label, None) for label in before]
        seeded = SimpleNamespace(_seed=lambda round: 7)
        for label, _ in Measurements._each_with_the_same_generators(seeded, evaluators):  # type: ignore[arg-type]
            values = torch.rand(3).tolist()
            if label == "a":
                drawn[name].append(values)
    assert drawn["first"] == drawn["second"]
