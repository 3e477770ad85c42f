"""A run with evidence, and its export, made once for all tests here."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

import calfat_plugin
from calfat_plugin.analyses.exported import remember
from calfat_plugin.maths.tied import state_of
from calfat_plugin.tensor_files import digest_of
from tests.cli.runner import Ended, calfat

RECIPE = {
    "common_args": {"training_type": "simulation", "random_seed": 3},
    "data_args": {"dataset": "digits", "partition_method": "dirichlet", "partition_alpha": 0.5},
    "model_args": {"model": "cnn_small"},
    "train_args": {"client_num_in_total": 3, "comm_round": 2, "epochs": 1, "learning_rate": 0.3, "batch_size": 64},
    "calfat": {
        "name": "exported",
        "trainer": "calfat",
        "threat": {"norm": "linf", "eps": 0.1, "steps": 2},
        "evaluators": ["natural", "fgsm", "pgd20"],
        "monitor": {"evaluators": ["natural", "fgsm"]},
        "runtime": {"threads": 1},
    },
}

# Batch normalisation, and a part of the forward pass that is written by hand.
NETWORK = """\
import torch
from torch import nn


class SecretSauce(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.last = nn.LazyLinear(classes)

    def forward(self, x):
        hidden_trick = torch.cat([x, 1 - x], dim=1)
        return self.last(self.layers(hidden_trick))


def build(in_channels, image_size, num_classes):
    network = SecretSauce(2 * in_channels, num_classes)
    network(torch.zeros(2, in_channels, *image_size))
    return network
"""


def make_run(folder: Path) -> None:
    """A run of two rounds, with evidence and without a page, its export, and what the command said of that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calfat_plugin.report.write_run_report", lambda path: path / "report.html")
        calfat_plugin.run(RECIPE, run_dir=folder / "run", progress=False)
    (folder / "export.json").write_text(json.dumps(calfat("export", folder / "run")))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, traced_once: None) -> Path:
    """What :func:`make_run` makes, once for all workers of this session: the others wait for the first."""
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    folder = place / "exported"
    with (place / "exported.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "export.json").exists():
            make_run(folder)
    remember(folder / "run" / "export" / "model.pt2")  # another worker may have exported it
    return folder


@pytest.fixture(scope="session")
def finished(made: Path) -> Path:
    """The directory of the run, with its export in it. Tests leave it as it is."""
    return made / "run"


@pytest.fixture(scope="session")
def first_export(made: Path) -> Ended:
    """How ``calfat export`` of it ended; the folder is ``export`` in the run."""
    return Ended(*json.loads((made / "export.json").read_text()))


@pytest.fixture
def run(finished: Path, first_export: Ended, tmp_path: Path) -> Path:
    """A copy of the run, with its export in it."""
    assert first_export.code == 0, first_export
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="session", autouse=True)
def traced_once() -> Iterator[None]:
    """torch traces a network and translates it to ONNX once; what this package does with that is done at each export.

    Both take most of an export's time, and the same weights give the same.
    """
    trace, translate = torch.export.export, torch.onnx.export
    programs: dict[str, ExportedProgram] = {}
    translated: dict[int, Any] = {}

    def traced(model: nn.Module, *arguments: Any, **options: Any) -> ExportedProgram:
        weights = digest_of(state_of(model))
        if weights not in programs:
            programs[weights] = trace(model, *arguments, **options)
        return programs[weights]

    def in_onnx(program: ExportedProgram, **options: Any) -> Any:
        if id(program) not in translated:
            translated[id(program)] = translate(program, **options)
        return translated[id(program)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.export.export", traced)
        patch.setattr("torch.onnx.export", in_onnx)
        yield


@pytest.fixture(autouse=True)
def undrawn(no_figures: None) -> None:
    """The figures of the first export are drawn, and no others: they take most of an export's time."""
