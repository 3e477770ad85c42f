"""Which of a run's processes a ``calfat run`` is: one client or worker, the server, or the starter of all of them."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from calfat_plugin.cli.errors import INTERRUPTED
from calfat_plugin.cli.local import run_all
from calfat_plugin.cli.resume_hint import ResumeHint
from calfat_plugin.errors import RunError
from calfat_plugin.host.runtimes import Runtime
from calfat_plugin.runs.directory import RunDirectory, new_path
from calfat_plugin.runs.request import Request
from calfat_plugin.shipped import located

ALL = -1
SERVER = 0


def which(runtime: Runtime, role: str | None, rank: int | None, local: bool, at_end: ExitStack) -> int:
    """The rank that this process is asked to be, or :data:`ALL`.

    Args:
        at_end: gets what is to be done when the process ends, after its last output.

    Raises:
        HostError: this process is in an MPI job of the wrong size.
        RunError: the options contradict each other, or the recipe runs in one process.
        RecipeError: the recipe has no addresses.
    """
    if runtime.num_processes == 1:
        raise RunError(
            "--local, --role and --rank are for runs of several processes; this recipe is a simulation in one. Add "
            "--set common_args.training_type=cross_silo --set comm_args.backend=GRPC, or "
            "--set comm_args.backend=MPI for a simulation over MPI."
        )
    if local and role is None and rank is None:
        return ALL
    if runtime.is_mpi_job:
        return _rank_in_job(runtime, role, rank, at_end)
    server = role == "server" and rank in (None, SERVER)
    if local or not (server or (role == "client" and rank)):
        raise RunError(
            "a cross-silo run has a process for each party. Start them all on this machine with --local, or one with "
            f"--role server, or with --role client --rank K (1 to {runtime.num_processes - 1})."
        )
    if runtime.lacks_addresses:
        raise runtime.experiment.document.error(
            ("calfat", "silo", "parties"),
            "there are no addresses. List host:port of the server, then of each client; only --local chooses its own.",
        )
    return SERVER if server else int(rank or 0)


def _rank_in_job(runtime: Runtime, role: str | None, rank: int | None, at_end: ExitStack) -> int:
    if role is not None or rank is not None:
        raise RunError(
            "over MPI the job gives each process its rank: leave out --role and --rank, and start "
            f"mpiexec -n {runtime.num_processes} calfat run RECIPE, or calfat run RECIPE --local."
        )
    from calfat_plugin.host.transports import mpi_job

    at_end.push(_end_of_job)
    if runtime.is_cross_silo:
        mpi_job.check_silos(runtime.num_processes)
    else:
        mpi_job.check_workers()
    return mpi_job.rank()


def _end_of_job(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """End together: when all are done, or with the first that fails. Errors and Ctrl-C were reported before."""
    from calfat_plugin.host.transports import mpi_job

    if error is None:
        mpi_job.leave()
    elif isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 1
        mpi_job.end(status, alone=status != INTERRUPTED)
    else:
        mpi_job.end(1, "".join(traceback.format_exception(error)))


def take_part(request: Request, runtime: Runtime, rank: int, command: list[str], hint: ResumeHint) -> bool:
    """Be a client or a worker, or start everyone; False for the server, which is like any other run.

    Args:
        command: this program's command line, without the options that say which process and where to write.
    """
    if rank == ALL or (runtime.is_mpi_job and runtime.is_cross_silo):
        hint.command.append("--local")
    elif runtime.is_mpi_job:  # how the job was started is not known here; any number of workers gives the same result
        from calfat_plugin.host.transports import mpi_job

        hint.command += ["--workers", str(mpi_job.size() - 1)]
    if rank == SERVER:
        return False
    if rank == ALL:
        _start_everyone(request, runtime, command, hint)
        return True
    hint.last_words = "" if runtime.is_mpi_job else "stopped. To take part again: the same command with --resume."
    if runtime.is_cross_silo:
        _be_client(request, runtime, rank)
    else:
        from calfat_plugin.runs.party import run_worker

        run_worker(request, rank)
    return True


def _be_client(request: Request, runtime: Runtime, rank: int) -> None:
    from calfat_plugin.runs.party import run_client

    if runtime.is_mpi_job and request.run_dir is not None:  # all of a job are given the same folder
        if request.overwrite:
            RunDirectory(request.run_dir).refuse_to_overwrite()
        below = request.run_dir / f"rank-{rank}"
        resume = request.resume and (below / "recipe.yaml").exists()
        request = dataclasses.replace(request, run_dir=below, resume=resume)
    stream = sys.stdout  # the run sends prints to its log
    run_client(request, rank, lambda line: print(line, file=stream, flush=True))


def _start_everyone(request: Request, runtime: Runtime, command: list[str], hint: ResumeHint) -> None:
    experiment = request.experiment
    if request.run_dir is not None:
        directory: Path = request.run_dir
    elif request.resume:
        directory = RunDirectory.latest_unfinished(experiment).path
    else:
        directory = new_path(experiment)
    words = [word for word in command[command.index("run") + 1 :] if word != "--plain"]
    if not located(words[0]).is_file():
        raise RunError(f"{words[0]}: every process of this run reads the recipe; save it in a file instead of a pipe.")
    hint.directory, hint.is_ours = RunDirectory(directory), False
    if request.overwrite:
        hint.directory.refuse_to_overwrite()  # before a client removes its part of a run that is kept
        words.append("--overwrite")
    if status := run_all(runtime, words, directory, resume=request.resume):
        sys.exit(status)
