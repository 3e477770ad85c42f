"""A run with evidence, and its export, made once for all tests here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import calfat_plugin
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


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two rounds, with evidence and without a page."""
    folder = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calfat_plugin.report.write_run_report", lambda path: path / "report.html")
        return calfat_plugin.run(RECIPE, run_dir=folder / "run", progress=False).directory


@pytest.fixture(scope="session")
def first_export(finished: Path) -> Ended:
    """How ``calfat export`` of it ended; the folder is ``export`` in the run."""
    return calfat("export", finished)


@pytest.fixture
def run(finished: Path, first_export: Ended, tmp_path: Path) -> Path:
    """A copy of the run, with its export in it."""
    assert first_export.code == 0, first_export
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def undrawn(no_figures: None) -> None:
    """The figures of the first export are drawn, and no others: they take most of an export's time."""
