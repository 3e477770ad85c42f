"""The processes of a run besides the server's: a client of a cross-silo run, or a worker of a simulation.

A client has a directory of its own. A worker has none: the run directory is the server's::

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
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import current_process
from pathlib import Path

import torch
from torch import Tensor

from calfat_plugin import layouts
from calfat_plugin.disk import read_json, write_json
from calfat_plugin.errors import RunError
from calfat_plugin.experiment import Experiment, going_further
from calfat_plugin.experiment.implausible import implausible_images
from calfat_plugin.federation.early_stopping import is_more_patient
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.federation.wire import Wire
from calfat_plugin.federation.worker import Worker, shards_of
from calfat_plugin.host.runtimes import CrossSilo, runtime_of
from calfat_plugin.host.tasks import ClientTask
from calfat_plugin.maths.torch_state import fresh_torch_state
from calfat_plugin.observer import RunObserver
from calfat_plugin.profiling import profiling
from calfat_plugin.recipe.document import Document
from calfat_plugin.recipe.silo import SILO
from calfat_plugin.report.run_tables import spending_text
from calfat_plugin.results import State
from calfat_plugin.run_files import Spending
from calfat_plugin.runs.checkpoints import load_checkpoint, save_checkpoint
from calfat_plugin.runs.compute import computing_as, environment_of, log_to, new_profile
from calfat_plugin.runs.directory import DEFAULT_ROOT, RECIPE, RunDirectory
from calfat_plugin.runs.request import Request, checked_experiment, pick_device
from calfat_plugin.tensor_files import READ_ERRORS, read_facts
from calfat_plugin.typed_json import from_json

log = logging.getLogger(__name__)

_LIFE = ExitStack()  # what a worker enters until its process ends
_RANKS_ON_MACHINE = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")  # MPICH's, Open MPI's, srun's


class PartyDirectory(RunDirectory):
    """A client's run directory."""

    without_resume = "Start without --resume: the server sends this client the current round."
    finished_too = True  # the server may be in its final evaluation
    results_name = "finished.json"

    def not_measured(self, experiment: Experiment) -> tuple[str, ...]:
        """Nothing: the server measures."""
        return ()

    def _files(self) -> list[Path]:
        """Also what it keeps after the first round, for it cannot know whether the server has finished that."""
        return [*super()._files(), self.checkpoint("round-1")]


class _States:
    """What a client keeps, a checkpoint a round: after the last that the server used, and after the last trained."""

    def __init__(
        self, folder: Path, client: int, warn: Callable[[str], None], recipe_digest: str | None = None
    ) -> None:
        self._folder, self._client, self._warn, self._recipe_digest = folder, client, warn, recipe_digest
        for path in sorted(folder.glob("round-*.safetensors")):
            try:
                facts = read_facts(path)
                owners = [int(owner) for owner in facts["clients"]]
                recipe = facts["notes"].get(RECIPE)
            except READ_ERRORS:
                continue  # where it is needed, :meth:`after` says what is wrong with it
            if owners != [client]:
                raise RunError(
                    f"{path}: is of client {', '.join(map(str, owners))}, and this is client {client}. Give each "
                    "client a run directory of its own."
                )
            if recipe != recipe_digest or path != self._path(facts["round"]):
                raise RunError(
                    f"{path}: is of another run, or of round {facts['round']}: this client keeps there what it kept in "
                    "a run of this recipe and seed, after the round in the file's name. Restore it from a copy, or "
                    "start the client in a directory of its own."
                )

    def after(self, used: int) -> State:
        """The state after the round that the server last used; empty before the first."""
        path = self._path(used)
        if not used or not path.exists():
            return {}
        snapshot, _ = load_checkpoint(path)
        return snapshot.client_states[self._client]

    def keep(self, round: int, state: State, used: int) -> None:
        """Store the state after ``round``, and forget all but that and ``used``."""
        if used and state and not self._path(used).exists():
            self._warn(
                f"round {round} was trained without what this client kept after round {used}: it is not in "
                f"{self._folder}. To go on with it, start a client again with --resume."
            )
        snapshot = Snapshot(round, {}, client_states={self._client: state})
        save_checkpoint(self._path(round), snapshot, {RECIPE: self._recipe_digest})
        for path in self._folder.glob("round-*"):  # a half-written one, too
            if path not in (self._path(round), self._path(used)):
                path.unlink()

    def _path(self, round: int) -> Path:
        return self._folder / f"round-{round}.safetensors"


@fresh_torch_state()
def run_client(request: Request, rank: int, say: Callable[[str], None]) -> None:
    """Be one client until the server says that the run is over, in a new directory or the one to resume."""
    experiment, runtime = request.experiment, runtime_of(request.experiment)
    if not isinstance(runtime, CrossSilo):
        raise TypeError(f"a {type(runtime).__name__} has no clients with a process of their own")
    if not 1 <= rank <= experiment.num_clients:
        raise RunError(
            f"--rank {rank}: the clients of this recipe have ranks 1 to {experiment.num_clients} "
            "(train_args.client_num_in_total); rank 0 is the server's."
        )
    name, client = experiment.name, rank - 1
    directory = PartyDirectory.open(request, DEFAULT_ROOT / name / f"rank-{rank}")

    def warn(text: str) -> None:
        say(f"warning: {text}")

    def say_round(round: int, text: str) -> None:
        say(f"round {round}/{experiment.num_rounds}  {text}")

    def say_joined(run: str, round: int) -> None:
        say_round(round, f"of the server's run {run}")

    def keep_goodbye(rounds: int) -> None:
        patience = None
        if rounds < experiment.num_rounds:  # the run stopped early
            patience = experiment.train.patience
        about = {"recipe": name, "seed": experiment.seed, "rank": rank}
        write_json(directory.results, {**about, "rounds": rounds, "patience": patience})

    with directory.locked(), log_to(directory.log), computing_as(experiment):
        states = _States(directory.last_checkpoint.parent, client, warn, directory.recipe_digest)
        nothing_to_do = _why_finished(directory, experiment)
        if nothing_to_do:
            say(f"client {client} of {name} is finished{nothing_to_do}")
            return
        for finding in runtime.security_warnings(rank):
            warn(finding)
        worker = _worker_of(request, rank, directory, warn)
        say(f"client {client} of {name}: {worker.num_examples(client)} examples, waiting for the server")
        task = ClientTask(
            worker,
            rank,
            state_after=states.after,
            keep_state=states.keep,
            on_round=say_round,
            on_notice=warn,
            on_joined=say_joined,
            on_finished=keep_goodbye,
        )
        profile = new_profile(worker.device) if request.profile else None
        with profiling(profile):
            runtime.run_client(task)
        if profile is not None:
            spent = {"method": experiment.trainer.name, "parts": profile.as_json()}
            write_json(directory.profile, spent)
            log.info("where the time went:\n%s", spending_text(from_json(Spending, spent)))
            say(f"where the time went: {directory.profile}")
    say("the run is over")


def _why_finished(directory: PartyDirectory, experiment: Experiment) -> str:
    """Why a client has nothing to do, as it follows on *is finished*; empty where it has."""
    goodbye = read_json(directory.results)
    done = goodbye.get("rounds")  # after which the server said goodbye
    if not isinstance(done, int) or not done:
        return ""
    if done >= experiment.num_rounds:
        return f" after {done} rounds. {going_further(experiment.as_run(), done, 'all parties')}"
    patience = goodbye.get("patience")  # of a run that stopped early
    if patience is None or is_more_patient(experiment.train.patience, patience):
        return ""
    return (
        f": the run stopped early after round {done}. To go further, resume all parties with a larger "
        "train_args.patience."
    )


def _worker_of(request: Request, rank: int, directory: PartyDirectory, warn: Callable[[str], None]) -> Worker:
    """What trains this client on its own data; the directory's environment.json then says where."""
    experiment, client = request.experiment, rank - 1
    device = pick_device(experiment, warn)
    dataset = experiment.load_dataset(rank)
    data = dataset.train
    if experiment.partition.entry.name != SILO:
        data = data.subset(experiment.split(data.y.numpy())[client])
    for finding in implausible_images(experiment, data):
        warn(finding)
    write_json(directory.environment, environment_of(experiment, device, request.command))
    return Worker(experiment, dataset, {client: data.to(device)}, device, RunObserver())


@fresh_torch_state()
def train_round(
    request: Request, rank: int, folder: Path, round: int, used: int, downlink: Mapping[str, Tensor]
) -> tuple[int, Wire]:
    """(number of examples, message) of a client after one round, in a process that the host has started for it.

    What clients keep is in ``folder``, a directory for each name and seed of a recipe; a round continues from the last
    one in which the server used the client's update.
    """
    experiment = request.experiment
    path = folder / f"{experiment.name}-{experiment.seed}-client-{rank - 1}"
    if used == 0:  # nothing of an earlier run is needed, which may have had another recipe
        earlier = PartyDirectory(path)
        earlier.recipe.unlink(missing_ok=True)
        for state in earlier.last_checkpoint.parent.glob("round-*"):
            state.unlink()
    request = replace(request, run_dir=path, resume=PartyDirectory(path).recipe.exists())
    directory = PartyDirectory.open(request)
    with directory.locked(), log_to(directory.log), computing_as(experiment):
        worker, client = _worker_of(request, rank, directory, log.warning), rank - 1
        worker.check_downlink(downlink)
        states = _States(directory.last_checkpoint.parent, client, log.warning, directory.recipe_digest)
        worker.client_states[client] = states.after(used)
        wire = worker.fit(client, round, downlink)
        states.keep(round, worker.client_states[client], used)
        return worker.num_examples(client), wire


def any_clients_worker(document: Document, threads: int, log_file: Path) -> Worker:
    """What trains any client in a process of an executor, or of a host, for as long as it lives.

    It has the server's number of threads and memory layout, on which the last bits depend, and its log where this
    machine has it. Where the recipe leaves the layout to the processor, this one decides again: it may be another.
    """
    torch.set_num_threads(threads)
    _LIFE.close()  # of another run
    _LIFE.enter_context(log_to(log_file if log_file.exists() else Path(os.devnull)))
    experiment = checked_experiment(document)
    layouts.ask_for(experiment.runtime.layout)
    device = pick_device(experiment, lambda text: None, _number_on_machine())  # the server warns
    dataset = experiment.load_dataset()
    return Worker(experiment, dataset, shards_of(experiment, dataset, device), device, RunObserver())


def _number_on_machine() -> int:
    """The number of this process among the workers of its machine, from 0, as the program that started it says."""
    number = current_process().name.rpartition("-")[2]  # of Python's own processes, counted from 1
    if number.isdecimal():
        return int(number) - 1
    for name in _RANKS_ON_MACHINE:
        rank = os.environ.get(name, "")
        if rank.isdecimal():
            return int(rank)
    return 0
