"""Progress of an attack on the console: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from calfat_plugin.analyses.attack import AttackObserver
from calfat_plugin.cli.progress import BAR_WIDTH, Lines
from calfat_plugin.cli.results import with_budget
from calfat_plugin.peer_text import printable
from calfat_plugin.report.numbers import percent
from calfat_plugin.results import EvaluationResult


class AttackProgress(Lines, AttackObserver):
    """A line for every evaluation; the one at work has a bar on a terminal, and elsewhere a line every half minute.

    Args:
        console: a terminal; None: standard output is none.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(sys.stdout, sys.stderr)
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(BAR_WIDTH),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[left]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("reading", total=None, left="")

    def __enter__(self) -> AttackProgress:
        if self._console is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._console is not None:
            self._bar.stop()

    def warn(self, message: str) -> None:
        if self._console is None:
            super().warn(message)
        else:
            self._console.print(f"warning: {printable(message)}", style="yellow")

    def say(self, line: str) -> None:
        if self._console is None:
            super().say(line)
        else:
            self._console.print(printable(line))

    def progress(self, name: str, done: int, total: int, correct: int) -> None:
        if self._console is None:
            if done < total and self.is_due():
                self.say(f"{name}: {100 * done // total} % done, {percent(correct / max(1, done))} left so far")
            return
        if name != self._bar.tasks[0].description:
            self._bar.reset(self._task, description=name, total=total, left="")
        left = f"{percent(correct / done)} left" if done else ""
        self._bar.update(self._task, completed=done, left=left)

    def measured(self, result: EvaluationResult) -> None:
        differs = result.accuracy_release != result.accuracy
        release = f", release {percent(result.accuracy_release)}" if differs else ""
        self.say(f"{with_budget(result)}  {percent(result.accuracy)}{release}  {result.seconds:.1f} s")
