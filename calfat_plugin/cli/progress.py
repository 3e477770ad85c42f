"""What a run looks like on the console: live bars on a terminal, a plain line a round elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from calfat_plugin.interfaces import BatchProgress, RunObserver
from calfat_plugin.results import EvaluationResult, RoundRecord, RunInfo, RunResult

_REFRESH_PER_SECOND = 5


class RoundClock:
    """Time left, from the mean of the rounds done by this process."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.done = 0

    def eta(self, rounds_left: int) -> str:
        """``m:ss`` or ``h:mm:ss``; ``-:--`` before the first round is done."""
        if self.done == 0:
            return "-:--"
        return clock(rounds_left * (time.perf_counter() - self.started) / self.done)


def clock(seconds: float) -> str:
    """``75`` becomes ``1:15``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def percent(fraction: float) -> str:
    """``0.8342`` becomes ``83.4 %``."""
    return f"{100 * fraction:.1f} %"


class PlainProgress(RunObserver):
    """A line a round, for pipes and CI."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._info: RunInfo | None = None
        self._clock = RoundClock()

    def run_started(self, run: RunInfo) -> None:
        self._info = run
        self._clock = RoundClock()
        begin = f"resuming at round {run.start_round} of" if run.start_round > 1 else "running"
        self._say(f"{run.name}: {begin} {run.num_rounds} rounds in {run.directory}")

    def round_finished(self, record: RoundRecord) -> None:
        if self._info is None:
            return
        self._clock.done += 1
        self._say(round_line(record, self._info.num_rounds, self._clock))

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def round_line(record: RoundRecord, num_rounds: int, timer: RoundClock) -> str:
    """One finished round in a line."""
    width = len(str(num_rounds))
    parts = [f"round {record.round:>{width}}/{num_rounds}"]
    parts += [f"{label} {percent(result.accuracy)}" for label, result in record.evaluations.items()]
    parts.append(f"loss {mean_loss(record):.3f}")
    if record.refused:
        parts.append(f"refused {', '.join(map(str, record.refused))}")
    parts += [f"{record.seconds:.1f} s", f"ETA {timer.eta(num_rounds - record.round)}"]
    return "  ".join(parts)


def mean_loss(record: RoundRecord) -> float:
    """Mean of the clients' training losses."""
    return sum(record.losses.values()) / max(1, len(record.losses))


class LiveProgress(RunObserver):
    """Two bars that follow rounds and the work inside a round, and a line a round above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._info: RunInfo | None = None
        self._clock = RoundClock()
        self._clients: Sequence[int] = ()
        self._losses: dict[int, float] = {}
        self._rounds = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[scores]}"),
            TimeElapsedColumn(),
            TextColumn("ETA {task.fields[eta]}"),
            console=console,
        )
        self._work = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[detail]}"),
            console=console,
        )
        self._round_task = self._rounds.add_task("rounds", total=None, scores="", eta="-:--")
        self._work_task = self._work.add_task("      ", total=None, detail="starting FedML")
        self._live = Live(
            Group(self._rounds, self._work),
            console=console,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def run_started(self, run: RunInfo) -> None:
        self._info = run
        self._clock = RoundClock()
        begin = f"resuming at round {run.start_round}" if run.start_round > 1 else "starting"
        self._console.print(Text.assemble((run.name, "bold"), f": {begin}, {run.directory}"))
        self._rounds.update(self._round_task, total=run.num_rounds, completed=run.start_round - 1)
        self._live.start()

    def stop(self) -> None:
        """Take the bars away; safe to call at any time."""
        self._live.stop()

    def round_started(self, round: int, clients: Sequence[int]) -> None:
        self._clients, self._losses = clients, {}
        self._work.update(self._work_task, description=f"round {round}", completed=0, total=1, detail="")

    def client_progress(self, progress: BatchProgress) -> None:
        self._losses[progress.client] = progress.loss
        done = len(self._losses) - 1 + progress.batch / progress.num_batches
        self._work.update(
            self._work_task,
            completed=done,
            total=len(self._clients),
            detail=f"client {progress.client}  loss {progress.loss:.3f}",
        )

    def evaluation_progress(self, label: str, done: int, total: int, correct: int) -> None:
        self._work.update(
            self._work_task,
            completed=done,
            total=total,
            detail=f"evaluating {label}  {percent(correct / max(1, done))}",
        )

    def round_finished(self, record: RoundRecord) -> None:
        if self._info is None:
            return
        self._clock.done += 1
        scores = "  ".join(f"{label} {percent(result.accuracy)}" for label, result in record.evaluations.items())
        fields = {"eta": self._clock.eta(self._info.num_rounds - record.round)}
        if scores:
            fields["scores"] = scores
        self._rounds.update(self._round_task, completed=record.round, **fields)  # type: ignore[arg-type]
        if record.refused:
            reasons = "; ".join(record.refused.values())
            self._console.print(Text(f"round {record.round}: refused {reasons}", style="yellow"))

    def run_finished(self, result: RunResult) -> None:
        self.stop()


def results_table(result: RunResult) -> Table:
    """The final evaluation as a table."""
    table = Table(title="global model after the final round, full test split", title_justify="left")
    table.add_column("evaluator")
    for heading in ("accuracy", "strict", "examples", "seconds"):
        table.add_column(heading, justify="right")
    for evaluation in result.evaluations:
        table.add_row(*_row(evaluation))
    return table


def _row(evaluation: EvaluationResult) -> tuple[str, ...]:
    return (
        evaluation.label + _budget(evaluation.settings),
        percent(evaluation.accuracy),
        percent(evaluation.accuracy_strict),
        str(evaluation.num_examples),
        f"{evaluation.seconds:.1f}",
    )


def _budget(settings: Mapping[str, object]) -> str:
    return f" ({settings['norm']} {settings['eps']})" if "eps" in settings else ""
