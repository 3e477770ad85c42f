"""Run directories that no run has written, with weights in them."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from calfat_plugin.federation.server import Snapshot
from calfat_plugin.runs.checkpoints import save_checkpoint
from calfat_plugin.runs.directory import RunDirectory
from tests.recipes import assembled


def run_of(model: nn.Module, recipe: str, path: Path, round: int = 7, below: str = "") -> RunDirectory:
    """A run whose last checkpoint has the model's weights, each name with ``below`` before it."""
    experiment = assembled(recipe, name="mine.yaml")
    run = RunDirectory.create(experiment, path)
    run.write_recipe(experiment)
    state = {f"{below}{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    save_checkpoint(run.checkpoint("last"), Snapshot(round, state), {})
    return run
