"""What a suite looks like on the console: live bars on a terminal, a plain line a run elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from calfat_plugin.cli.progress import Lines, clock
from calfat_plugin.maths.intervals import Score
from calfat_plugin.peer_text import printable
from calfat_plugin.report.numbers import counted, interval_of
from calfat_plugin.suites.cells import PlannedRun, RunOutcome
from calfat_plugin.suites.plan import SuitePlan
from calfat_plugin.suites.runner import SuiteObserver
from calfat_plugin.suites.summary import SuiteSummary
from calfat_plugin.suites.tables import (
    NOTHING,
    beside,
    caption,
    columns,
    count,
    headings,
    measured,
    names,
    notes,
)

_REFRESH_PER_SECOND = 5
_STYLES = {
    "finished": "green",
    "failed": "bold red",
    "lost": "red",
    "interrupted": "yellow",
    "elsewhere": "cyan",
    "not tried": "red",
}


def outcome_line(outcome: RunOutcome, done: int, total: int) -> str:
    """One ended run in a line: ``[ 3/21] CalFAT seed 0: finished in 1:15``."""
    width = len(str(total))
    text = f"[{done:>{width}}/{total}] {outcome.run.name}: {outcome.status}"
    if outcome.seconds:
        text += f" {'in' if outcome.status == 'finished' else 'after'} {clock(outcome.seconds)}"
    if outcome.message:
        text += f": {printable(outcome.message)}"
    if outcome.status in ("failed", "lost"):
        text += f"  ({outcome.run.output})"
    return text


class PlainSuiteProgress(Lines, SuiteObserver):
    """A line when a run starts and one when it ends; between them, every half minute, how far one of the runs is.

    Args:
        total: how many runs are to do.
    """

    patience = Lines.patience - 5  # a run's own lines come as seldom, and none of them shall come just too early

    def __init__(self, total: int) -> None:
        super().__init__(sys.stdout, sys.stderr)
        self._total, self._done = total, 0

    def run_started(self, run: PlannedRun) -> None:
        self.say(f"{'resuming' if run.state == 'unfinished' else 'running'} {run.name} in {run.directory}")

    def run_progress(self, run: PlannedRun, round: int, num_rounds: int, eta: str) -> None:
        if self.is_due():
            self.say(f"{run.name}: round {round}/{num_rounds}" + (f"  ETA {eta}" if eta else ""))

    def run_said(self, run: PlannedRun, line: str) -> None:
        if self.is_due():
            self.say(f"{run.name}: {line}")

    def run_ended(self, outcome: RunOutcome) -> None:
        self._done += 1
        self.say(outcome_line(outcome, self._done, self._total))


class LiveSuiteProgress(SuiteObserver):
    """A bar for the suite, one for each running cell, and a line above them for each run that ended."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._done = console, total, 0
        self._tasks: dict[str, TaskID] = {}
        self._started = time.perf_counter()
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[detail]}"),
            console=console,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=True,
        )
        self._whole = self._bars.add_task("suite", total=total, detail=f"0/{total} runs")

    def __enter__(self) -> SuiteObserver:
        self._bars.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bars.stop()

    def run_started(self, run: PlannedRun) -> None:
        self._tasks[run.name] = self._bars.add_task(run.name, total=None, detail="starting")

    def run_progress(self, run: PlannedRun, round: int, num_rounds: int, eta: str) -> None:
        detail = f"round {round}/{num_rounds}" + (f"  ETA {eta}" if eta else "")
        if round == num_rounds:
            detail = "evaluating"  # with AutoAttack as long as many rounds
        self._bars.update(self._tasks[run.name], total=num_rounds, completed=round, detail=detail)
        self._show_whole()

    def run_ended(self, outcome: RunOutcome) -> None:
        self._done += 1
        task = self._tasks.pop(outcome.run.name, None)
        if task is not None:
            self._bars.remove_task(task)
        line = outcome_line(outcome, self._done, self._total)
        self._console.print(Text(line, style=_STYLES[outcome.status]), soft_wrap=True)
        self._show_whole()

    def _show_whole(self) -> None:
        done = self._done + sum(task.percentage / 100 for task in self._bars.tasks[1:])
        spent = time.perf_counter() - self._started
        eta = clock(spent * (self._total - done) / done) if done else "-:--"
        self._bars.update(self._whole, completed=done, detail=f"{self._done}/{self._total} runs  ETA {eta}")


def suite_table(summary: SuiteSummary) -> Table:
    """The table for a terminal: measured, and beneath it its interval and the published number with the difference.

    What was chosen for a row and the verdict on it stand beneath its name: in columns of their own they would leave the
    numbers no room. Where the terminal is narrow, cells are folded, never cut.
    """
    table = Table(title=summary.suite.title, title_justify="left")
    axes, more = len(summary.suite.axes), columns(summary)[len(summary.suite.axes) :]
    for position, name in enumerate(summary.suite.axes, start=1):
        table.add_column(Text(name), no_wrap=position < axes or not more, overflow="fold")
    table.add_column("n", justify="right", overflow="fold")
    for heading in headings(summary):
        table.add_column(Text(heading), justify="right", overflow="fold")
    for group in summary.groups():
        for cell in group:
            texts = names(summary, cell)
            row = [*map(Text, texts[:axes])]
            for what, text in zip(more, texts[axes:], strict=True):
                if text != NOTHING:
                    row[-1].append(f"\n{what}: {text}", "dim")
            table.add_row(*row, count(cell), *map(_score, cell.scores.values()))
        table.add_section()
    return table


def _score(score: Score) -> Text:
    # One word, so that a fold comes before it.
    text = Text(measured(score).replace("± ", "±"), "bold" if score.is_clear_best else "")
    if found := interval_of(score):
        text.append(f"\n{found}", style="not bold dim")
    if known := beside(score):
        style = "yellow" if score.beyond else "green" if score.beyond is False else "dim"
        text.append(f"\n({known})", style=f"not bold {style}")
    return text


def remarks(summary: SuiteSummary) -> list[str]:
    """The lines beneath the table."""
    return [caption(summary), *(f"{cell}: {note}" for cell, note in notes(summary))]


def plan_lines(plan: SuitePlan) -> Iterable[str]:
    """What ``--dry-run`` shows: every run with its state, choice runs first."""
    for run in (*plan.choosing.runs, *plan.runs):
        state = run.state if not run.to_do or run.cell.name in plan.selected else "left out"
        yield f"{state:<10}  {run.name}  {run.directory}"
    for name, choice in plan.choices.items():
        if choice.finals:
            runs = counted(choice.finals, "choice run")
            yield f"{'waiting':<10}  {name}, {runs}: until the first seed has tried all values"
    for cell in plan.cells:
        if cell.skipped:
            yield f"{'skipped':<10}  {cell.name}: {cell.skipped}"
        if cell.name in plan.waiting:
            seeds = f"seed{'s' * (len(plan.seeds) > 1)} {', '.join(map(str, plan.seeds))}"
            yield f"{'waiting':<10}  {cell.name}, {seeds}: until its values are chosen"
