"""The processes of a run besides the server's: a client of a cross-silo run, or a worker of a simulation over MPI.

A client has a directory of its own. A worker writes nothing: the run directory is rank 0's::

    runs/<recipe>/rank-<k>/<seed>-<time>/
        recipe.yaml       as run
        environment.json  versions, device, threads, commit
        checkpoints/      round-<n>: what this client keeps between rounds; it never leaves this machine
        finished.json     the run is over
        log.txt           the log of the host and of ours
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from calfat_plugin.errors import RunError
from calfat_plugin.experiment import Experiment
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.host.runtimes import CrossSilo, runtime_of
from calfat_plugin.recipe.silo import SILO
from calfat_plugin.results import State
from calfat_plugin.runs.checkpoints import load_checkpoint, save_checkpoint
from calfat_plugin.runs.compute import pick_device, using_threads
from calfat_plugin.runs.directory import DEFAULT_ROOT, RunDirectory
from calfat_plugin.runs.environment import describe_environment
from calfat_plugin.runs.logs import log_to
from calfat_plugin.runs.request import Request

log = logging.getLogger(__name__)


class PartyDirectory(RunDirectory):
    """A client's run directory."""

    without_resume = "Start without --resume: the server sends this client the current round."
    results = property(lambda self: self.path / "finished.json", doc="Says that the run is over.")


class _States:
    """What a client keeps, a checkpoint a round: after the last that the server used, and after the last trained."""

    def __init__(self, folder: Path, client: int) -> None:
        self._folder, self._client = folder, client

    def after(self, used: int) -> State:
        """The state after the round that the server last used; empty before the first."""
        if used == 0:
            return {}
        if not self._path(used).exists():
            log.warning("nothing is kept here from round %d; continuing with an empty client state", used)
            return {}
        return load_checkpoint(self._path(used))[0].client_states.get(self._client, {})

    def keep(self, round: int, state: State, used: int) -> None:
        """Store the state after ``round``, and forget all but that and ``used``."""
        save_checkpoint(self._path(round), Snapshot(round, {}, client_states={self._client: state}), {})
        for path in self._folder.glob("round-*.safetensors"):
            if path not in (self._path(round), self._path(used)):
                path.unlink()

    def _path(self, round: int) -> Path:
        return self._folder / f"round-{round}.safetensors"


def run_client(request: Request, rank: int, say: Callable[[str], None]) -> None:
    """Be one client until the server says that the run is over, in a new directory or the one to resume.

    Args:
        request: what to run.
        rank: 1 to the number of clients.
        say: shows the user a line.

    Raises:
        CalfatError: with what to fix.
    """
    experiment, runtime = request.experiment, runtime_of(request.experiment)
    if not isinstance(runtime, CrossSilo):
        raise TypeError(f"a {type(runtime).__name__} has no clients with a process of their own")
    if not 1 <= rank <= experiment.num_clients:
        raise RunError(
            f"--rank {rank}: the clients of this recipe have ranks 1 to {experiment.num_clients} "
            "(train_args.client_num_in_total); rank 0 is the server's."
        )
    name, client = experiment.recipe.name, rank - 1
    directory = PartyDirectory.open(request, DEFAULT_ROOT / name / f"rank-{rank}")
    with directory.locked(), log_to(directory.log), using_threads(experiment):
        for finding in runtime.security_warnings(rank):
            say(f"warning: {finding}")
        device = pick_device(experiment, lambda text: say(f"warning: {text}"))
        dataset = experiment.load_dataset(rank)
        data = dataset.train
        if experiment.partition.entry.name != SILO:
            data = data.subset(experiment.split(data.y.numpy())[client])
        precision = experiment.recipe.runtime.precision
        environment = describe_environment(device, experiment.registry, request.command, precision)
        directory.write_json(directory.environment, environment)

        from calfat_plugin.host.task import ClientTask

        states = _States(directory.last_checkpoint.parent, client)
        say(f"client {client} of {name}: {len(data)} examples, waiting for the server")
        runtime.work(
            ClientTask(
                experiment,
                dataset,
                data.to(device),
                rank,
                device,
                state_after=states.after,
                keep_state=states.keep,
                on_round=lambda round, what: say(f"round {round}/{experiment.num_rounds}  {what}"),
                on_notice=lambda text: say(f"warning: {text}"),
            )
        )
    directory.write_json(directory.results, {"recipe": name, "seed": experiment.seed, "rank": rank})
    say("the run is over")


def run_worker(experiment: Experiment, rank: int) -> None:
    """Train whichever clients rank 0 names, until it says that the run is over.

    Args:
        experiment: what to run.
        rank: of this process in the MPI job, 1 and up.

    Raises:
        CalfatError: with what to fix.
    """
    # What concerns a client is in its message to rank 0.
    with log_to(Path(os.devnull)), using_threads(experiment):
        device = pick_device(experiment, lambda text: None)  # rank 0 warns
        dataset = experiment.load_dataset()

        from calfat_plugin.federation.worker import shards_of
        from calfat_plugin.host.mpi_simulation import assist

        assist(experiment, dataset, shards_of(experiment, dataset, device), rank, device)
