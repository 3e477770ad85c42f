"""Which of a run's processes a ``calfat run`` is: one client, the server, or the starter of all of them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from calfat_plugin.cli.errors import warn
from calfat_plugin.cli.local import run_all
from calfat_plugin.cli.resume_hint import ResumeHint
from calfat_plugin.errors import RunError
from calfat_plugin.host.runtimes import Runtime
from calfat_plugin.rounds import read_rounds
from calfat_plugin.runs.directory import RunDirectory, new_path
from calfat_plugin.runs.request import Request
from calfat_plugin.shipped import located

ALL = -1
SERVER = 0


def which(runtime: Runtime, role: str | None, rank: int | None, local: bool) -> int:
    """The rank that this process is asked to be, or :data:`ALL`."""
    if runtime.num_processes == 1:
        raise RunError(
            "--local, --role and --rank are for runs of several processes; this recipe is a simulation in one. Add "
            "--set common_args.training_type=cross_silo --set comm_args.backend=GRPC, or simulate in several with "
            "--workers N."
        )
    if local and role is None and rank is None:
        return ALL
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


def take_part(request: Request, runtime: Runtime, rank: int, command: list[str], hint: ResumeHint) -> bool:
    """Be a client, or start everyone; False for the server, which is like any other run.

    ``command`` is this program's, without the options that say which process and where to write.
    """
    if rank == SERVER:
        return False
    if rank == ALL:
        hint.command.append("--local")
        _start_everyone(request, runtime, command, hint)
        return True
    hint.last_words = "stopped. To take part again: the same command with --resume."
    from calfat_plugin.runs.party import run_client

    stream = sys.stdout  # the run sends prints to its log
    run_client(request, rank, lambda line: print(line, file=stream, flush=True))
    return True


def warn_of_unfinished(request: Request, command: list[str]) -> None:
    """Say that a new cross-silo run begins beside one that could go on: its clients would start from the beginning."""
    if request.resume or request.run_dir is not None:
        return
    unfinished = RunDirectory.left_behind(request.experiment)
    if unfinished is None:
        return
    try:
        done, rounds = len(read_rounds(unfinished.rounds)), request.experiment.num_rounds
    except RunError:  # damaged, so it cannot go on
        return
    how = shlex.join([*command, "--resume", "--run-dir", str(unfinished.path)])
    warn(
        f"{unfinished.path}: there is an unfinished run of this recipe and seed, with {done} of {rounds} rounds done. "
        f"This is a new one, which begins with the first round. To continue that one instead: {how}"
    )


def _start_everyone(request: Request, runtime: Runtime, command: list[str], hint: ResumeHint) -> None:
    experiment = request.experiment
    if request.run_dir is not None:
        directory: Path = request.run_dir
    elif request.resume:
        directory = RunDirectory.latest_unfinished(experiment).path
    else:
        warn_of_unfinished(request, hint.command)
        directory = new_path(experiment)
    words = [word for word in command[command.index("run") + 1 :] if word != "--plain"]
    if not located(words[0]).is_file():
        raise RunError(f"{words[0]}: every process of this run reads the recipe; save it in a file instead of a pipe.")
    hint.directory, hint.is_ours = RunDirectory(directory), False
    if status := run_all(runtime, words, directory, resume=request.resume):
        sys.exit(status)
