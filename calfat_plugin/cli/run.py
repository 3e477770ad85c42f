"""``calfat run RECIPE``, which is also ``fedml run RECIPE``."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from calfat_plugin.cli.errors import INTERRUPTED, fail, user_errors, warn
from calfat_plugin.cli.options import download_option, load_experiment, recipe_argument, seed_option, set_option
from calfat_plugin.errors import RunError

if TYPE_CHECKING:
    from calfat_plugin.experiment import Experiment
    from calfat_plugin.runs.directory import RunDirectory
    from calfat_plugin.runs.session import Request


@click.command()
@recipe_argument
@set_option
@seed_option
@download_option
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Where to write; default: runs/<recipe>/<seed>-<time>."
)
@click.option(
    "--resume", is_flag=True, help="Go on with the newest unfinished run of this recipe and seed, or with --run-dir."
)
@click.option("--role", type=click.Choice(["server", "client"]), help="Be one party of a cross-silo run.")
@click.option("--rank", type=click.IntRange(min=0), metavar="K", help="Which party: 0 is the server, 1 and up clients.")
@click.option("--local", is_flag=True, help="Start all parties of a cross-silo run on this machine.")
@click.option("--plain", is_flag=True, help="A line a round instead of progress bars, also on a terminal.")
def run(
    recipe: str,
    overrides: tuple[str, ...],
    seed: int | None,
    download: bool,
    run_dir: Path | None,
    resume: bool,
    role: str | None,
    rank: int | None,
    local: bool,
    plain: bool,
) -> None:
    """Run RECIPE in the runtime that it names.

    Ctrl-C stops after the last finished round; the same command with --resume goes on from there.
    """
    with user_errors():
        experiment = load_experiment(recipe, overrides, seed, download=download)
        for warning in experiment.recipe.warnings:
            warn(warning)

        from calfat_plugin.runs.session import Request, open_directory

        request = Request(experiment, run_dir, resume, [Path(sys.argv[0]).name, *sys.argv[1:]])
        party = _party(experiment, role, rank, local)
        if party == _ALL:
            directory = _local_directory(request)
        elif party > 0:
            _be_client(request, party)
            return
        else:
            directory = open_directory(request)
    if party == _ALL:
        words = [recipe, *(word for override in overrides for word in ("--set", override))]
        words += [] if seed is None else ["--seed", str(seed)]
        _run_all(experiment, words, directory, resume)
        return
    how = _resume_command(recipe, overrides, seed, directory.path)
    with user_errors(after=lambda: _what_is_left(directory, resume, how)), _terminable():
        _run(request, directory, plain, how)


_ALL, _SIMULATION = -1, 0


def _party(experiment: Experiment, role: str | None, rank: int | None, local: bool) -> int:
    """The rank that this process is asked to be: ``_ALL`` for ``--local``, 0 for the server and for a simulation."""
    cross_silo = experiment.recipe.common.training_type == "cross_silo"
    if not cross_silo:
        if local or role is not None or rank is not None:
            raise RunError(
                "--local, --role and --rank are for cross-silo runs; this recipe is a simulation. Add "
                "--set common_args.training_type=cross_silo --set comm_args.backend=GRPC."
            )
        return _SIMULATION
    if local and role is None and rank is None:
        return _ALL
    server = role == "server" and rank in (None, 0)
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
    return 0 if server else int(rank or 0)


def _be_client(request: Request, rank: int) -> None:
    from calfat_plugin.interfaces import RunObserver
    from calfat_plugin.runs.party import open_party_directory, run_client

    directory = open_party_directory(request, rank)
    stream = sys.stdout
    try:
        with _terminable():
            run_client(request, rank, directory, RunObserver(), lambda line: print(line, file=stream, flush=True))
    except KeyboardInterrupt:
        fail("stopped.", f"Go on with --resume --run-dir {directory.path}.", INTERRUPTED)


def _local_directory(request: Request) -> RunDirectory:
    """Where ``--local`` runs; the server's process makes it."""
    from calfat_plugin.host.arguments import refuse_unsupported
    from calfat_plugin.runs.directory import RunDirectory, new_path

    refuse_unsupported(request.experiment)
    if request.run_dir is not None:
        return RunDirectory(request.run_dir)
    return (
        RunDirectory.latest_unfinished(request.experiment)
        if request.resume
        else RunDirectory(new_path(request.experiment))
    )


def _run_all(experiment: Experiment, words: list[str], directory: RunDirectory, resume: bool) -> None:
    from calfat_plugin.cli.local import run_all

    with _terminable():
        try:
            status = run_all(experiment, words, directory.path, resume=resume)
        except KeyboardInterrupt:
            again = shlex.join(["calfat", "run", *words, "--local", "--resume", "--run-dir", str(directory.path)])
            fail("stopped.", f"Finished rounds are kept in {directory.path}. Go on with:\n  {again}", INTERRUPTED)
    sys.exit(status)


def _run(request: Request, directory: RunDirectory, plain: bool, how: str) -> None:
    from rich.console import Console

    from calfat_plugin.cli.progress import LiveProgress, PlainProgress, results_table
    from calfat_plugin.runs import session

    console = Console(file=sys.stdout, highlight=False)  # this stream, whatever the host does to sys.stdout
    live = LiveProgress(console) if console.is_terminal and not plain else None
    observer = live or PlainProgress(sys.stdout)
    errors = sys.stderr
    try:
        result = session.run(request, directory, observer, lambda text: print(f"warning: {text}", file=errors))
    except KeyboardInterrupt:
        if live is not None:
            live.stop()
        fail("stopped.", _what_is_left(directory, request.resume, how), INTERRUPTED)
    finally:
        if live is not None:
            live.stop()
    console.print(results_table(result))
    console.print(f"results: {directory.path}", soft_wrap=True)


def _resume_command(recipe: str, overrides: tuple[str, ...], seed: int | None, path: Path) -> str:
    words = ["calfat", "run", recipe, *(word for override in overrides for word in ("--set", override))]
    if seed is not None:
        words += ["--seed", str(seed)]
    return shlex.join([*words, "--resume", "--run-dir", str(path)])


def _what_is_left(directory: RunDirectory, resumed: bool, how: str) -> str:
    """How to go on; a new run that finished no round leaves nothing behind and says nothing."""
    if not directory.last_checkpoint.exists() and not resumed:
        directory.discard()
        return ""
    return f"Finished rounds are kept in {directory.path}. Go on with:\n  {how}"


@contextmanager
def _terminable() -> Iterator[None]:
    """Let a polite kill (SIGTERM) end a run as Ctrl-C does."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
