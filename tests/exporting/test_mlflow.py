"""The MLflow logger with the real MLflow, which writes files. In ``tests/install`` MLflow serves what it logged."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import calfat_plugin
from calfat_plugin.errors import PluginError
from calfat_plugin.loggers.mlflow import Mlflow, MlflowOptions
from calfat_plugin.results import RunInfo, RunResult
from tests.report.made import evaluation, record

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of code that protobuf 3 generated for 1.19
needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow-skinny is not installed")


def info(directory: Path, start_round: int = 1) -> RunInfo:
    recipe = {
        "tracking_args": {"wandb_key": "hunter2"},
        "train_args": {"epochs": 1, "learning_rate": 0.1},
        "calfat": {"threat": {"eps": "8/255"}, "evaluators": [{"name": "pgd20"}] * 50},
    }
    return RunInfo("made", directory, recipe, num_rounds=4, start_round=start_round)


def stored_runs(store: Path) -> list[Path]:
    """The folders of MLflow's runs, as its UI reads them."""
    return sorted(path.parent for path in store.glob("*/*/meta.yaml"))


def status(folder: Path) -> Any:
    """RUNNING 1, FINISHED 3, FAILED 4."""
    return yaml.safe_load((folder / "meta.yaml").read_text())["status"]


def metric(folder: Path, name: str) -> list[tuple[float, int]]:
    """(value, step) of each entry."""
    rows = [line.split() for line in (folder / "metrics" / name).read_text().splitlines()]
    return [(float(value), int(step)) for _, value, step in rows]


@needs_mlflow
def test_the_store_has_parameters_metrics_of_each_round_and_the_end(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    logger = Mlflow(MlflowOptions(model=False))
    logger.calfat_run_started(info(tmp_path))
    (folder,) = stored_runs(tmp_path / "mlflow")
    assert status(folder) == 1
    params = {path.name: path.read_text() for path in (folder / "params").iterdir()}
    assert params["train_args.epochs"] == "1"
    assert params["train_args.learning_rate"] == "0.1"
    assert params["calfat.threat.eps"] == "8/255"
    assert len(params["calfat.evaluators"]) == 250
    for number in (1, 2):
        logger.calfat_round_finished(record(number, {"natural": number / 10}))
    logger.calfat_run_finished(RunResult((evaluation("natural", 0.75),), 2, 1.0))
    assert metric(folder, "accuracy.natural") == [(0.1, 1), (0.2, 2)]
    assert metric(folder, "loss.mean") == [(1.5, 1), (1.0, 2)]
    assert metric(folder, "final.natural") == [(0.75, 2)]
    assert status(folder) == 3
    assert sorted(path.name for path in (folder / "artifacts").iterdir()) == ["recipe.yaml", "results.json"]
    for path in (tmp_path / "mlflow").rglob("*"):
        assert path.is_dir() or "hunter2" not in path.read_text()


@needs_mlflow
def test_a_resumed_directory_is_the_same_run_of_mlflow(tmp_path: Path) -> None:
    for directory, start_round in ((tmp_path / "a", 1), (tmp_path / "a", 3), (tmp_path / "b", 1)):
        logger = Mlflow(MlflowOptions(tracking_uri=str(tmp_path / "store"), experiment="ours"))
        logger.calfat_run_started(info(directory, start_round))
        logger.calfat_round_finished(record(start_round, {"natural": 0.5}))
        logger.calfat_run_stopped()
    folders = stored_runs(tmp_path / "store")
    assert [status(folder) for folder in folders] == [4, 4]
    rounds = sorted([step for _, step in metric(folder, "accuracy.natural")] for folder in folders)
    assert rounds == [[1], [1, 3]]
    names = {yaml.safe_load(path.read_text())["name"] for path in (tmp_path / "store").glob("*/meta.yaml")}
    assert names == {"Default", "ours"}


@needs_mlflow
def test_nothing_leaves_the_machine_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    Mlflow(MlflowOptions()).calfat_run_started(info(tmp_path))
    assert len(stored_runs(tmp_path / "mlflow")) == 1
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert "object" not in vars(np), "numpy is left as it is"


@needs_mlflow
def test_the_exported_model_is_one_of_mlflow(run: Path, tmp_path: Path, traced_once: None) -> None:
    logger = Mlflow(MlflowOptions(tracking_uri=str(tmp_path / "store")))
    logger.calfat_run_started(info(run))
    logger.calfat_run_finished(RunResult((), 2, 1.0))
    (folder,) = stored_runs(tmp_path / "store")
    model = folder / "artifacts" / "model"
    assert {"README.md", "config.json", "model.onnx", "provenance.json"} <= {path.name for path in model.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(np), "object", object)  # MLflow 1.19 wants it
        from mlflow import pyfunc

        loaded = pyfunc.load_model(str(model))
        signature = loaded.metadata.get_input_schema()
        x = calfat_plugin.load_dataset("digits").test.x[:20].float()
        logits = loaded.predict(x.numpy())["logits"]
    assert json.loads(signature.to_json())[0]["tensor-spec"] == {"dtype": "float32", "shape": [-1, 1, 8, 8]}
    with torch.no_grad():
        own = calfat_plugin.load_model(run)(x).numpy()
    assert np.abs(logits - own).max() < 1e-4
    assert (model / "requirements.txt").read_text().splitlines()[0] == "mlflow"


@needs_mlflow
def test_without_onnx_the_model_is_left_out_and_the_run_says_why(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calfat_plugin.model_files.missing_for_onnx", lambda: "not installed: onnx")
    logger = Mlflow(MlflowOptions(tracking_uri=str(tmp_path / "store")))
    logger.calfat_run_started(info(run))
    logger.calfat_run_finished(RunResult((), 2, 1.0))
    (folder,) = stored_runs(tmp_path / "store")
    assert (folder / "tags" / "calfat.model_left_out").read_text() == "not installed: onnx"
    assert not (folder / "artifacts" / "model").exists()
    assert status(folder) == 3


def test_it_says_how_to_install_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(PluginError, match=r"mlflow cannot be imported .* pip install 'calfat-plugin\[mlflow\]'"):
        Mlflow(MlflowOptions())
