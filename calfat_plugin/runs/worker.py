"""A worker's process in a simulation over MPI. It writes nothing: the run directory is rank 0's."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from calfat_plugin.experiment import Experiment
from calfat_plugin.runs.compute import pick_device, using_threads
from calfat_plugin.runs.logs import log_to


def run_worker(experiment: Experiment, rank: int) -> None:
    """Train whichever clients rank 0 names, until it says that the run is over.

    Args:
        experiment: what to run.
        rank: of this process in the MPI job, 1 and up.

    Raises:
        CalfatError: with what to fix.
    """
    with ExitStack() as stack:
        stack.enter_context(log_to(Path(os.devnull)))  # what concerns a client is in its message to rank 0
        device = pick_device(experiment, lambda text: None)  # rank 0 warns
        stack.enter_context(using_threads(experiment))
        dataset = experiment.load_dataset()

        from calfat_plugin.federation.worker import shards_of
        from calfat_plugin.host.mpi_simulation import assist

        assist(experiment, dataset, shards_of(experiment, dataset, device), rank, device)
