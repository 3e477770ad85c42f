"""A run brought back from its directory: recipe, data and the model of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calfat_plugin.errors import ModelError, RunError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe.document import read_document
from calfat_plugin.registry import Registry
from calfat_plugin.report.reading import RECIPE

if TYPE_CHECKING:
    import torch
    from torch import nn

    from calfat_plugin.datasets import Dataset
    from calfat_plugin.federation.server import Snapshot

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Revived:
    """What a run was made of, and how far it came.

    Attributes:
        experiment: the recipe as run.
        dataset: read again.
        snapshot: the checkpoint.
        checkpoint: its name.
        device: where to compute.
    """

    experiment: Experiment
    dataset: Dataset
    snapshot: Snapshot
    checkpoint: str
    device: torch.device

    def model(self, experiment: Experiment | None = None) -> nn.Module:
        """The global model of the checkpoint, in evaluation mode on ``device``.

        Args:
            experiment: a variant whose trainer may adapt the architecture; None: the run's own.

        Raises:
            ModelError: the weights do not fit the variant's architecture.
        """
        variant = experiment or self.experiment
        model = variant.build_model(self.dataset, variant.build_trainer())
        state = self.snapshot.global_state
        own = model.state_dict()
        different = sorted({name for name in (*state, *own) if name not in state or name not in own})
        different += [name for name in own if name in state and own[name].shape != state[name].shape]
        if different:
            raise ModelError(
                f"{variant.trainer.label}: its model is not the one of checkpoint '{self.checkpoint}' "
                f"({different[0]} differs), so it cannot start from those weights. Leave this method out."
            )
        model.load_state_dict(dict(state))
        return model.to(self.device).eval()


@contextmanager
def revived(directory: Path, checkpoint: str, warn: Warn) -> Iterator[Revived]:
    """A run as it was, with the number of threads that its recipe asks for.

    Args:
        directory: the run directory.
        checkpoint: ``last``, ``best-natural`` or ``best-robust``.
        warn: shows the user a finding that stops nothing.

    Raises:
        CalfatError: there is no such run or checkpoint, or its data set is gone.
    """
    from calfat_plugin.runs.checkpoints import load_checkpoint
    from calfat_plugin.runs.compute import pick_device, using_threads
    from calfat_plugin.runs.directory import CHECKPOINTS, RunDirectory

    if not (directory / RECIPE).is_file():
        raise RunError(f"{directory}: there is no run in this directory (no {RECIPE}).")
    run = RunDirectory(directory)
    there = [name for name in CHECKPOINTS if run.checkpoint(name).exists()]
    if checkpoint not in there:
        raise RunError(
            f"{directory}: there is no checkpoint '{checkpoint}'. "
            + (f"There are: {', '.join(there)}." if there else "The run has not finished a round yet.")
        )
    experiment = assemble(read_document(directory / RECIPE), Registry.load())
    snapshot, _ = load_checkpoint(run.checkpoint(checkpoint))
    with using_threads(experiment):
        yield Revived(experiment, experiment.load_dataset(), snapshot, checkpoint, pick_device(experiment, warn))
