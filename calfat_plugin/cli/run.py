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

if TYPE_CHECKING:
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
@click.option("--plain", is_flag=True, help="A line a round instead of progress bars, also on a terminal.")
def run(
    recipe: str,
    overrides: tuple[str, ...],
    seed: int | None,
    download: bool,
    run_dir: Path | None,
    resume: bool,
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
        directory = open_directory(request)
    how = _resume_command(recipe, overrides, seed, directory.path)
    with user_errors(after=lambda: _what_is_left(directory, resume, how)), _terminable():
        _run(request, directory, plain, how)


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
