"""A run's final evaluation: its state for a resume, and the findings in ``results.json``."""

from __future__ import annotations

import json

import pytest
import torch

import calfat_plugin as calfat
from calfat_plugin.analyses.attack import attack, planned
from calfat_plugin.evaluators.base import AttackEvaluator
from calfat_plugin.evaluators.subattacks import SubAttacks
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.server import Server, Snapshot
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.observer import Observer, RunObserver
from calfat_plugin.results import EvaluationResult, RunResult
from calfat_plugin.runs.checkpoints import save_checkpoint
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.writer import RunWriter
from tests.methods.helpers import Federation
from tests.recipes import assembled

RECIPE = """\
data_args: {dataset: digits}
model_args: {model: cnn_small}
train_args: {client_num_in_total: 2, comm_round: 1}
calfat:
  trainer: {name: calfat, preset: release}
  threat: {norm: linf, eps: 0.1, step_size: eps, steps: 1}
  evaluators:
    - natural
    - {name: pgd, steps: 2, max_examples: 40}
    - {name: autoattack, iterations: 2, queries: 5, max_examples: 40}
  evaluation: {batch_size: 16}
  monitor: {evaluators: [natural]}
"""


AUTOATTACK = ("iterations=2", "queries=5", "max_examples=40")


@pytest.fixture(autouse=True)
def quick(few_targets: int) -> None:
    """AutoAttack is no part of what is tested here."""


@pytest.fixture
def experiment() -> Experiment:
    return assembled(RECIPE)


def test_a_run_keeps_that_state_in_its_directory(tmp_path, monkeypatch, no_page):
    """The whole way: ``run``, killed in its last evaluator's second batch, and ``run`` again."""
    recipe, run_dir = tmp_path / "mine.yaml", tmp_path / "run"
    recipe.write_text(RECIPE)
    done: list[int] = []
    perturb = SubAttacks.perturb

    def killed(self, x, y):
        if done:
            raise KeyboardInterrupt
        done.append(len(x))
        return perturb(self, x, y)

    monkeypatch.setattr(SubAttacks, "perturb", killed)
    with pytest.raises(KeyboardInterrupt):
        calfat.run(recipe, run_dir=run_dir, progress=False)
    assert {path.suffix for path in (run_dir / "evaluation").iterdir()} == {".json", ".bin"}

    monkeypatch.setattr(SubAttacks, "perturb", lambda self, x, y: done.append(len(x)) or perturb(self, x, y))
    run = calfat.run(recipe, run_dir=run_dir, resume=True, progress=False)
    attacked = [row["attacked"] for row in run.results["autoattack"].details["sub_attacks"]]
    assert sum(done) == sum(attacked)  # nothing twice
    found = calfat.replay(run_dir)
    assert found.stands
    assert [number.label for number in found.numbers][-1] == "worst-case"


def test_findings_are_written_and_the_state_goes_once_the_results_are_there(experiment, cnn_small, tmp_path):
    server = Server(experiment, experiment.load_dataset(), torch.device("cpu"), RunObserver())
    run = RunDirectory.create(experiment, tmp_path / "run")
    evaluations = server.final_evaluation(run.evaluation)
    assert list(run.evaluation.iterdir())
    RunWriter(run, experiment).run_finished(RunResult(evaluations, 1, 1.0))
    assert not run.evaluation.exists()
    alarms = json.loads(run.results.read_text())["alarms"]
    assert ("not-published", ["autoattack"]) in [(alarm["code"], alarm["labels"]) for alarm in alarms]


def test_calfat_attack_repeats_the_numbers_of_the_run(experiment, cnn_small, tmp_path):
    snapshot = Snapshot(1, {name: tensor.detach() for name, tensor in cnn_small.state_dict().items()})
    server = Server(experiment, experiment.load_dataset(), torch.device("cpu"), RunObserver())
    server.begin(snapshot)
    run = RunDirectory.create(experiment, tmp_path / "run")
    run.write_recipe(experiment)
    save_checkpoint(run.last_checkpoint, snapshot, {})
    options = ("pgd.steps=2", "pgd.max_examples=40", *(f"autoattack.{key}" for key in AUTOATTACK))
    plan = planned(run.path, attacks=("natural", "pgd", "autoattack"), settings=options)
    outcome = attack(plan, [], Observer())
    found = [(result.label, result.settings, result.per_class) for result in outcome.results]
    assert found == [(result.label, result.settings, result.per_class) for result in server.final_evaluation()]


def test_the_worst_case_of_a_run_names_an_attack_that_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = AttackEvaluator.evaluate

    def idle_by_label(self: AttackEvaluator, task: EvaluationTask, label: str) -> EvaluationResult:
        if label == "idle":
            return EvaluationResult.without_number(label, "it wants more", settings={}, implementation="idle")
        return evaluate(self, task, label)

    monkeypatch.setattr(AttackEvaluator, "evaluate", idle_by_label)
    evaluators = "calfat.evaluators=[pgd2, {name: pgd, label: idle, steps: 1}]"
    federation = Federation(assembled(RECIPE, evaluators))
    results = federation.server._measurements.final(federation.server.state, None, None)
    assert results["worst-case"].details["not_run"] == {"idle": "it wants more"}
