"""An exported model where this package is not: PyTorch alone, onnxruntime alone, and MLflow. Downloads them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

import calfat_plugin
from tests.cli.runner import ROOT
from tests.exporting.conftest import RECIPE
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


LOGGED = """
import sys
from pathlib import Path
import calfat_plugin
from calfat_plugin.loggers.mlflow import Mlflow, MlflowOptions
from calfat_plugin.results import RoundRecord, RunInfo, RunResult

run = Path(sys.argv[1])
logger = Mlflow(MlflowOptions())
logger.calfat_run_started(RunInfo("made", run, {"train_args": {"epochs": 1}}, num_rounds=2, start_round=1))
natural = next(iter(calfat_plugin.load_run(run).results.values()))
for number in (1, 2):
    record = RoundRecord(number, (0,), {}, {0: 1.0}, {0: 1.0}, 0.0, {"natural": natural}, 1.0, 1, 1)
    logger.calfat_round_finished(record)
logger.calfat_run_finished(RunResult((natural,), 2, 1.0))
"""


def test_mlflow_has_the_rounds_and_serves_the_model(finished: Path, dist: Path, tmp_path: Path) -> None:
    """Where MLflow can be imported there is no FedML, so the run is made here, and its logger is called there."""
    python = interpreter("3.12")
    if python is None:
        pytest.skip("no Python 3.12 on this machine")
    environment = Downloaded(tmp_path, python)
    environment.install("-c", str(ROOT / "constraints.txt"), f"{next(dist.glob('*.whl'))}[mlflow]")
    directory = finished
    done = environment.call("python", "-c", LOGGED, str(directory))
    assert done.code == 0, done
    metrics = next((directory / "mlflow").glob("*/*/metrics"))
    rounds = (metrics / "accuracy.natural").read_text().splitlines()
    natural = calfat_plugin.load_run(directory).results["natural"].accuracy
    assert [float(line.split()[1]) for line in rounds] == [natural, natural]
    assert [int(line.split()[2]) for line in rounds] == [1, 2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = metrics.parent / "artifacts" / "model"
    serve = ["mlflow", "models", "serve", "-m", str(model), "-p", str(port), "--env-manager", "local"]
    path = f"{environment.bin}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(serve, env={**os.environ, "PATH": path}, start_new_session=True)
    try:
        pixels = calfat_plugin.load_dataset("digits").test.x[:10].float()
        body = json.dumps({"inputs": pixels.tolist()}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/invocations", body, {"Content-Type": "application/json"}
        )
        for _ in range(600):
            try:
                answer = json.load(urllib.request.urlopen(request))
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.5)
        logits = np.array(answer["predictions"] if isinstance(answer, dict) else answer)
        with torch.no_grad():
            own = calfat_plugin.load_model(directory)(pixels).numpy()
        assert np.abs(logits - own).max() < 1e-4
    finally:
        os.killpg(process.pid, 15)
        process.wait()
