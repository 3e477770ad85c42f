"""MLflow: parameters, metrics of each round, and the model at the end, in files; nothing leaves the machine unasked."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import calfat_plugin
from calfat_plugin.disk import expanded
from calfat_plugin.entries import LoggerEntry
from calfat_plugin.errors import PluginError
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.loggers.base import final_scalars, public_recipe, public_recipe_text, round_scalars
from calfat_plugin.options import option
from calfat_plugin.peer_text import error_text

if TYPE_CHECKING:
    from calfat_plugin.results import RoundRecord, RunInfo, RunResult

FOLDER = "mlflow"
_LOADER = "served_model"  # the module that loads the model where it is served
_IDENTITY = "calfat.run"  # the tag by which a resumed run finds its MLflow run
_LONGEST_VALUE = 250  # letters of a parameter


@dataclass(frozen=True)
class MlflowOptions:
    """The options of the MLflow logger."""

    tracking_uri: str | None = option(
        None, help="where to write: a folder, or an address of an MLflow server; null: the folder mlflow of the run"
    )
    experiment: str | None = option(None, help="experiment of the MLflow run; null: the recipe's name")
    model: bool = option(True, help="whether the exported model is logged when the run is finished")


class Mlflow:
    """Logs to an MLflow run through a client of its own, so that no global state of MLflow changes."""

    def __init__(self, options: MlflowOptions) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions prefer a data base
        try:
            from mlflow.tracking import MlflowClient
        except Exception as error:  # an old one beside a new numpy raises AttributeError
            raise PluginError(
                f"mlflow cannot be imported ({error_text(error)}). It needs Python 3.12 or later, where a run takes "
                "--host flower: pip install 'calfat-plugin[mlflow]'."
            ) from error
        self._client_type = MlflowClient
        self._options = options
        self._client: Any = None
        self._run_id = ""
        self._run: RunInfo | None = None

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
        identity = hashlib.sha256(os.fspath(run.directory.resolve()).encode()).hexdigest()[:16]
        earlier = self._client.search_runs([experiment_id], f"tags.`{_IDENTITY}` = '{identity}'")
        if earlier:  # the same directory is the same MLflow run, also after --resume
            self._run_id = earlier[0].info.run_id
            self._client.set_terminated(self._run_id, "RUNNING")
            return
        tags = {_IDENTITY: identity, "mlflow.runName": f"{run.name}/{run.directory.name}"}
        self._run_id = self._client.create_run(experiment_id, tags=tags).info.run_id
        for key, value in _flat(public_recipe(run.recipe)):
            self._client.log_param(self._run_id, _name(key), str(value)[:_LONGEST_VALUE])
        self._client.log_text(self._run_id, public_recipe_text(run.recipe), "recipe.yaml")

    @hookimpl
    def calfat_round_finished(self, record: RoundRecord) -> None:
        self._log(round_scalars(record), record.round)

    @hookimpl
    def calfat_run_finished(self, result: RunResult) -> None:
        assert self._run is not None  # run_started came first
        for evaluation in result.evaluations:
            self._log(final_scalars(evaluation), result.num_rounds)
        self._client.log_artifact(self._run_id, str(self._run.directory / "results.json"))
        if self._options.model:
            with tempfile.TemporaryDirectory() as folder:
                # As any plugin would: from the package's public face, which knows how a run is read.
                exported = calfat_plugin.export(self._run.directory, Path(folder) / "export")
                if "model.pt2" in exported.files:
                    _save_model(Path(folder) / "model", exported.folder)
                    self._client.log_artifacts(self._run_id, str(Path(folder) / "model"), "model")
        self._client.set_terminated(self._run_id, "FINISHED")

    @hookimpl
    def calfat_run_stopped(self) -> None:
        if self._run_id:
            self._client.set_terminated(self._run_id, "FAILED")

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            self._client.log_metric(self._run_id, _name(name), number, step=step)


def _name(text: str) -> str:
    """A name that MLflow takes; its file store has a file for each, so none may be a folder of another."""
    return re.sub(r"[^\w.\- ]", "_", text.replace("/", "."))


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each parameter."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _save_model(folder: Path, exported: Path) -> None:
    """Save an exported model in MLflow's own format, with what loads it: it needs torch, and not this package."""
    import json

    import numpy as np
    import torch
    from mlflow import pyfunc
    from mlflow.models.signature import ModelSignature
    from mlflow.types.schema import Schema, TensorSpec

    config = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    shape = (-1, *config["input"]["shape"][1:])
    float32 = np.dtype("float32")
    signature = ModelSignature(
        inputs=Schema([TensorSpec(float32, shape)]),
        outputs=Schema([TensorSpec(float32, (-1, config["num_classes"]))]),
    )
    loader = exported.parent / f"{_LOADER}.py"
    shutil.copy(Path(__file__).with_name(f"{_LOADER}.py"), loader)
    names = inspect.signature(pyfunc.save_model).parameters
    code = "code_paths" if "code_paths" in names else "code_path"  # as version 1 calls it
    pyfunc.save_model(
        path=str(folder),
        loader_module=_LOADER,
        data_path=str(exported),
        signature=signature,
        pip_requirements=["mlflow", f"torch=={torch.__version__.partition('+')[0]}", f"numpy=={np.__version__}"],
        **{code: [str(loader)]},
    )


ENTRY = LoggerEntry(
    "mlflow",
    build=Mlflow,
    config=MlflowOptions,
    summary="MLflow, in files of the run directory by default, with the exported model",
)
