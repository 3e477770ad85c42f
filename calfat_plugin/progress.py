"""Progress on the console: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from calfat_plugin.observer import BatchProgress, RunObserver
from calfat_plugin.peer_text import printable
from calfat_plugin.report.numbers import accuracy_text, clock, percent
from calfat_plugin.results import NOT_RUN, RoundRecord, RunInfo

_REFRESH_PER_SECOND = 5
_BAR_WIDTH = 24
_WIDTH_WITH_BAR = 72  # columns: name, bar and the longest usual figures
_MOST_LINES = 30  # lines of finished rounds that a live run leaves on the screen

# --- the console ------------------------------------------------------------------------------------------------------


class Quiet:
    """A console that shows warnings alone, as Python does. Use it as a context manager around the work."""

    patience = 30.0  # seconds after its last line before the next one on work at hand

    def __init__(self) -> None:
        self._show_warning, self._stderr = warnings.showwarning, sys.stderr

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave the terminal as it was found."""

    def warn(self, message: str) -> None:
        """Show a finding that does not stop anything."""
        of_log = warnings.showwarning  # while a run lasts, what Python shows goes to its log alone
        warnings.showwarning = self._show_warning
        try:
            with redirect_stderr(self._stderr):
                warnings.warn(message, stacklevel=3)
        finally:
            warnings.showwarning = of_log

    def say(self, line: str, style: str = "", *, unless_drawn: bool = False) -> None:
        """Print a line that stays; ``unless_drawn``: not where bars say the same."""

    def at(self, work: str, done: float, total: float | None, detail: Callable[[], str]) -> None:
        """Show how far a piece of work is."""

    def ended(self, work: str) -> None:
        """Remove a piece of work."""

    def note(self, text: str) -> None:
        """Show a text until the next note."""


class Lines(Quiet):
    """Plain lines, for pipes and CI; of the work at hand, one where the last line was printed long ago."""

    def __init__(self, stream: TextIO | None = None, errors: TextIO | None = None) -> None:
        self._stream, self._errors = stream or sys.stdout, errors or sys.stderr
        self._last_line = time.perf_counter()

    def warn(self, message: str) -> None:
        print(f"warning: {printable(message)}", file=self._errors, flush=True)

    def say(self, line: str, style: str = "", *, unless_drawn: bool = False) -> None:
        self._last_line = time.perf_counter()
        print(printable(line), file=self._stream, flush=True)

    def at(self, work: str, done: float, total: float | None, detail: Callable[[], str]) -> None:
        if time.perf_counter() - self._last_line >= self.patience:
            self.say(f"{work}: {detail()}")


class Bars(Quiet):
    """A bar for each piece of work, the last note below them, and above them the lines that stay."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
        if console.width >= _WIDTH_WITH_BAR:  # on a narrow terminal the figures need the room
            columns.append(BarColumn(_BAR_WIDTH))
        self._bars = Progress(*columns, _Detail(), console=console)
        self._tasks: dict[str, TaskID] = {}
        self._note = Text("", no_wrap=True, overflow="ellipsis")
        self._drawn = 0.0
        self._live = Live(
            get_renderable=self._picture,
            console=console,
            # In a notebook, a thread that draws would erase lines that are printed meanwhile.
            auto_refresh=not console.is_jupyter,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def _picture(self) -> RenderableType:
        if not self._note.plain:
            return self._bars
        return Group(self._bars, self._note)

    def __enter__(self) -> Bars:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._draw_in_notebook(at_once=True)
        self._live.stop()

    def warn(self, message: str) -> None:
        self._console.print(Text.assemble(("warning: ", "bold yellow"), printable(message)))

    def say(self, line: str, style: str = "", *, unless_drawn: bool = False) -> None:
        if not unless_drawn:
            self._console.print(Text(printable(line), style), soft_wrap=True)

    def at(self, work: str, done: float, total: float | None, detail: Callable[[], str]) -> None:
        if work not in self._tasks:
            self._tasks[work] = self._bars.add_task(work, total=None, detail=detail)
        self._bars.update(self._tasks[work], completed=done, total=total, detail=detail)
        self._draw_in_notebook()

    def ended(self, work: str) -> None:
        if work in self._tasks:
            self._bars.remove_task(self._tasks.pop(work))

    def note(self, text: str) -> None:
        self._note.plain = text

    def _draw_in_notebook(self, *, at_once: bool = False) -> None:
        now = time.perf_counter()
        if self._console.is_jupyter and (at_once or now - self._drawn >= 1 / _REFRESH_PER_SECOND):
            self._drawn = now
            self._live.refresh()


class _Detail(ProgressColumn):
    """What a task's ``detail`` says at this moment."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=False))  # the column that gives way where the terminal is narrow

    def render(self, task: Task) -> Text:
        detail: Callable[[], str] = task.fields["detail"]
        return Text(detail(), no_wrap=True, overflow="ellipsis")


def verbatim_console(file: TextIO | None = None) -> Console:
    """A console that prints texts as they are, because a path, a title or a label may look like rich's markup."""
    return Console(file=file, highlight=False, markup=False, emoji=False)


def can_draw(console: Console) -> bool:
    """Whether bars can move there: on a terminal, and in a notebook with ipywidgets."""
    if console.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal


def lines_or_bars(console: Console, *, plain: bool = False) -> Quiet:
    """Bars where they can move, else lines; ``plain``: lines everywhere."""
    if can_draw(console) and not plain:
        return Bars(console)
    return Lines()


class Pace:
    """An estimate of the time left, at the pace since ``done``. It counts down until more is done."""

    def __init__(self, done: float = 0) -> None:
        self._start = self._done = done
        self._started = self._last = time.perf_counter()

    def reached(self, done: float) -> None:
        """Note how much is done now."""
        self._done, self._last = done, time.perf_counter()

    def eta(self, total: float) -> str:
        """``ETA 1:15``, and ``ETA -:--`` until more is done than at the start."""
        if self._done <= self._start:
            return "ETA -:--"
        seconds_each = (self._last - self._started) / (self._done - self._start)
        left = (total - self._done) * seconds_each - (time.perf_counter() - self._last)
        return f"ETA {clock(max(0.0, left))}"

    def elapsed(self) -> str:
        """Time since the start, as ``m:ss`` or ``h:mm:ss``."""
        return clock(time.perf_counter() - self._started)


# --- what it shows ----------------------------------------------------------------------------------------------------


class ShownProgress(RunObserver):
    """Shows a run, an attack or a judgement on a console. Use it as a context manager around it.

    Attributes:
        begun: whether the run was set up, so that its rounds could begin.
        in_rounds: whether a round was begun.
        owes_round: whether rounds are left to do, and this process has not finished one.
    """

    def __init__(self, console: Quiet | None = None) -> None:
        self._console = Quiet() if console is None else console
        self.begun = self.in_rounds = self.owes_round = False
        self._num_rounds = 0
        self._rounds = Pace()
        self._part = ""  # of the run: a round, or its final evaluation
        self._num_clients = 0  # in this round
        self._shares: dict[int, float] = {}  # client of this round to the share of its training that is done
        self._label = ""  # of the evaluator at work
        self._evaluated = Pace()
        self._work = "starting"  # what the console calls the work at hand
        self._not_run: set[str] = set()  # findings about monitored attacks that were shown

    def __enter__(self) -> ShownProgress:
        self._console.__enter__()
        self._console.at(self._work, 0, None, str)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._console.__exit__(*exc_info)

    def warn(self, message: str) -> None:
        self._console.warn(message)

    def say(self, line: str) -> None:
        self._console.say(line)

    def run_started(self, run: RunInfo) -> None:
        done = run.start_round - 1
        self.begun, self.owes_round = True, done < run.num_rounds and run.stop is None
        self._num_rounds, self._rounds = run.num_rounds, Pace(done)
        rounds = f"{run.num_rounds} round{'s' if run.num_rounds > 1 else ''}"
        if run.stop is not None:
            start = f"{run.stop}; resuming at the final evaluation"
        elif not self.owes_round:
            start = f"all {run.num_rounds} rounds are done, resuming at the final evaluation"
        elif done:
            start = f"resuming at round {run.start_round} of {rounds}"
        else:
            start = f"running {rounds}"
        line = f"{run.name}: {start} in {run.directory}"
        names = []
        for group in run.recipe.get("calfat", {}).get("clients") or ():
            names.append(f"{group['name']} (attackers)" if "attacker" in group else group["name"])
        if names:
            line += f"; groups of clients: {', '.join(names)}"
        self.say(line)
        self._console.ended(self._work)
        self._show_rounds(done)

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        self.in_rounds, self._num_clients, self._shares = True, len(clients), {}
        self._begin_part(f"round {round}")

    def client_progress(self, progress: BatchProgress) -> None:
        self._shares[progress.client] = progress.batch / progress.num_batches
        text = f"client {progress.client} ({len(self._shares)} of {self._num_clients})  loss {progress.loss:.3f}"
        self._console.at(self._work, sum(self._shares.values()), self._num_clients, lambda: text)

    def evaluation_progress(self, label: str, done: int, total: int, correct: int) -> None:
        if label != self._label:
            self._label, self._evaluated = label, Pace(done)
            if not self._part:
                self._begin(label)
        self._evaluated.reached(done)
        text = f"{percent(correct / max(1, done))} right, {100 * done // total} % done  "
        if self._part:
            text = f"{label} {text}"
        self._console.at(self._work, done, total, lambda: text + self._evaluated.eta(total))

    def round_finished(self, record: RoundRecord) -> None:
        self.owes_round = False
        for alarm in record.alarms:
            if alarm.startswith(NOT_RUN):  # it is the same in each round
                if alarm in self._not_run:
                    continue
                self._not_run.add(alarm)
            self.warn(f"round {record.round}: {alarm}.")
        self._rounds.reached(record.round)
        total = self._num_rounds
        scores = scores_of(record)
        words = [*scores]
        if record.refused:
            words.append(f"refused {', '.join(map(str, record.refused))}")
        words += [f"{record.seconds:.1f} s", self._rounds.eta(total)]
        is_last = record.round == total or record.stop is not None
        # On a terminal a long run shows some of its rounds as lines; the note below the bars is about the last one.
        self._console.say(
            f"round {record.round:>{len(str(total))}}/{total}  {'  '.join(words)}",
            unless_drawn=record.round % _lines_every(total) != 0 and not is_last,
        )
        if record.refused:
            self._console.say(f"round {record.round}: refused {'; '.join(record.refused.values())}", "yellow")
        self._console.note("  ".join([f"after round {record.round}:", *scores]))
        self._show_rounds(record.round)
        if record.stop is not None:
            self._console.say(str(record.stop), "yellow")
        if is_last:
            self._begin_part("final")

    def _show_rounds(self, done: int) -> None:
        total, pace = self._num_rounds, self._rounds

        def course() -> str:
            text = f"{done}/{total} rounds  {pace.elapsed()}"
            if done < total:
                text += f"  {pace.eta(total)}"
            return text

        self._console.at("run", done, total, course)

    def _begin_part(self, name: str) -> None:
        self._part, self._label = name, ""
        self._begin(name)

    def _begin(self, work: str) -> None:
        """Show this work instead of the last one."""
        self._console.ended(self._work)
        self._work = work
        self._console.at(work, 0, 1, str)


def scores_of(record: RoundRecord) -> list[str]:
    """What a round measured, as words of its line."""
    accuracies = [f"{label} {accuracy_text(result.accuracy)}" for label, result in record.evaluations.items()]
    return [*accuracies, f"loss {record.loss:.3f}"]


def choose_progress(console: Console, *, plain: bool = False) -> ShownProgress:
    """Progress as bars where they can move, else as lines."""
    return ShownProgress(lines_or_bars(console, plain=plain))


def _lines_every(num_rounds: int) -> int:
    """Print every so many rounds: 1, 2, 5, 10, 20, 50 ..., the least that keeps to ``_MOST_LINES``."""
    power_of_ten = 1
    while True:
        for digit in (1, 2, 5):
            if num_rounds <= _MOST_LINES * digit * power_of_ten:
                return digit * power_of_ten
        power_of_ten *= 10
