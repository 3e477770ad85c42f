"""``calfat run RECIPE``, which is also ``fedml run RECIPE``."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import click

from calfat_plugin.cli import party
from calfat_plugin.cli.errors import INTERRUPTED, stop_signals, user_errors, warn
from calfat_plugin.cli.options import idle_option, json_option, json_output, recipe_options
from calfat_plugin.cli.party import ResumeHint
from calfat_plugin.compat import quick_imports
from calfat_plugin.disk import read_json
from calfat_plugin.errors import RunError
from calfat_plugin.host.runtimes import runtime_of
from calfat_plugin.progress import choose_progress, verbatim_console
from calfat_plugin.recipe import read_document
from calfat_plugin.recipe.schema import MPI
from calfat_plugin.report.run_tables import show_final, spending_text
from calfat_plugin.runs.compute import lowest_priority
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import Request, checked_experiment
from calfat_plugin.runs.workers import OPTION, mpi_workers, with_workers
from calfat_plugin.shipped import located
from calfat_plugin.stored_run import Run


@click.command()
@recipe_options
@click.option(
    "--download", is_flag=True, help="Fetch a missing data set; short for --set calfat.dataset.download=true."
)
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Where to write; default: runs/<recipe>/<seed>-<time>."
)
@click.option(
    "--resume", is_flag=True, help="Resume the newest unfinished run of this recipe and seed, or the one in --run-dir."
)
@click.option("--role", type=click.Choice(["server", "client"]), help="Be one party of a cross-silo run.")
@click.option("--rank", type=click.IntRange(min=0), metavar="K", help="Which party: 0 is the server, 1 and up clients.")
@click.option("--local", is_flag=True, help="Start all processes of a cross-silo run on this machine.")
@click.option(
    "--workers",
    metavar="N|auto",
    help="Train the clients of a round in N processes of this machine, with the same result; auto: as many as fit.",
)
@click.option("--profile", is_flag=True, help="Measure where a round's time goes, and show it at the end.")
@click.option("--no-page", is_flag=True, help="Draw no report.html at the end; calfat report draws it later.")
@click.option("--plain", is_flag=True, help="A line a round instead of progress bars, also on a terminal.")
@idle_option
@json_option
def run(
    recipe: str,
    overrides: tuple[str, ...],
    seed: int | None,
    of_host: tuple[str, ...],
    plugins: tuple[Path, ...],
    download: bool,
    run_dir: Path | None,
    resume: bool,
    role: str | None,
    rank: int | None,
    local: bool,
    workers: str | None,
    profile: bool,
    no_page: bool,
    plain: bool,
    idle: bool,
    as_json: bool,
) -> None:
    """Run RECIPE in the runtime that it names.

    Ctrl-C stops after the last finished round; the same command with --resume continues from there.
    """
    overrides += of_host
    command = [*_program(), "run", recipe]  # this one again, without the rank and the run directory
    for override in overrides:
        command += ["--set", override]
    for plugin in plugins:
        command += ["--plugin", str(plugin)]
    if seed is not None:
        command += ["--seed", str(seed)]
    flags = {"--download": download, "--profile": profile, "--no-page": no_page, "--plain": plain, "--idle": idle}
    command += [flag for flag, is_set in flags.items() if is_set]
    if workers is not None:
        command += ["--workers", workers]

    def results(directory: RunDirectory) -> dict[str, Any]:
        return {"run": str(directory.path), "results": read_json(directory.results)}

    hint = ResumeHint([*command], resume)
    if role is not None:
        hint.command += ["--role", role]
    with (
        lowest_priority() if idle else nullcontext(),
        json_output(as_json) as show,
        _stoppable(hint.after_stop),
        user_errors(hint.after_error, hint.after_stop),
    ):
        experiment = checked_experiment(
            read_document(recipe, piped=True), overrides, seed, download=download, plugins=plugins
        )
        warn(*experiment.warnings)
        runtime = runtime_of(experiment)
        is_party = local or role is not None or rank is not None
        typed = [Path(sys.argv[0]).name, *sys.argv[1:]]
        request = Request(experiment, run_dir, resume, typed, profile=profile, page=not no_page)
        if workers is not None:
            if is_party and not runtime.is_cross_silo:
                raise RunError(f"{OPTION} starts all processes of a run. Leave out --local, --role and --rank.")
            request = with_workers(request, runtime, workers, warn)
        elif is_party or runtime.num_processes > 1:
            own_rank = party.which(runtime, role, rank, local)
            if party.take_part(request, runtime, own_rank, command, hint):
                if hint.directory is not None:  # this process has started the parties, and is none itself
                    show(results(hint.directory))
                return
        elif experiment.executor == MPI:
            # The command that started its job is not known. A run with other workers has the same result.
            hint.command += [OPTION, str(mpi_workers())]
        if runtime.is_cross_silo:
            party.warn_of_unfinished(request, hint.command)
        hint.directory, hint.experiment = RunDirectory.open(request), experiment
        if not located(recipe).is_file():  # a pipe, which cannot be read again
            hint.command[hint.command.index("run") + 1] = str(hint.directory.recipe)
        _run(request, hint.directory, plain, hint)
        show(results(hint.directory))


def _run(request: Request, directory: RunDirectory, plain: bool, hint: ResumeHint) -> None:
    """Run in this process, with progress and results on the console."""
    with quick_imports():
        from calfat_plugin.runs import session

    console = verbatim_console(sys.stdout)  # this stream, whatever the host does to sys.stdout
    with choose_progress(console, plain=plain) as progress:
        hint.progress = progress
        result = session.run(request, directory, progress)
    run = Run(directory.path)
    show_final(console, result.evaluations, run.alarms, run.partition.class_names, result.stop)
    if request.profile and run.spending is not None:
        console.print(spending_text(run.spending), soft_wrap=True)
    console.print(f"results: {directory.path}", soft_wrap=True)
    if any("eps" in evaluation.settings for evaluation in result.evaluations):
        trust = shlex.join([*_program("calfat"), "trust", str(directory.path)])  # the fedml command has no trust
        console.print(f"next, whether the robust accuracy may be believed: {trust}", soft_wrap=True)


def _program(name: str | None = None) -> list[str]:
    """The words that call this program again, or the program of another name in the same folder.

    A path stays a path if the PATH does not lead to the same program.
    """
    program = Path(sys.argv[0])
    if program.name not in ("calfat", "fedml"):
        return [sys.executable, "-m", "calfat_plugin.cli.main"]
    program = program.with_name(name or program.name)
    on_path = shutil.which(program.name)
    if on_path is not None and program.exists() and Path(on_path).samefile(program):
        return [program.name]
    return [str(program)]


@contextmanager
def _stoppable(last_words: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C, a polite kill or a closed terminal, print the last words and exit."""
    with stop_signals() as numbers:
        try:
            yield
        except KeyboardInterrupt:
            for number in numbers:  # a second signal must not interrupt the last output
                signal.signal(number, signal.SIG_IGN)
            words = last_words()
            if words:
                with suppress(OSError):  # a closed terminal
                    print(words, file=sys.stderr)
            sys.exit(INTERRUPTED)
