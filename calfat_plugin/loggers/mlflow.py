"""MLflow: parameters, metrics of each round, and the exported model, in files unless a server is named."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import calfat_plugin
from calfat_plugin.disk import expanded
from calfat_plugin.entries import LoggerEntry
from calfat_plugin.errors import PluginError
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.loggers.base import final_scalars, public_recipe, public_recipe_text, round_scalars
from calfat_plugin.options import option
from calfat_plugin.recipe.document import flat

if TYPE_CHECKING:
    from calfat_plugin.results import RoundRecord, RunInfo, RunResult

FOLDER = "mlflow"
_DIRECTORY = "calfat.directory"  # the tag by which a resumed run finds its MLflow run
_MODEL_LEFT_OUT = "calfat.model_left_out"
_LONGEST_PARAMETER = 250  # letters, which every version of MLflow takes


@dataclass(frozen=True)
class MlflowOptions:
    """The options of the MLflow logger."""

    tracking_uri: str | None = option(
        None, help="where to write: a folder, or the address of an MLflow server; null: mlflow in the run directory"
    )
    experiment: str | None = option(None, help="experiment of the MLflow run; null: the recipe's name")
    model: bool = option(True, help="log the exported model when the run is finished, ready for `mlflow models serve`")


class Mlflow:
    """Logs through a client of its own, so that no global state of MLflow changes."""

    def __init__(self, options: MlflowOptions) -> None:
        import numpy as np

        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 writes files only where this is set
        try:
            # MLflow 1.19, the newest beside FedML, says np.object when imported, which numpy 1.24 removed.
            with mock.patch.dict(vars(np), {"object": object}):
                from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise PluginError(f"mlflow cannot be imported ({error}): pip install 'calfat-plugin[mlflow]'.") from error
        self._client_type = MlflowClient
        self._options = options
        self._client: Any = None
        self._run: RunInfo | None = None
        self._run_id = ""

    @hookimpl
    def calfat_run_started(self, run: RunInfo) -> None:
        self._run = run
        where = self._options.tracking_uri or str(run.directory / FOLDER)
        if "://" not in where:
            where = expanded(where).absolute().as_uri()
        self._client = self._client_type(tracking_uri=where)
        name = self._options.experiment or run.name
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        directory = hashlib.sha256(os.fspath(run.directory.resolve()).encode()).hexdigest()[:16]
        earlier = self._client.search_runs([experiment_id], f"tags.`{_DIRECTORY}` = '{directory}'")
        if earlier:  # the same directory is the same MLflow run, also after --resume
            self._run_id = earlier[0].info.run_id
            self._client.set_terminated(self._run_id, "RUNNING")
            return
        tags = {_DIRECTORY: directory, "mlflow.runName": f"{run.name}/{run.directory.name}"}
        self._run_id = self._client.create_run(experiment_id, tags=tags).info.run_id
        for key, value in flat(public_recipe(run.recipe)).items():
            self._client.log_param(self._run_id, _name(key), str(value)[:_LONGEST_PARAMETER])
        self._client.log_text(self._run_id, public_recipe_text(run.recipe), "recipe.yaml")

    @hookimpl
    def calfat_round_finished(self, record: RoundRecord) -> None:
        self._log(round_scalars(record), record.round)

    @hookimpl
    def calfat_run_finished(self, result: RunResult) -> None:
        assert self._run is not None  # calfat_run_started came first
        for evaluation in result.evaluations:
            self._log(final_scalars(evaluation), result.num_rounds)
        self._client.log_artifact(self._run_id, str(self._run.directory / "results.json"))
        if self._options.model:
            self._log_model(self._run.directory)
        self._client.set_terminated(self._run_id, "FINISHED")

    @hookimpl
    def calfat_run_stopped(self) -> None:
        if self._run_id:
            self._client.set_terminated(self._run_id, "FAILED")

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            self._client.log_metric(self._run_id, _name(name), number, step=step)

    def _log_model(self, directory: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            exported = calfat_plugin.export(directory, Path(scratch) / "model")
            if "model.onnx" in exported.left_out:
                self._client.set_tag(self._run_id, _MODEL_LEFT_OUT, exported.left_out["model.onnx"])
                return
            write_mlmodel(exported.folder)
            self._client.log_artifacts(self._run_id, str(exported.folder), "model")


def write_mlmodel(folder: Path) -> None:
    """Make an exported folder a model of MLflow's own kind `onnx`, which MLflow loads without this package.

    The description is written here, since MLflow 1.19 and 3 write it by different calls and read the same one.
    """
    import yaml

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    signature = {}
    for side in ("input", "output"):
        tensor = {"dtype": "float32", "shape": [-1, *config[side]["shape"][1:]]}
        signature[f"{side}s"] = json.dumps([{"type": "tensor", "tensor-spec": tensor}])
    python = platform.python_version()
    serving = {
        "loader_module": "mlflow.onnx",
        "data": "model.onnx",
        "python_version": python,
        "env": {"virtualenv": "python_env.yaml"},
    }
    network = {"data": "model.onnx", "onnx_version": version("onnx"), "providers": ["CPUExecutionProvider"]}
    mlmodel = {"flavors": {"onnx": network, "python_function": serving}, "signature": signature}
    environment = {"python": python, "build_dependencies": ["pip"], "dependencies": ["-r requirements.txt"]}
    packages = ["mlflow"]
    for package in ("onnx", "onnxruntime", "numpy"):
        packages.append(f"{package}=={version(package)}")
    (folder / "MLmodel").write_text(yaml.safe_dump(mlmodel, sort_keys=False), encoding="utf-8")
    (folder / "python_env.yaml").write_text(yaml.safe_dump(environment, sort_keys=False), encoding="utf-8")
    (folder / "requirements.txt").write_text("\n".join(packages) + "\n", encoding="utf-8")


def _name(text: str) -> str:
    """A name that MLflow takes. Its store has a file for each, so a slash would make one a folder."""
    return re.sub(r"[^\w.\- ]", "_", text.replace("/", "."))


ENTRY = LoggerEntry(
    "mlflow",
    build=Mlflow,
    config=MlflowOptions,
    summary="MLflow, in files of the run directory by default, with the exported model",
)
