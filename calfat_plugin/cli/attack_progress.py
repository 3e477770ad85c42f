"""What an attack looks like on the console: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from calfat_plugin.analyses.attack import Listener
from calfat_plugin.cli.progress import Lines
from calfat_plugin.report.numbers import percent
from calfat_plugin.results import EvaluationResult

_BAR_WIDTH = 24


class AttackProgress(Listener):
    """The base of both ways to show an attack. Use it as a context manager around the attack."""

    def __enter__(self) -> AttackProgress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave the console as it was found."""


class PlainAttackProgress(Lines, AttackProgress):
    """A line for every evaluation, and one every half minute inside a long one."""

    def progress(self, name: str, done: int, total: int, correct: int) -> None:
        if done < total and self.is_due():
            self.say(f"{name}: {100 * done // total} % done, {percent(correct / max(1, done))} left so far")

    def measured(self, result: EvaluationResult) -> None:
        self.say(f"{_summary(result)}  {result.seconds:.1f} s")


class LiveAttackProgress(AttackProgress):
    """A bar for the evaluation at work, and a line for every finished one above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=_BAR_WIDTH),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[left]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("reading", total=None, left="")
        self._name = ""

    def __enter__(self) -> LiveAttackProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def warn(self, message: str) -> None:
        self._console.print(f"warning: {message}", style="yellow", markup=False)

    def progress(self, name: str, done: int, total: int, correct: int) -> None:
        if name != self._name:
            self._name = name
            self._bar.reset(self._task, description=name, total=total, left="")
        left = f"{percent(correct / done)} left" if done else ""
        self._bar.update(self._task, completed=done, total=total, left=left)

    def measured(self, result: EvaluationResult) -> None:
        self._console.print(f"{_summary(result)}  {result.seconds:.1f} s", markup=False)


def _summary(result: EvaluationResult) -> str:
    budget = f" ({result.settings['norm']} {result.settings['eps']})" if "eps" in result.settings else ""
    strict = f", strict {percent(result.accuracy_strict)}" if result.accuracy_strict != result.accuracy else ""
    return f"{result.label}{budget}  {percent(result.accuracy)}{strict}"
