"""The MLflow logger against a stand-in of MLflow, and what it saves for `mlflow models serve`.

MLflow itself brings half a hundred packages: ``tests/install/test_exported.py`` (slow) runs with it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import calfat_plugin
from calfat_plugin.errors import PluginError
from calfat_plugin.loggers import served_model
from calfat_plugin.loggers.mlflow import Mlflow, MlflowOptions
from calfat_plugin.results import RunInfo, RunResult
from tests.exporting.alone import WITHOUT_ALL_BUT_TORCH, alone
from tests.report.made import evaluation, record


class Client:
    """Keeps what MLflow's client is told, for all that are made in a test."""

    made: list[Client]
    experiments: dict[str, str]
    runs: dict[str, SimpleNamespace]

    def __init__(self, tracking_uri: str) -> None:
        self.tracking_uri = tracking_uri
        Client.made.append(self)

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        found = self.experiments.get(name)
        return None if found is None else SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def search_runs(self, experiments: list[str], text: str) -> list[SimpleNamespace]:
        return [run for run in self.runs.values() if run.tags["calfat.run"] in text]

    def create_run(self, experiment_id: str, tags: dict[str, str]) -> SimpleNamespace:
        name = f"run{len(self.runs)}"
        info = SimpleNamespace(run_id=name, experiment_id=experiment_id)
        self.runs[name] = SimpleNamespace(info=info, tags=tags, params={}, metrics=[], files=[], status="RUNNING")
        return self.runs[name]

    def log_param(self, run: str, key: str, value: str) -> None:
        assert key not in self.runs[run].params, "MLflow refuses another value"
        self.runs[run].params[key] = value

    def log_metric(self, run: str, key: str, value: float, step: int) -> None:
        self.runs[run].metrics.append((key, value, step))

    def log_text(self, run: str, text: str, file: str) -> None:
        self.runs[run].files.append((file, text))

    def log_artifact(self, run: str, path: str) -> None:
        assert Path(path).is_file()
        self.runs[run].files.append((Path(path).name, ""))

    def log_artifacts(self, run: str, path: str, to: str) -> None:
        self.runs[run].files += [(f"{to}/{file.relative_to(path)}", "") for file in Path(path).rglob("*")]

    def set_terminated(self, run: str, status: str) -> None:
        self.runs[run].status = status


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    """The stand-in, empty."""
    Client.made, Client.experiments, Client.runs = [], {}, {}
    package, tracking = ModuleType("mlflow"), ModuleType("mlflow.tracking")
    vars(tracking)["MlflowClient"] = Client
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", tracking)
    return Client


def info(directory: Path, start_round: int = 1) -> RunInfo:
    recipe = {
        "tracking_args": {"wandb_key": "hunter2"},
        "train_args": {"epochs": 1, "learning_rate": 0.1},
        "calfat": {"evaluators": [{"name": "pgd20"}] * 50},
    }
    return RunInfo("made", directory, recipe, num_rounds=4, start_round=start_round)


def test_it_is_told_parameters_metrics_of_each_round_and_the_end(tmp_path: Path, mlflow: type[Client]) -> None:
    (tmp_path / "results.json").write_text("{}")
    logger = Mlflow(MlflowOptions(model=False))
    logger.calfat_run_started(info(tmp_path))
    (client,), (run,) = mlflow.made, mlflow.runs.values()
    assert client.tracking_uri == (tmp_path / "mlflow").as_uri()
    assert mlflow.experiments == {"made": "0"}
    assert run.params["train_args.epochs"] == "1"
    assert run.params["train_args.learning_rate"] == "0.1"
    assert max(map(len, run.params.values())) == 250
    assert "hunter2" not in repr(vars(run))
    assert run.files[0][0] == "recipe.yaml"
    for number in (1, 2):
        logger.calfat_round_finished(record(number, {"natural": number / 10}))
    logger.calfat_run_finished(RunResult((evaluation("natural", 0.75),), 2, 1.0))
    rounds = [(value, step) for key, value, step in run.metrics if key == "accuracy.natural"]
    assert rounds == [(0.1, 1), (0.2, 2)]
    assert ("final.natural", 0.75, 2) in run.metrics
    names = {key for key, _, _ in run.metrics}
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.- ") for name in names)
    assert run.files[-1][0] == "results.json"
    assert run.status == "FINISHED"


def test_a_resumed_directory_is_the_same_run_of_mlflow(tmp_path: Path, mlflow: type[Client]) -> None:
    for directory, start_round in ((tmp_path / "a", 1), (tmp_path / "a", 2), (tmp_path / "b", 1)):
        logger = Mlflow(MlflowOptions(tracking_uri=str(tmp_path / "store"), experiment="ours"))
        logger.calfat_run_started(info(directory, start_round))
        logger.calfat_run_stopped()
    assert {client.tracking_uri for client in mlflow.made} == {(tmp_path / "store").as_uri()}
    assert mlflow.experiments == {"ours": "0"}
    assert [run.status for run in mlflow.runs.values()] == ["FAILED", "FAILED"]


def test_nothing_leaves_the_machine_unasked(
    tmp_path: Path, mlflow: type[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker.example")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    Mlflow(MlflowOptions()).calfat_run_started(info(tmp_path))
    assert mlflow.made[0].tracking_uri.startswith("file://")
    assert __import__("os").environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    Mlflow(MlflowOptions(tracking_uri="http://ours.example")).calfat_run_started(info(tmp_path))
    assert mlflow.made[1].tracking_uri == "http://ours.example"


@pytest.mark.parametrize("code", ["code_path", "code_paths"], ids=["MLflow 1", "MLflow 3"])
def test_the_exported_model_is_saved_with_what_loads_it(
    run: Path, mlflow: type[Client], monkeypatch: pytest.MonkeyPatch, code: str, tmp_path: Path
) -> None:
    saved: dict[str, Any] = {}

    def save(path: str, loader_module: str, data_path: str, **options: Any) -> None:
        Path(path).mkdir()
        (Path(path) / "MLmodel").write_text(loader_module)
        saved.update(options, names=sorted(file.name for file in Path(data_path).iterdir()))
        saved["code"] = Path(saved[code][0]).read_text()

    def save_model(path: str, **options: Any) -> None:
        save(path, **options)

    parameters = f"path, loader_module, data_path, signature, pip_requirements, {code}"
    namespace: dict[str, Any] = {"save_model": save_model}
    exec(f"def asked({parameters}): save_model(**locals())", namespace)
    modules = {
        "mlflow.pyfunc": {"save_model": namespace["asked"]},
        "mlflow.models.signature": {"ModelSignature": lambda inputs, outputs: (inputs, outputs)},
        "mlflow.types.schema": {"Schema": list, "TensorSpec": lambda dtype, shape: (str(dtype), shape)},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["mlflow"].pyfunc = sys.modules["mlflow.pyfunc"]  # type: ignore[attr-defined]
    logger = Mlflow(MlflowOptions(tracking_uri=str(tmp_path / "store")))
    logger.calfat_run_started(info(run))
    logger.calfat_run_finished(RunResult((), 2, 1.0))
    (told,) = mlflow.runs.values()
    assert ("model/MLmodel", "") in told.files
    assert {"README.md", "config.json", "model.pt2", "provenance.json"} <= {*saved["names"]}
    assert saved["signature"] == ([("float32", (-1, 1, 8, 8))], [("float32", (-1, 10))])
    assert saved["code"] == Path(served_model.__file__).read_text()


def test_what_mlflow_serves_answers_as_the_model_and_needs_torch_alone(run: Path, tmp_path: Path) -> None:
    x = calfat_plugin.load_dataset("digits").test.x[:20].float()
    served = served_model._load_pyfunc(str(run / "export"))
    with torch.no_grad():
        own = calfat_plugin.load_model(run)(x).numpy()
    assert np.abs(served.predict(x.numpy()) - own).max() < 1e-4
    assert np.abs(served.predict(x.tolist()) - own).max() < 1e-4
    (tmp_path / "served_model.py").write_text(Path(served_model.__file__).read_text())
    program = f"import served_model; print(served_model._load_pyfunc({str(run / 'export')!r}).predict({ONE}).shape)"
    done = alone(f"import sys; sys.path.insert(0, '')\n{program}", WITHOUT_ALL_BUT_TORCH, tmp_path)
    assert (done.code, done.out) == (0, "(1, 10)\n")


ONE = [[[[0.0] * 8] * 8]]


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is not None, reason="MLflow is installed")
def test_it_says_how_to_install_mlflow() -> None:
    said = r"mlflow cannot be imported .*Python 3.12.*pip install 'calfat-plugin\[mlflow\]'"
    with pytest.raises(PluginError, match=said):
        Mlflow(MlflowOptions())
