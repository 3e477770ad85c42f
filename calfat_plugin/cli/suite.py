"""``calfat suite FILE``: a grid of runs, and their table beside the paper's."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from calfat_plugin.analyses.attack import planned
from calfat_plugin.cli.errors import INTERRUPTED, fail, stop_signals, warn, write_page
from calfat_plugin.cli.options import idle_option, json_option, json_output, plugin_option, set_option
from calfat_plugin.cli.trust import judge
from calfat_plugin.disk import read_json, refuse_unwritable
from calfat_plugin.errors import CalfatError, OptionError, listed, short
from calfat_plugin.host.runtimes import runtime_of
from calfat_plugin.judging.examine import FILE
from calfat_plugin.progress import Pace, Quiet, lines_or_bars, verbatim_console
from calfat_plugin.report import write_comparison
from calfat_plugin.report.numbers import clock, counted, duration
from calfat_plugin.run_files import SUITE
from calfat_plugin.runs.compute import lowest_priority
from calfat_plugin.runs.workers import asked_workers, check_workers
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.cells import SuiteRun
from calfat_plugin.suites.plan import SuitePlan, fetch, make_plan, registry_of, seconds_left
from calfat_plugin.suites.processes import command, default_jobs, processes, threads
from calfat_plugin.suites.record import Key
from calfat_plugin.suites.runner import SuiteObserver, record_runs, run_all
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
        other_seeds = None if seeds is None else _parse_seeds(seeds)

        def now() -> SuitePlan:
            """The plan by what is on disk. It changes, because choice runs decide what the table's runs are."""
            return make_plan(loaded, registry, overrides=overrides, only=only, seeds=other_seeds)

        plan = now()
        options = _Options(jobs, workers, trust, pages, idle, show)
        warn(*plan.warnings)
        if workers is not None:
            if asked_workers(workers) is None and (jobs or 1) > 1:
                raise OptionError(
                    f"--workers {workers} gives each run the whole machine, so one runs at a time. Leave out --jobs, "
                    "or write the number of workers of each run."
                )
            for cell in plan.cells:
                if cell.experiment is not None:
                    check_workers(runtime_of(cell.experiment))
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
    """Options of the command that are not about the suite itself; ``show`` prints the result as JSON with --json."""

    jobs: int | None
    workers: str | None
    trust: bool
    pages: bool
    idle: bool
    show: Callable[[Any], None]

    def at_a_time(self, plan: SuitePlan, total: int) -> int:
        """How many of ``total`` runs work side by side."""
        return min(self.jobs or default_jobs(plan, self.workers), max(1, total))


def _run(now: Callable[[], SuitePlan], options: _Options) -> None:
    """Run what is left, and show the results."""
    plan = now()
    record = plan.suite.record
    if record is not None:
        refuse_unwritable(record.resolve().parent, "name another file with --record.", make=True)
    for name, choice in plan.choices.items():
        if name in plan.selected:
            try_again(choice, record)
    plan = now()
    record_runs(plan.suite, (*plan.choosing.runs, *plan.runs))
    summarise(plan)  # reports a results file that cannot be read now, and not after the last run
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
    """Run the choice runs; the results of some of them call for further ones.

    Returns (whether the user did not stop it, the plan after them).
    """
    planned_before: set[Key] = set()
    while True:
        planned_before.update(run.key for run in plan.choosing.runs)
        finished = _run_all(plan.choosing, "choice run", options, ended)
        plan = now()  # a value at the end of a grid, if it is chosen, calls for further runs
        new_runs = [run for run in plan.choosing.left if run.key not in planned_before]  # the others have failed
        if not finished or not new_runs:
            return finished, plan


def _report_problems(plan: SuitePlan, ended: Sequence[SuiteRun], finished: bool) -> None:
    """End with an error where the user stopped the suite, a run failed, or nothing could be chosen."""
    this_command = shlex.join(["calfat", *sys.argv[1:]])
    if not finished:
        fail("stopped.", f"Finished runs are kept. Resume with:\n  {this_command}", INTERRUPTED)
    failed = sum(run.state not in ("finished", "lost") for run in ended)
    hopeless, guessing = [], []
    for name, choice in plan.choices.items():
        if name in plan.selected and choice.hopeless:
            hopeless.append(name)
        if name in plan.selected and choice.guessing:
            guessing.append(name)
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
    """Run what is left of the plan; returns False if the user stopped it. ``kind`` is what messages call its runs."""
    total = len(plan.left)
    for run in plan.left:
        runtime_of(run.experiment).refuse_without_host()
    at_a_time = options.at_a_time(plan, total)
    if total:
        share = counted(threads(at_a_time, options.workers), "thread")  # of the machine, for each run
        if options.workers is not None:
            number = processes(options.workers)
            if options.workers == str(number):
                share = f"{counted(number, 'worker')} of {share}"
            else:
                share = f"{share} for its workers"
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
    """Print what a suite that chooses values will do, and what it costs if that is known."""
    choose = plan.suite.choose
    if choose is None and plan.suite.seconds_per_round is None:
        return  # a suite without choices shows its cost only if its file says what a round costs
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
    # There is no page of rows that a record alone has: their run directories are elsewhere.
    if any(run.results is not None for cell in summary.cells for run in cell.runs):
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
    rows = []
    for run in plan.runs:
        words = None
        if run.directory in to_do:
            words = ["calfat", *command(plan, run, options.workers)]
        rows.append({"run": run.name, "state": run.state, "directory": str(run.directory), "command": words})
    return rows


def _parse_seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for word in text.split(","):
        word = word.strip()
        is_number = word.isdecimal() and len(word) <= len(str(MAX_SEED))  # Python refuses thousands of digits
        if not is_number or int(word) > MAX_SEED or int(word) in seeds:
            raise OptionError(f"--seeds: got '{short(text)}', expected different whole numbers such as 0,1,2.")
        seeds.append(int(word))
    return seeds


# --- on the console ---------------------------------------------------------------------------------------------------


_STYLES = {
    "finished": "green",
    "failed": "bold red",
    "lost": "red",
    "interrupted": "yellow",
    "elsewhere": "cyan",
    "not tried": "red",
}


class SuiteProgress(SuiteObserver):
    """Shows a suite of ``total`` runs on a console."""

    def __init__(self, console: Quiet, total: int) -> None:
        self._console = console
        self._total = total
        self._pace = Pace()
        console.patience -= 5  # a run prints its lines as seldom as this console: none shall come just too early
        self._ended = 0
        self._rounds: dict[str, tuple[int, int]] = {}  # of each run at work: rounds done, and all rounds
        self._paces: dict[str, Pace] = {}  # of each run at work, without the rounds that were done before
        self._data_findings: set[str] = set()  # that were shown; most runs of a suite have the same data

    def run_started(self, run: SuiteRun, rounds: int) -> None:
        self._paces[run.name] = Pace(rounds)
        doing = {"unfinished": "resuming", "unmeasured": f"measuring {', '.join(run.lacks)} of"}
        self._console.say(f"{doing.get(run.state, 'running')} {run.name} in {run.directory}", unless_drawn=True)
        self._console.at(run.name, 0, None, lambda: "starting")

    def run_progress(self, run: SuiteRun, rounds: int) -> None:
        total, pace = run.experiment.num_rounds, self._paces[run.name]
        self._rounds[run.name] = rounds, total
        pace.reached(rounds)
        self.run_said(run, f"round {rounds}/{total}  {pace.eta(total)}")
        self._show_suite()

    def run_said(self, run: SuiteRun, line: str) -> None:
        _, _, finding = line.partition(": data_args.dataset: ")
        if line.startswith("warning: ") and finding and finding not in self._data_findings:
            self._data_findings.add(finding)
            self._console.warn(f"{run.name}: data_args.dataset: {finding}")
        done, total = self._rounds.get(run.name, (0, None))
        self._console.at(run.name, done, total, lambda: line)

    def run_ended(self, run: SuiteRun) -> None:
        name = run.name
        width = len(str(self._total))
        self._ended += 1
        text = f"[{self._ended:>{width}}/{self._total}] {name}: {run.state}"
        if run.seconds:
            when = "in" if run.state == "finished" else "after"
            text += f" {when} {clock(run.seconds)}"
        if run.message:
            text += f": {run.message}"
        if run.state in ("failed", "lost"):
            text += f"  ({run.output})"
        self._rounds.pop(name, None)
        self._console.ended(name)
        self._console.say(text, _STYLES[run.state])
        self._show_suite()

    def _show_suite(self) -> None:
        self._pace.reached(self._ended + sum(done / total for done, total in self._rounds.values()))
        text = f"{self._ended}/{self._total} runs  "
        self._console.at("suite", self._ended, self._total, lambda: text + self._pace.eta(self._total))


def plan_lines(plan: SuitePlan) -> Iterable[str]:
    """What ``--dry-run`` shows: every run of the selected cells with its state, choice runs first."""
    for run in (*plan.choosing.runs, *plan.runs):
        if run.cell.name in plan.selected:
            yield f"{run.state:<10}  {run.name}  {run.directory}"
    for cell in plan.cells:
        if cell.skipped:
            yield f"{'skipped':<10}  {cell.name}: {cell.skipped}"
        elif cell.name not in plan.selected:
            yield f"{'left out':<10}  {cell.name}: --only does not select it"
        elif cell.name in plan.waiting:
            seeds = f"seed {plan.seeds[0]}"
            if len(plan.seeds) > 1:
                seeds = f"seeds {', '.join(map(str, plan.seeds))}"
            yield f"{'waiting':<10}  {cell.name}, {seeds}: until its values are chosen"
