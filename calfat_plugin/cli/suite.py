"""``calfat suite FILE``: a grid of runs, and their table beside the paper's."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calfat_plugin.cli.as_json import json_option, json_output
from calfat_plugin.cli.errors import INTERRUPTED, fail, user_errors, warn, write_page
from calfat_plugin.cli.options import complete_recipe, plugin_option, set_option
from calfat_plugin.errors import OptionError
from calfat_plugin.report.numbers import counted

if TYPE_CHECKING:
    from rich.console import Console

    from calfat_plugin.suites.plan import Plan
    from calfat_plugin.suites.runner import Outcome

SOME_FAILED = 1
_MAX_SEED = 2**32 - 1


@click.command()
@click.argument("file", metavar="FILE", shell_complete=complete_recipe)
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Runs at a time. Default: one a core; on GPU, 1.")
@click.option(
    "--workers",
    metavar="N|auto",
    help="Train the clients of each run in N processes, as calfat run does; auto: as many as fit, a run at a time.",
)
@click.option("--seeds", metavar="N,N,...", help="Seeds instead of the suite's own, such as 0,1,2.")
@set_option
@plugin_option
@click.option(
    "--only",
    multiple=True,
    metavar="SELECTOR",
    help="Run only these cells: 'CIFAR-10/CalFAT', 'SVHN/*', or a label: CalFAT. Repeatable.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write copies of the tables here, too.")
@click.option("--dry-run", is_flag=True, help="Check every cell and list the runs; run nothing.")
@click.option("--download", is_flag=True, help="Fetch missing data sets first.")
@json_option
def suite(
    file: str,
    jobs: int | None,
    workers: str | None,
    seeds: str | None,
    overrides: tuple[str, ...],
    plugins: tuple[Path, ...],
    only: tuple[str, ...],
    out: Path | None,
    dry_run: bool,
    download: bool,
    as_json: bool,
) -> None:
    """Run the suite FILE cell by cell, then show and write its table.

    Finished runs are never repeated and interrupted ones are resumed, so the same command continues after Ctrl-C.
    """
    from calfat_plugin.registry import Registry
    from calfat_plugin.suites import load_suite
    from calfat_plugin.suites.data import fetch
    from calfat_plugin.suites.plan import make_plan

    with json_output(as_json) as show, user_errors():
        loaded = load_suite(file, plugins)
        plan = make_plan(
            loaded,
            Registry.for_recipe(loaded.base_document),
            overrides=overrides,
            only=only,
            seeds=None if seeds is None else _seeds(seeds),
        )
        warn(*plan.warnings)
        if workers is not None:
            _check_workers(plan, workers, jobs)
        if dry_run:
            _show_plan(plan, workers)
            show(_plan_as_json(plan))
            return
        if download:  # each data set once, here: runs side by side would fetch it side by side
            for what in fetch(plan):
                click.echo(what)
        _run(plan, jobs, workers, out, show)


def _check_workers(plan: Plan, workers: str, jobs: int | None) -> None:
    from calfat_plugin.host.runtimes import runtime_of
    from calfat_plugin.runs.workers import asked_workers, check_workers

    if asked_workers(workers) is None and (jobs or 1) > 1:
        raise OptionError(
            f"--workers {workers} gives each run the whole machine, so one runs at a time. Leave out --jobs, or write "
            "the number of workers of each run."
        )
    for cell in plan.cells:
        if cell.experiment is not None:
            check_workers(runtime_of(cell.experiment))


def _run(plan: Plan, jobs: int | None, workers: str | None, out: Path | None, show: Callable[[Any], None]) -> None:
    from rich.console import Console

    from calfat_plugin.cli.progress import can_draw
    from calfat_plugin.cli.suite_view import LiveSuiteProgress, PlainSuiteProgress
    from calfat_plugin.disk import read_json
    from calfat_plugin.report.reading import SUITE
    from calfat_plugin.suites.runner import run_all
    from calfat_plugin.suites.shares import default_jobs, processes, threads
    from calfat_plugin.suites.summary import summarise

    summarise(plan)  # a results file that cannot be read is reported now, not after the last run
    console = Console(highlight=False)
    total = len(plan.left)
    at_a_time = min(jobs or default_jobs(plan, workers), max(1, total))
    each = counted(threads(at_a_time, workers), "thread")
    if workers is not None:
        number = processes(workers)
        each = f"{counted(number, 'worker')} of {each}" if workers == str(number) else f"{each} for its workers"
    click.echo(
        f"{plan.suite.name}: {total} of {counted(len(plan.runs), 'run')} to do, {at_a_time} at a time with "
        f"{each} each, in {plan.runs_directory}"
        if total
        else f"{plan.suite.name}: nothing to do, in {plan.runs_directory}"
    )
    outcomes: list[Outcome] = []
    stopped = False
    with LiveSuiteProgress(console, total) if can_draw(console) and total else PlainSuiteProgress(total) as observer:
        try:
            run_all(plan, at_a_time, observer, outcomes, workers)
        except KeyboardInterrupt:
            stopped = True
    _show_and_write(plan, outcomes, out, console)
    show(read_json(plan.directory / SUITE))
    this_command = shlex.join(["calfat", *sys.argv[1:]])
    if stopped:
        fail("stopped.", f"Finished runs are kept. Resume with:\n  {this_command}", INTERRUPTED)
    if bad := sum(outcome.status != "finished" for outcome in outcomes):
        fail(
            f"{bad} of {counted(len(outcomes), 'run')} did not finish.",
            f"What they printed is in seed-*.txt beside their directories. Try them again with:\n  {this_command}",
            SOME_FAILED,
        )


def _show_and_write(plan: Plan, outcomes: list[Outcome], out: Path | None, console: Console) -> None:
    from calfat_plugin.cli.progress import can_draw
    from calfat_plugin.cli.suite_view import remarks, suite_table
    from calfat_plugin.report import write_comparison
    from calfat_plugin.suites.summary import summarise
    from calfat_plugin.suites.tables import markdown, write_tables

    summary = summarise(plan, outcomes)
    folders = write_tables(summary, out)
    if can_draw(console):
        console.print(suite_table(summary))
        for remark in remarks(summary):
            console.print(remark, markup=False, soft_wrap=True)
    else:
        click.echo("\n" + markdown(summary))
    click.echo(f"tables: {', '.join(map(str, folders))}")
    if any(cell.finished for cell in summary.cells):
        write_page(lambda: write_comparison([plan.directory]), plan.directory)


def _show_plan(plan: Plan, workers: str | None) -> None:
    from calfat_plugin.cli.suite_view import plan_lines
    from calfat_plugin.suites.runner import command

    for line in plan_lines(plan):
        click.echo(line)
    if plan.left:
        click.echo(f"the first one: {shlex.join(['calfat', *command(plan, plan.left[0], workers)])}")
    cells, runs = counted(len(plan.cells), "cell"), counted(len(plan.left), "run")
    click.echo(f"{plan.suite.document.file}: good. {cells}, {runs} to do.")


def _plan_as_json(plan: Plan) -> dict[str, Any]:
    from calfat_plugin.suites.runner import command

    left = {run.directory for run in plan.left}
    runs = [
        {
            "run": run.name,
            "state": run.state,
            "directory": str(run.directory),
            "command": ["calfat", *command(plan, run)] if run.directory in left else None,
        }
        for run in plan.runs
    ]
    skipped = {cell.name: cell.skipped for cell in plan.cells if cell.skipped}
    return {"file": plan.suite.document.file, "cells": len(plan.cells), "runs": runs, "skipped": skipped}


def _seeds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) <= _MAX_SEED for word in words) or len(set(words)) < len(words):
        raise OptionError(f"--seeds: got '{text}', expected different whole numbers such as 0,1,2.")
    return [int(word) for word in words]
