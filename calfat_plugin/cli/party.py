"""Which party of a cross-silo run a ``calfat run`` is: one client, the server, or the starter of all of them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from calfat_plugin.errors import RunError

if TYPE_CHECKING:
    from calfat_plugin.experiment import Experiment
    from calfat_plugin.runs.session import Request

ALL = -1
SERVER = 0


def which(experiment: Experiment, role: str | None, rank: int | None, local: bool) -> int:
    """The rank that this process is asked to be, or :data:`ALL`.

    Raises:
        RunError: the options contradict each other, or the recipe is a simulation.
        RecipeError: the recipe has no addresses.
    """
    if experiment.recipe.common.training_type != "cross_silo":
        raise RunError(
            "--local, --role and --rank are for cross-silo runs; this recipe is a simulation. Add "
            "--set common_args.training_type=cross_silo --set comm_args.backend=GRPC."
        )
    if local and role is None and rank is None:
        return ALL
    if experiment.recipe.comm.backend == "MPI":
        return _rank_in_job(experiment, role, rank)
    server = role == "server" and rank in (None, SERVER)
    if local or not (server or (role == "client" and rank)):
        raise RunError(
            "a cross-silo run has a process for each party. Start them all on this machine with --local, or one with "
            f"--role server, or with --role client --rank K (1 to {experiment.num_clients})."
        )
    if not experiment.recipe.silo.parties:
        raise experiment.recipe.document.error(
            ("calfat", "silo", "parties"),
            "there are no addresses. List host:port of the server, then of each client; only --local chooses its own.",
        )
    return SERVER if server else int(rank or 0)


def _rank_in_job(experiment: Experiment, role: str | None, rank: int | None) -> int:
    if role is not None or rank is not None:
        raise RunError(
            "over MPI the job gives each process its rank: leave out --role and --rank, and start "
            f"mpiexec -n {experiment.num_clients + 1} calfat run RECIPE, or calfat run RECIPE --local."
        )
    from calfat_plugin.host.arguments import refuse_unsupported

    refuse_unsupported(experiment)  # tells what to install, should mpi4py be missing
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_rank())


def take_part(request: Request, party: int, command: list[str]) -> bool:
    """Be a client, or start everyone; False for the server, which is like any other run.

    Args:
        request: what the user asked for.
        party: from :func:`which`.
        command: this program's command line, without the options that say which party and where to write.
    """
    if party == ALL:
        _start_everyone(request, command)
    elif party != SERVER:
        _be_client(request, party)
    return party != SERVER


def _be_client(request: Request, rank: int) -> None:
    from calfat_plugin.interfaces import RunObserver
    from calfat_plugin.runs.party import open_party_directory, run_client

    if request.experiment.recipe.comm.backend == "MPI" and request.run_dir is not None:
        request = _below(request, request.run_dir / f"rank-{rank}")  # all of a job are given the same folder
    directory = open_party_directory(request, rank)
    stream = sys.stdout  # the run sends prints to its log
    run_client(request, rank, directory, RunObserver(), lambda line: print(line, file=stream, flush=True))


def _below(request: Request, directory: Path) -> Request:
    resume = request.resume and (directory / "recipe.yaml").exists()
    return dataclasses.replace(request, run_dir=directory, resume=resume)


def _start_everyone(request: Request, command: list[str]) -> None:
    from calfat_plugin.cli.local import run_all
    from calfat_plugin.host.arguments import refuse_unsupported
    from calfat_plugin.runs.directory import RunDirectory, new_path

    experiment = request.experiment
    refuse_unsupported(experiment)
    if request.run_dir is not None:
        directory: Path = request.run_dir
    elif request.resume:
        directory = RunDirectory.latest_unfinished(experiment).path
    else:
        directory = new_path(experiment)
    words = [word for word in command[command.index("run") + 1 :] if word != "--plain"]
    sys.exit(run_all(experiment, words, directory, resume=request.resume))
