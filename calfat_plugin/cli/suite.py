"""``calfat suite FILE``: a grid of runs, and their table beside the paper's."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from calfat_plugin.analyses.attack import planned
from calfat_plugin.cli.as_json import json_option, json_output
from calfat_plugin.cli.errors import INTERRUPTED, fail, stop_signals, warn, write_page
from calfat_plugin.cli.options import idle_option, plugin_option, set_option
from calfat_plugin.cli.suite_view import SuiteProgress, plan_lines
from calfat_plugin.cli.trust import judge
from calfat_plugin.disk import read_json, refuse_unwritable
from calfat_plugin.errors import CalfatError, OptionError, listed, short
from calfat_plugin.host.runtimes import runtime_of
from calfat_plugin.judging.examine import FILE
from calfat_plugin.progress import lines_or_bars, verbatim_console
from calfat_plugin.report import write_comparison
from calfat_plugin.report.numbers import counted, duration
from calfat_plugin.run_files import SUITE
from calfat_plugin.runs.compute import lowest_priority
from calfat_plugin.runs.workers import asked_workers, check_workers
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.cells import SuiteRun
from calfat_plugin.suites.plan import SuitePlan, fetch, make_plan, registry_of, seconds_left
from calfat_plugin.suites.processes import command, default_jobs, processes, threads
from calfat_plugin.suites.record import Key
from calfat_plugin.suites.runner import record_runs, run_all
from calfat_plugin.suites.suite import MAX_SEED
from calfat_plugin.suites.summary import summarise
from calfat_plugin.suites.tables import check_record, markdown, write_tables
from calfat_plugin.suites.tuning import how_chosen, try_again

SOME_FAILED = 1


@click.command()
@click.argument("file", metavar="FILE", type=click.Path())
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Runs at a time. Default: one a core; on GPUs one for each in CUDA_VISIBLE_DEVICES.",
)
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
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="CSV file with a row for each finished run. A run that has a row is finished, wherever it was run.",
)
@click.option(
    "--trust",
    is_flag=True,
    help="Then judge the model of each row's first seed as calfat trust does; the table gets a column.",
)
@click.option("--pages", is_flag=True, help="Draw the page of each run, too; else calfat report RUN does.")
@click.option("--table", is_flag=True, help="Show and write the table of what is finished; run nothing.")
@click.option("--dry-run", is_flag=True, help="Check every cell and list the runs; run nothing.")
@click.option("--download", is_flag=True, help="Fetch missing data sets first.")
@idle_option
@json_option
def suite(
    file: str,
    jobs: int | None,
    workers: str | None,
    seeds: str | None,
    overrides: tuple[str, ...],
    plugins: tuple[Path, ...],
    only: tuple[str, ...],
    record: Path | None,
    trust: bool,
    pages: bool,
    table: bool,
    dry_run: bool,
    download: bool,
    idle: bool,
    as_json: bool,
) -> None:
    """Run the suite FILE cell by cell, then show and write its table.

    Finished runs are never repeated and interrupted ones are resumed, so the same command continues after Ctrl-C.
    """
    with lowest_priority() if idle else nullcontext(), json_output(as_json) as show:
        loaded = load_suite(file, plugins, record)
        check_record(loaded)
        registry = registry_of(loaded, overrides)
        other_seeds = None if seeds is None else _seeds(seeds)

        def now() -> SuitePlan:
            """The suite by what is on disk: choice runs decide what the table's runs are."""
            return make_plan(loaded, registry, overrides=overrides, only=only, seeds=other_seeds)

        plan = now()
        options = _Options(jobs, workers, trust, pages, idle, show)
        warn(*plan.warnings)
        if workers is not None:
            _check_workers(plan, workers, jobs)
        if dry_run:
            _show_plan(plan, options)
            return
        if table:
            _show_and_write(plan, options)
            return
        if download:  # each data set once, here: runs side by side would fetch it side by side
            for line in fetch(plan):
                click.echo(line)
        _run(now, options)


@dataclass(frozen=True)
class _Options:
    """What the command line asks for beside the suite itself; ``show`` prints the result as JSON, if wanted."""

    jobs: int | None
    workers: str | None
    trust: bool
    pages: bool
    idle: bool
    show: Callable[[Any], None]

    def at_a_time(self, plan: SuitePlan, total: int) -> int:
        """How many of so many runs work side by side."""
        return min(self.jobs or default_jobs(plan, self.workers), max(1, total))


def _check_workers(plan: SuitePlan, workers: str, jobs: int | None) -> None:
    if asked_workers(workers) is None and (jobs or 1) > 1:
        raise OptionError(
            f"--workers {workers} gives each run the whole machine, so one runs at a time. Leave out --jobs, or write "
            "the number of workers of each run."
        )
    for cell in plan.cells:
        if cell.experiment is not None:
            check_workers(runtime_of(cell.experiment))


def _run(now: Callable[[], SuitePlan], options: _Options) -> None:
    """Run what is left, and show what came of it."""
    plan = now()
    record = plan.suite.record
    if record is not None:
        refuse_unwritable(record.resolve().parent, "name another file with --record.", make=True)
    for name, choice in plan.choices.items():
        if name in plan.selected:
            try_again(choice, record)
    plan = now()
    record_runs(plan.suite, (*plan.choosing.runs, *plan.runs))
    summarise(plan)  # a results file that cannot be read is reported now, not after the last run
    ended: list[SuiteRun] = []
    finished = True
    if plan.choices:
        _show_cost(plan, options)
        finished, plan = _run_choices(plan, now, options, ended)
    finished = finished and _run_all(plan, "run", options, ended)
    if finished and options.trust:
        with stop_signals():
            _judge(now())
        record_runs(plan.suite, plan.runs)
    _show_and_write(plan, options, ended)
    _report_problems(plan, ended, finished)


def _run_choices(
    plan: SuitePlan, now: Callable[[], SuitePlan], options: _Options, ended: list[SuiteRun]
) -> tuple[bool, SuitePlan]:
    """Run the choice runs, also those that the results of others call for: (False where the user stopped, the plan)."""
    planned_before: set[Key] = set()
    while True:
        planned_before.update(run.key for run in plan.choosing.runs)
        finished = _run_all(plan.choosing, "choice run", options, ended)
        plan = now()  # only now is it known which ends of grids are chosen
        new = [run for run in plan.choosing.left if run.key not in planned_before]  # others that are left have failed
        if not finished or not new:
            return finished, plan


def _report_problems(plan: SuitePlan, ended: Sequence[SuiteRun], finished: bool) -> None:
    """End with an error where the user stopped the suite, a run failed, or nothing could be chosen."""
    this_command = shlex.join(["calfat", *sys.argv[1:]])
    if not finished:
        fail("stopped.", f"Finished runs are kept. Resume with:\n  {this_command}", INTERRUPTED)
    failed = sum(run.state not in ("finished", "lost") for run in ended)
    choices = {name: choice for name, choice in plan.choices.items() if name in plan.selected}
    hopeless = [name for name, choice in choices.items() if choice.hopeless]
    guessing = [name for name, choice in choices.items() if choice.guessing]
    problems = []
    advice = []
    if failed:
        problems.append(f"{failed} of {counted(len(ended), 'run')} did not finish.")
    if hopeless:
        problems.append(f"nothing could be chosen for {listed(hopeless)}: every choice run was lost.")
    if guessing:
        problems.append(f"nothing could be chosen for {listed(guessing)}: no choice run became better than guessing.")
        advice.append(f"Try other values in choose.grid of {plan.suite.document.file}, or more rounds.")
    if failed or hopeless:
        advice.append("What they printed is in seed-*.txt beside their directories.")
    if problems:
        fail(" ".join(problems), f"{' '.join(advice)} Try them again with:\n  {this_command}", SOME_FAILED)


def _run_all(plan: SuitePlan, kind: str, options: _Options, ended: list[SuiteRun]) -> bool:
    """Run what is left of the plan, runs of a ``kind``; False where the user stopped it."""
    total = len(plan.left)
    for run in plan.left:
        runtime_of(run.experiment).refuse_without_host()
    at_a_time = options.at_a_time(plan, total)
    if total:
        share = _share(at_a_time, options.workers)
        to_do = f"{total} of {counted(len(plan.runs), kind)} to do, {at_a_time} at a time with {share} each"
    elif kind == "run":
        to_do = "nothing to do"
    else:
        to_do = f"no {kind} to do"
    click.echo(f"{plan.suite.name}: {to_do}, in {plan.suite.runs_directory}")
    with lines_or_bars(verbatim_console(), plain=not total) as console:
        try:
            progress = SuiteProgress(console, total)
            run_all(plan, at_a_time, progress, ended, options.workers, pages=options.pages, idle=options.idle)
        except KeyboardInterrupt:
            return False
    return True


def _share(at_a_time: int, workers: str | None) -> str:
    """What each of the runs that work side by side has of the machine: ``2 workers of 1 thread``."""
    of_threads = counted(threads(at_a_time, workers), "thread")
    if workers is None:
        return of_threads
    number = processes(workers)
    if workers == str(number):
        return f"{counted(number, 'worker')} of {of_threads}"
    return f"{of_threads} for its workers"


def _judge(plan: SuitePlan) -> None:
    """Judge the first seed's model of each selected row that has no verdict yet."""
    for run in plan.runs:
        if run.seed != plan.seeds[0] or run.cell.name not in plan.selected or run.state != "finished" or run.verdict:
            continue
        if run.recorded is not None:
            warn(f"{run.name} was run elsewhere, and its model is not here: it is not judged.")
        elif run.verdict is None:
            warn(
                f"{run.directory / FILE} is about another checkpoint, round or budget: {run.name} is not judged. Move "
                "the file away."
            )
        else:
            command = shlex.join(["calfat", "trust", str(run.directory)])
            click.echo(command)
            try:
                judge(planned(run.directory, attacks=()))
            except CalfatError as error:  # the other rows are judged, and the table is written
                warn(f"{run.name} is not judged: {error} Try again with: {command}")


def _show_cost(plan: SuitePlan, options: _Options) -> None:
    """What a suite that chooses values will do and cost; only what a suite file says where nothing is chosen."""
    choose = plan.suite.choose
    if choose is None and plan.suite.seconds_per_round is None:
        return
    if choose is not None:
        click.echo(how_chosen(choose, plan.choices))
    num_choosing = len(plan.choosing.left)
    num_table = len(plan.left) + plan.num_waiting
    runs = counted(num_table, "run")
    if num_choosing:
        runs = f"{counted(num_choosing, 'choice run')} and {runs}"
    seconds = seconds_left(plan)
    if seconds is None:
        advice = "no run has finished here yet; the key seconds_per_round of the suite may say what one costs"
        click.echo(f"cost: {runs} to do; {advice}")
    elif num_choosing + num_table:
        cost = f"cost: {runs} to do, about {duration(seconds)} of one process"
        at_a_time = options.at_a_time(plan, num_choosing + num_table)
        if at_a_time > 1:
            cost += f", {duration(seconds / at_a_time)} with {at_a_time} at a time"
        click.echo(cost)


def _show_and_write(plan: SuitePlan, options: _Options, ended: Sequence[SuiteRun] = ()) -> None:
    summary = summarise(plan, ended)
    folder = write_tables(summary)
    click.echo(f"\n{markdown(summary)}")
    click.echo(f"tables: {folder}")
    if any(run.results is not None for cell in summary.cells for run in cell.runs):  # not of rows of a record alone
        write_page(lambda: write_comparison([plan.suite.directory]), plan.suite.directory)
    options.show(read_json(plan.suite.directory / SUITE))


def _show_plan(plan: SuitePlan, options: _Options) -> None:
    for line in plan_lines(plan):
        click.echo(line)
    left = (*plan.choosing.left, *plan.left)
    if left:
        click.echo(f"the first one: {shlex.join(['calfat', *command(plan, left[0], options.workers)])}")
    _show_cost(plan, options)
    cells = counted(len(plan.cells), "cell")
    runs = counted(len(left) + plan.num_waiting, "run")
    click.echo(f"{plan.suite.document.file}: good. {cells}, {runs} to do.")
    content = {
        "file": plan.suite.document.file,
        "cells": len(plan.cells),
        "runs": _runs_as_json(plan, options),
        "skipped": {cell.name: cell.skipped for cell in plan.cells if cell.skipped},
    }
    if plan.choices:
        content["choice_runs"] = _runs_as_json(plan.choosing, options)
        content["waiting"] = list(plan.waiting)
        content["seconds_left"] = seconds_left(plan)
    options.show(content)


def _runs_as_json(plan: SuitePlan, options: _Options) -> list[dict[str, Any]]:
    """All runs of a plan, and the command of each that is to be run."""
    to_do = {run.directory for run in plan.left}
    described = []
    for run in plan.runs:
        words = None
        if run.directory in to_do:
            words = ["calfat", *command(plan, run, options.workers)]
        described.append({"run": run.name, "state": run.state, "directory": str(run.directory), "command": words})
    return described


def _seeds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    seeds = [int(word) for word in words if word.isdecimal() and len(word) <= len(str(MAX_SEED))]
    if len(seeds) < len(words) or max(seeds) > MAX_SEED or len(set(seeds)) < len(seeds):
        raise OptionError(f"--seeds: got '{short(text)}', expected different whole numbers such as 0,1,2.")
    return seeds
