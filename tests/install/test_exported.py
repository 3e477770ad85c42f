"""An exported model where this package is not: PyTorch alone, onnxruntime alone, and MLflow. Downloads them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import calfat_plugin
from calfat_plugin.loggers.mlflow import write_mlmodel
from tests.cli.runner import ROOT
from tests.exporting.conftest import RECIPE
from tests.exporting.loopback import ask, serving
from tests.exporting.test_export import WITH_ONNXRUNTIME, WITH_TORCH
from tests.install.environments import Downloaded, interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calfat_plugin.report.write_run_report", lambda path: path / "report.html")
        return calfat_plugin.run(RECIPE, run_dir=tmp_path_factory.mktemp("run") / "run", progress=False).directory


@pytest.mark.parametrize(
    ("packages", "program", "absent"),
    [
        (("torch", "numpy"), WITH_TORCH, ("onnx", "onnxruntime")),
        (("onnxruntime", "numpy"), WITH_ONNXRUNTIME, ("onnx", "torch")),
    ],
    ids=["torch", "onnxruntime"],
)
def test_it_answers_alike_where_nothing_else_is_installed(
    finished: Path, tmp_path: Path, packages: tuple[str, ...], program: str, absent: tuple[str, ...]
) -> None:
    folder = calfat_plugin.export(finished, tmp_path / "export").folder
    environment = Downloaded(tmp_path, interpreter("3.11") or "3.11")
    environment.install("-c", str(ROOT / "constraints.txt"), *packages)
    for module in (*absent, "calfat_plugin", "fedml", "safetensors"):
        assert environment.call("python", "-c", f"import {module}").code == 1
    pixels = calfat_plugin.load_dataset("digits").test.x.float()
    np.save(folder / "pixels.npy", pixels.numpy())
    done = environment.call("python", "-c", f"import os; os.chdir({str(folder)!r})\n{program}")
    assert done.code == 0, done
    with torch.no_grad():
        own = calfat_plugin.load_model(finished)(pixels).numpy()
    assert np.abs(np.load(folder / "logits.npy") - own).max() < 1e-4


def test_mlflow_serves_what_the_logger_writes(finished: Path, tmp_path: Path) -> None:
    """MLflow has an environment of its own, without PyTorch and without this package."""
    folder = calfat_plugin.export(finished, tmp_path / "model").folder
    write_mlmodel(folder)
    environment = Downloaded(tmp_path, interpreter("3.12") or "3.12")
    environment.install("mlflow", "onnx", "onnxruntime")
    pixels = calfat_plugin.load_dataset("digits").test.x[:50].float()
    with torch.no_grad():
        own = calfat_plugin.load_model(finished)(pixels).numpy()
    command = [str(environment.bin / "mlflow"), "models", "serve", "-m", str(folder)]
    path = os.pathsep.join((str(environment.bin), os.environ["PATH"]))
    with serving([*command, "--port", "PORT", "--env-manager", "local"], tmp_path, PATH=path) as service:
        status, answer = ask(f"{service}/invocations", json.dumps({"inputs": pixels.tolist()}).encode())
        assert status == 200
        assert np.abs(np.array(answer["predictions"]["logits"], dtype=np.float32) - own).max() < 1e-4
        status, _ = ask(f"{service}/invocations", b'{"inputs": [[0.5, 0.5]]}')
        assert status == 400
