"""What a suite looks like on the console: its progress and its plan."""

from __future__ import annotations

from collections.abc import Iterable

from calfat_plugin.progress import Pace, Quiet
from calfat_plugin.report.numbers import clock
from calfat_plugin.suites.cells import SuiteRun
from calfat_plugin.suites.plan import SuitePlan
from calfat_plugin.suites.runner import SuiteObserver

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
        console.patience -= 5  # a run's own lines come as seldom, and none of them shall come just too early
        self._ended = 0
        self._rounds: dict[str, tuple[int, int]] = {}  # of each run at work, done and in all
        self._paces: dict[str, Pace] = {}  # of each run at work, from the rounds that it began with
        self._data_findings: set[str] = set()  # texts; most runs of a suite have the same data

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
        self._show_whole()

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
        self._show_whole()

    def _show_whole(self) -> None:
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
