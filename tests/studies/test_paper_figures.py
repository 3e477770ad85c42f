"""The figures of the paper that need a trained model: each command on a tiny run."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import calfat_plugin as calfat
from studies.paper import classes, features

TINY = {
    "train_args.comm_round": 1,
    "train_args.client_num_in_total": 2,
    "train_args.client_num_per_round": 1,
    "train_args.lr_schedule": "cosine",
    "data_args.max_train_examples": 120,
    "data_args.max_test_examples": 60,
    "calfat.threat.steps": 2,
    "calfat.threat.step_size": "eps/2",
    "train_args.batch_size": 16,
    "calfat.evaluators": ["natural"],
}


@dataclass(frozen=True)
class Found:
    """A result whose accuracies are names."""

    per_class: tuple[str, ...]
    details: Mapping[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one round on digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calfat_plugin.report.write_run_report", lambda path: path)
        folder = tmp_path_factory.mktemp("tiny") / "run"
        return calfat.run("calfat_digits", set=TINY, run_dir=folder, progress=False).directory


@pytest.mark.usefixtures("no_page")
def test_clients_class_by_class(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a client that the run left out."""
    classes.main([str(finished), "--out", str(tmp_path)])
    with (tmp_path / "classes.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {(row["method"], row["client"], row["evaluator"]) for row in rows} == {
        (method, client, evaluator)
        for method in ("calfat", "fedgairat")
        for client in "01"
        for evaluator in ("natural", "pgd20")
    }
    assert len(rows) == 2 * 2 * 2 * 10
    assert capsys.readouterr().out.count("| 1 | fedgairat | ") == 2
    assert len([*tmp_path.glob("classes_*.pdf")]) == 2


def test_one_local_epoch_of_a_method_from_the_model_of_the_run(finished: Path) -> None:
    recipe = calfat.load_run(finished).recipe
    changed = classes.one_epoch(recipe, finished, classes.FEDGAIRAT)
    train = changed["train_args"]
    assert (train["comm_round"], train["epochs"], train["local_steps"]) == (1, 1, None)
    assert train["lr_schedule"] == "constant"  # the run's has ended at 0
    assert train["client_num_per_round"] == 2
    assert train["learning_rate"] == recipe["train_args"]["learning_rate"]
    assert (changed["calfat"]["trainer"]["start_round"], changed["calfat"]["aggregator"]) == (1, "fedavg")
    assert "clients" not in changed["calfat"]
    own, trained = calfat.load_model(finished).state_dict(), classes.trained(run=str(finished)).state_dict()
    assert all(torch.equal(own[name], trained[name]) for name in own)


def test_a_client_is_measured_by_what_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the average; and with the run's budget and seed."""

    def evaluate(model: str, data: str, evaluators: Sequence[str], **how: object) -> dict[str, Found]:
        assert (data, how) == ("test", {"eps": 0.1, "norm": "l2", "step_size": 0.02, "seed": 3})
        return {name: Found((model,)) for name in evaluators}

    monkeypatch.setattr(classes.calfat, "evaluate", evaluate)
    monkeypatch.setattr(classes.AttackEvaluator, "evaluate", lambda self, task, label: Found(()))
    task = SimpleNamespace(
        model="average",
        data="test",
        seed=3,
        threat=SimpleNamespace(eps=0.1, norm="l2", step_size=0.02),
        clients=lambda: SimpleNamespace(ids=(0, 2), model=lambda client: f"of {client}"),
    )
    found = classes.EachClient(None).evaluate(task, "each-client").details["clients"]
    assert found == {client: dict.fromkeys(classes.EVALUATORS, (f"of {client}",)) for client in (0, 2)}


def test_means_leave_out_classes_without_images() -> None:
    found = {"calfat": {0: {"natural": [0.5, None, 0.25]}, 1: {"natural": [1.0, None, 0.75]}}}
    bars = classes.over_clients(found["calfat"], "natural")
    assert (bars[0], bars[2], np.isnan(bars[1])) == (0.75, 0.5, True)
    head, _, first, second = classes.table(found, "natural").splitlines()
    assert (head, first) == ("| client | method | 0 | 1 | 2 | mean |", "| 0 | calfat | 50.0 | - | 25.0 | 37.50 |")
    assert second.endswith("| 87.50 |")


def test_a_t_sne_of_two_runs(finished: Path, tmp_path: Path) -> None:
    features.main([str(finished), str(finished), "--out", str(tmp_path / "new" / "features.svg")])
    drawn = (tmp_path / "new" / "features.svg").read_text(encoding="utf-8")
    assert drawn.count("<!-- calfat, ") == 2


def test_as_many_images_of_each_class_as_can_be() -> None:
    labels = torch.tensor([0] * 50 + [1] * 20 + [3] * 5)
    chosen = features.balanced(labels, 2000)
    assert labels[chosen].bincount().tolist() == [5, 5, 0, 5]
    assert torch.equal(features.balanced(labels, 2000), chosen)
    assert labels[features.balanced(labels, 9)].bincount().tolist() == [3, 3, 0, 3]


def test_features_are_what_the_last_layer_sees() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
    x = torch.rand(7, 1, 8, 8)
    with torch.no_grad():
        np.testing.assert_allclose(features.features(model, x), model[:3](x).numpy(), rtol=1e-6)
