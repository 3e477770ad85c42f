"""A client's process in a cross-silo run: its directory, its data, and the way back in after a stop.

::

    runs/<recipe>/rank-<k>/<seed>-<time>/
        recipe.yaml       as run
        environment.json  versions, device, threads, commit
        checkpoints/      round-<n>: what this client keeps between rounds; it never leaves this machine
        finished.json     the run is over
        log.txt           the log of the host and of ours
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from calfat_plugin.errors import RunError
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.host.runtimes import CrossSilo, runtime_of
from calfat_plugin.interfaces import State
from calfat_plugin.observer import RunObserver
from calfat_plugin.recipe.silo import SILO
from calfat_plugin.runs.checkpoints import load_checkpoint, save_checkpoint
from calfat_plugin.runs.compute import pick_device, using_threads
from calfat_plugin.runs.directory import DEFAULT_ROOT, RunDirectory
from calfat_plugin.runs.environment import describe_environment
from calfat_plugin.runs.logs import log_to
from calfat_plugin.runs.request import Request

if TYPE_CHECKING:
    from calfat_plugin.datasets import Dataset, ImageData

log = logging.getLogger(__name__)


class PartyDirectory(RunDirectory):
    """A client's run directory."""

    without_resume = "Start without --resume: the server sends this client the current round."
    results = property(lambda self: self.path / "finished.json", doc="Says that the run is over.")

    def states(self) -> Path:
        """Folder of what the client keeps, a file a round."""
        return self.path / "checkpoints"


def open_party_directory(request: Request, rank: int) -> PartyDirectory:
    """The client's directory: a new one, or the one to resume.

    Raises:
        RunError: see ``RunDirectory``; or the rank is none of the recipe's.
    """
    experiment = request.experiment
    check_rank(experiment, rank)
    parent = DEFAULT_ROOT / experiment.recipe.name / f"rank-{rank}"
    return PartyDirectory.open(request, parent)


def check_rank(experiment: Experiment, rank: int) -> None:
    """Refuse a rank that the recipe has no client for.

    Raises:
        RunError: with the ranks there are.
    """
    if not 1 <= rank <= experiment.num_clients:
        raise RunError(
            f"--rank {rank}: the clients of this recipe have ranks 1 to {experiment.num_clients} "
            "(train_args.client_num_in_total); rank 0 is the server's."
        )


def run_client(
    request: Request, rank: int, directory: PartyDirectory, observer: RunObserver, say: Callable[[str], None]
) -> None:
    """Be one client until the server says that the run is over.

    Args:
        request: what to run.
        rank: 1 to the number of clients.
        directory: from :func:`open_party_directory`.
        observer: is informed of training progress.
        say: shows the user a line.

    Raises:
        CalfatError: with what to fix.
    """
    experiment, runtime = request.experiment, runtime_of(request.experiment)
    if not isinstance(runtime, CrossSilo):
        raise TypeError(f"a {type(runtime).__name__} has no clients with a process of their own")
    with ExitStack() as stack:
        stack.enter_context(directory.locked())
        stack.enter_context(log_to(directory.log))
        device = pick_device(experiment, lambda text: say(f"warning: {text}"))
        stack.enter_context(using_threads(experiment))
        dataset = experiment.load_own_dataset(rank)
        data = _own_data(experiment, dataset, rank - 1).to(device)
        directory.write_json(directory.environment, describe_environment(device, experiment.registry, request.command))

        from calfat_plugin.host.silo.run import ClientStates

        kept = _States(directory.states(), rank - 1)
        say(f"client {rank - 1} of {experiment.recipe.name}: {len(data)} examples, waiting for the server")
        rounds = experiment.num_rounds
        runtime.work(
            dataset,
            data,
            rank,
            device,
            observer=observer,
            states=ClientStates(kept.load, kept.save),
            on_round=lambda round, what: say(f"round {round}/{rounds}  {what}"),
        )
    directory.write_json(directory.results, {"recipe": experiment.recipe.name, "seed": experiment.seed, "rank": rank})
    say("the run is over")


def _own_data(experiment: Experiment, dataset: Dataset, client: int) -> ImageData:
    if experiment.partition.entry.name == SILO:
        return dataset.train
    return dataset.train.subset(experiment.split(dataset.train.y.numpy())[client])


class _States:
    """Client states on disk, a checkpoint a round."""

    def __init__(self, folder: Path, client: int) -> None:
        self._folder, self._client = folder, client

    def load(self, round: int) -> State | None:
        path = self._path(round)
        if not path.exists():
            return None
        return load_checkpoint(path)[0].client_states.get(self._client, {})

    def save(self, round: int, state: State, keep: set[int]) -> None:
        save_checkpoint(self._path(round), Snapshot(round, {}, client_states={self._client: state}), {})
        kept = {self._path(number) for number in keep}
        for path in self._folder.glob("round-*.safetensors"):
            if path not in kept:
                path.unlink()

    def _path(self, round: int) -> Path:
        return self._folder / f"round-{round}.safetensors"
