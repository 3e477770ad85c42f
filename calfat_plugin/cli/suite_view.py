"""What a suite looks like on the console: its progress, its plan and its table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from calfat_plugin.cli.progress import Pace, Quiet
from calfat_plugin.maths.intervals import Score
from calfat_plugin.report.numbers import clock, counted, interval_of
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
        self._console, self._total, self._pace = console, total, Pace()
        console.patience -= 5  # a run's own lines come as seldom, and none of them shall come just too early
        self._ended = 0
        self._rounds: dict[str, tuple[int, int]] = {}  # of each run at work, done and in all

    def __enter__(self) -> SuiteProgress:
        self._console.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._console.__exit__(*exc_info)

    def run_started(self, run: PlannedRun) -> None:
        resumed = run.state == "unfinished"
        self._console.say(f"{'resuming' if resumed else 'running'} {run.name} in {run.directory}", unless_drawn=True)
        self._console.at(run.name, 0, None, lambda: "starting")

    def run_progress(self, run: PlannedRun, round: int, num_rounds: int, eta: str) -> None:
        self._rounds[run.name] = round, num_rounds
        self.run_said(run, f"round {round}/{num_rounds}" + (f"  ETA {eta}" if eta else ""))
        self._show_whole()

    def run_said(self, run: PlannedRun, line: str) -> None:
        done, total = self._rounds.get(run.name, (0, None))
        self._console.at(run.name, done, total, lambda: line)

    def run_ended(self, outcome: RunOutcome) -> None:
        name, width = outcome.run.name, len(str(self._total))
        self._ended += 1
        text = f"[{self._ended:>{width}}/{self._total}] {name}: {outcome.status}"
        if outcome.seconds:
            text += f" {'in' if outcome.status == 'finished' else 'after'} {clock(outcome.seconds)}"
        if outcome.message:
            text += f": {outcome.message}"
        if outcome.status in ("failed", "lost"):
            text += f"  ({outcome.run.output})"
        self._rounds.pop(name, None)
        self._console.ended(name)
        self._console.say(text, _STYLES[outcome.status])
        self._show_whole()

    def _show_whole(self) -> None:
        self._pace.reached(self._ended + sum(done / total for done, total in self._rounds.values()))
        text = f"{self._ended}/{self._total} runs  "
        self._console.at("suite", self._ended, self._total, lambda: text + self._pace.eta(self._total))


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
