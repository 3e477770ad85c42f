"""What a run looks like on the console: live bars on a terminal, a plain line a round elsewhere."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from calfat_plugin.observer import BatchProgress, RunObserver
from calfat_plugin.peer_text import printable
from calfat_plugin.report.numbers import percent
from calfat_plugin.results import RoundRecord, RunInfo

_REFRESH_PER_SECOND = 5
BAR_WIDTH = 24
_WIDTH_WITH_BAR = 72  # columns: name, bar and the longest usual figures
_MOST_LINES = 30  # lines of finished rounds that a live run leaves on the screen


class RoundClock:
    """Time left, from the mean of the rounds done by this process."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._done = 0

    def elapsed(self) -> str:
        """Time since the start, as ``m:ss`` or ``h:mm:ss``."""
        return clock(time.perf_counter() - self._started)

    def round_done(self) -> None:
        """Count a round."""
        self._done += 1
        self._last = time.perf_counter()

    def eta(self, rounds_left: int) -> str:
        """``m:ss`` or ``h:mm:ss``, counting down within a round; ``-:--`` before the first round is done."""
        if self._done == 0:
            return "-:--"
        mean = (self._last - self._started) / self._done
        return clock(max(0.0, rounds_left * mean - (time.perf_counter() - self._last)))


def clock(seconds: float) -> str:
    """``75`` becomes ``1:15``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _round_line(record: RoundRecord, num_rounds: int) -> str:
    """One finished round in a line."""
    parts = [f"round {record.round:>{len(str(num_rounds))}}/{num_rounds}", *_scores(record)]
    if record.refused:
        parts.append(f"refused {', '.join(map(str, record.refused))}")
    return "  ".join([*parts, f"{record.seconds:.1f} s"])


def _scores(record: RoundRecord) -> list[str]:
    accuracies = [f"{label} {percent(result.accuracy)}" for label, result in record.evaluations.items()]
    return [*accuracies, f"loss {record.loss:.3f}"]


def _begin(run: RunInfo) -> str:
    if run.start_round > run.num_rounds:
        return f"all {run.num_rounds} rounds are done, resuming at the final evaluation"
    resumed = f"resuming at round {run.start_round} of" if run.start_round > 1 else "running"
    return f"{resumed} {run.num_rounds} round{'s' if run.num_rounds > 1 else ''}"


def _groups(run: RunInfo) -> str:
    """``; groups of clients: liars (attackers), weak``; nothing without groups."""
    groups = run.recipe.get("calfat", {}).get("clients") or ()
    names = [f"{group['name']}{' (attackers)' * ('attacker' in group)}" for group in groups]
    return f"; groups of clients: {', '.join(names)}" if names else ""


class RunProgress(RunObserver):
    """The base of both ways to show a run, and itself shows nothing. Use it as a context manager around the run.

    Attributes:
        begun: whether the run got as far as its rounds.
        in_rounds: whether one of them was begun.
        owes_round: whether rounds are left to do, and this process has not finished one.
    """

    def __init__(self) -> None:
        self.begun = self.in_rounds = self.owes_round = False
        self._clock = RoundClock()
        self._num_rounds = 0
        self._clients: Sequence[int] = ()

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave the console as it was found."""

    def warn(self, message: str) -> None:
        """Show a finding that does not stop the run."""
        warnings.warn(message, stacklevel=2)

    def run_started(self, run: RunInfo) -> None:
        self.begun, self._num_rounds, self._clock = True, run.num_rounds, RoundClock()
        self.owes_round = run.start_round <= run.num_rounds

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        self.in_rounds, self._clients = True, clients

    def round_finished(self, record: RoundRecord) -> None:
        self.owes_round = False
        self._clock.round_done()
        for alarm in record.alarms:
            self.warn(f"round {record.round}: {alarm}.")


class Lines:
    """Plain lines, for pipes and CI, and one every half minute inside what takes longer.

    Attributes:
        patience: seconds after which a line is due.
    """

    patience = 30.0

    def __init__(self, stream: TextIO, errors: TextIO) -> None:
        self._stream, self._errors = stream, errors
        self._last_line = time.perf_counter()

    def warn(self, message: str) -> None:
        """Show a finding that does not stop anything."""
        print(f"warning: {printable(message)}", file=self._errors, flush=True)

    def is_due(self) -> bool:
        """Whether the last line was printed long ago."""
        return time.perf_counter() - self._last_line >= self.patience

    def say(self, line: str) -> None:
        """Print a line."""
        self._last_line = time.perf_counter()
        print(printable(line), file=self._stream, flush=True)


class PlainProgress(Lines, RunProgress):
    """A line a round."""

    def __init__(self, stream: TextIO, errors: TextIO) -> None:
        Lines.__init__(self, stream, errors)
        RunProgress.__init__(self)
        self._round = 0

    def run_started(self, run: RunInfo) -> None:
        super().run_started(run)
        self.say(f"{run.name}: {_begin(run)} in {run.directory}{_groups(run)}")

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        super().round_started(round, clients)
        self._round = round

    def client_progress(self, progress: BatchProgress) -> None:
        if self.is_due():
            at = f"client {progress.client} of {len(self._clients)}, batch {progress.batch} of {progress.num_batches}"
            self.say(f"in round {self._round}: {at}, loss {progress.loss:.3f}")

    def evaluation_progress(self, label: str, done: int, total: int, correct: int) -> None:
        if done < total and self.is_due():
            self.say(f"{label}: {100 * done // total} % done, {percent(correct / max(1, done))} so far")

    def round_finished(self, record: RoundRecord) -> None:
        super().round_finished(record)
        eta = self._clock.eta(self._num_rounds - record.round)
        self.say(f"{_round_line(record, self._num_rounds)}  ETA {eta}")


class LiveProgress(RunProgress):
    """A bar for the run, a bar for the work inside the round, and the last round's scores below them.

    Some finished rounds are printed above: enough to see the course of the run, however many rounds it has.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._done: dict[int, float] = {}  # client to its share of its training
        # Where the terminal is narrow, the bar is what gives way, and not the figures.
        bar = () if console.width < _WIDTH_WITH_BAR else (BarColumn(BAR_WIDTH),)
        self._bars = Progress(TextColumn("{task.description}", markup=False), *bar, _Detail(), console=console)
        self._rounds = self._bars.add_task("run", total=None, visible=False, detail=lambda: "")
        self._work = self._bars.add_task("", total=None, detail=lambda: "starting PyTorch and FedML")
        self._scores = Text("", no_wrap=True, overflow="ellipsis")
        self._drawn = 0.0
        self._live = Live(
            get_renderable=lambda: Group(self._bars, self._scores) if self._scores.plain else self._bars,
            console=console,
            # In a notebook a thread that draws would take lines printed meanwhile into its picture, and wipe them out.
            auto_refresh=not console.is_jupyter,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._draw_in_notebook(at_once=True)
        self._live.stop()

    def warn(self, message: str) -> None:
        self._console.print(Text.assemble(("warning: ", "bold yellow"), printable(message)))

    def run_started(self, run: RunInfo) -> None:
        super().run_started(run)
        begun = f": {_begin(run)} in {run.directory}{_groups(run)}"
        self._console.print(Text.assemble((run.name, "bold"), begun), soft_wrap=True)
        self._bars.update(
            self._rounds, visible=True, total=run.num_rounds, completed=run.start_round - 1, detail=self._course
        )
        self._begin_work("final" if run.start_round > run.num_rounds else "")

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        super().round_started(round, clients)
        self._done = {}
        self._begin_work(f"round {round}")

    def client_progress(self, progress: BatchProgress) -> None:
        self._done[progress.client] = progress.batch / progress.num_batches
        text = f"client {progress.client} ({len(self._done)} of {len(self._clients)})  loss {progress.loss:.3f}"
        self._bars.update(self._work, completed=sum(self._done.values()), total=len(self._clients), detail=lambda: text)
        self._draw_in_notebook()

    def evaluation_progress(self, label: str, done: int, total: int, correct: int) -> None:
        text = f"{label} {percent(correct / max(1, done))}"
        self._bars.update(self._work, completed=done, total=total, detail=lambda: text)
        self._draw_in_notebook()

    def round_finished(self, record: RoundRecord) -> None:
        super().round_finished(record)
        num_rounds = self._num_rounds
        self._bars.update(self._rounds, completed=record.round)
        self._scores.plain = "  ".join([f"after round {record.round}:", *_scores(record)])
        if record.round % _lines_every(num_rounds) == 0 or record.round == num_rounds:
            self._console.print(Text(_round_line(record, num_rounds)))
        if record.refused:
            reasons = "; ".join(record.refused.values())
            self._console.print(Text(f"round {record.round}: refused {reasons}", style="yellow"))
        if record.round == num_rounds:
            self._begin_work("final")

    def _draw_in_notebook(self, *, at_once: bool = False) -> None:
        now = time.perf_counter()
        if self._console.is_jupyter and (at_once or now - self._drawn >= 1 / _REFRESH_PER_SECOND):
            self._drawn = now
            self._live.refresh()

    def _begin_work(self, name: str) -> None:
        self._bars.update(self._work, description=name, completed=0, total=1, detail=lambda: "")

    def _course(self) -> str:
        """Where the run is; made anew for each picture, so that its clocks run."""
        done = round(self._bars.tasks[0].completed)
        left = self._num_rounds - done
        eta = f"  ETA {self._clock.eta(left)}" if left else ""
        return f"{done}/{self._num_rounds} rounds  {self._clock.elapsed()}{eta}"


def verbatim_console(file: TextIO | None = None) -> Console:
    """A console that prints what it is given: a path, a title or a label may hold what rich takes for its markup."""
    return Console(file=file, highlight=False, markup=False, emoji=False)


def can_draw(console: Console) -> bool:
    """Whether bars can move there: on a terminal, and in a notebook with ipywidgets."""
    if console.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal


def choose_progress(console: Console, *, plain: bool = False) -> RunProgress:
    """Bars where they can move, else lines; ``plain``: lines anyway."""
    return LiveProgress(console) if can_draw(console) and not plain else PlainProgress(sys.stdout, sys.stderr)


class _Detail(ProgressColumn):
    """What a task's ``detail`` says at this moment."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=False))  # the column that gives way where the terminal is narrow

    def render(self, task: Task) -> Text:
        detail: Callable[[], str] = task.fields["detail"]
        return Text(detail(), no_wrap=True, overflow="ellipsis")


def _lines_every(num_rounds: int) -> int:
    """Print every so many rounds: 1, 2, 5, 10, 20, 50 ..., the least that keeps to ``_MOST_LINES``."""
    steps = (digit * int(10**power) for power in itertools.count() for digit in (1, 2, 5))
    return next(step for step in steps if num_rounds <= _MOST_LINES * step)
