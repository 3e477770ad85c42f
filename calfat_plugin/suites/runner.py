"""Runs of a suite as processes, several at a time, each an ordinary ``calfat run`` with its share of the machine."""

from __future__ import annotations

import queue
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerProcess
from typing import IO, Literal, TextIO

from calfat_plugin.compat import ending, likely_cause
from calfat_plugin.disk import lock, refuse_link
from calfat_plugin.errors import NO_UPDATE, RunError
from calfat_plugin.results import release_of
from calfat_plugin.rounds import RoundCount
from calfat_plugin.run_files import Environment, Results, read_results
from calfat_plugin.runs.compute import processor
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites.cells import State, SuiteRun, look_again, mark_lost, why_lost
from calfat_plugin.suites.plan import SuitePlan
from calfat_plugin.suites.processes import UNKNOWN, command, environment, started, warm_up
from calfat_plugin.suites.record import CHOICE, GUESS, Recorded, add_to_record, digest, read_record
from calfat_plugin.suites.suite import Suite
from calfat_plugin.suites.tuning import ChoiceRun
from calfat_plugin.typed_json import read_typed

PROGRAM = "calfat_plugin.cli.suite_run"  # the module of a run
GRACE_SECONDS = 20.0  # a run that is asked to stop ends its batch and reports it; then it is killed
ORPHAN_SECONDS = 60.0  # likewise for a run whose suite was killed
_EXCEPTION = re.compile(r"[\w.]*[A-Z]\w*(Error|Exception|Exit|Interrupt)\b")
_BAD_INPUT, _INTERRUPTED = 2, 130  # exit codes
_POLL_SECONDS = 0.05


class SuiteObserver:
    """Is informed of progress, always in the thread that called :func:`run_all`. Does nothing by itself."""

    def run_started(self, run: SuiteRun, rounds: int) -> None:
        """A process was started; earlier ones have finished so many rounds of the run."""

    def run_progress(self, run: SuiteRun, rounds: int) -> None:
        """The run has finished so many rounds, those of earlier processes included."""

    def run_said(self, run: SuiteRun, line: str) -> None:
        """The run printed another line, such as how far a long evaluation is."""

    def run_ended(self, run: SuiteRun) -> None:
        """A run ended, or will not be started."""


def run_all(
    plan: SuitePlan,
    jobs: int,
    observer: SuiteObserver,
    ended: list[SuiteRun],
    workers: str | None = None,
    pages: bool = False,
    idle: bool = False,
) -> None:
    """Run what is left of a plan, ``jobs`` at a time, until all have ended.

    A failed run does not stop the others. Ctrl-C, a polite kill or a closed terminal ends all running ones; what they
    had finished stays on disk. A second one does not wait for them to end by themselves.
    """
    waiting = deque(plan.left)
    jobs = max(1, min(jobs, len(waiting)))
    pool = _Pool(plan, jobs, observer, ended, workers, pages, idle)
    with _stopped_by_signals(pool):
        if waiting:
            warm_up(PROGRAM, environment(0, jobs, workers))
        try:
            while waiting or pool.children:
                while waiting and pool.free:
                    pool.start(waiting.popleft())
                if pool.children:
                    pool.wait()
        except BaseException:  # whatever it is, no process may stay behind
            pool.stop()
            raise


@dataclass
class _Child:
    """A running process, and what it has printed."""

    run: SuiteRun
    slot: int
    process: ForkServerProcess
    count: RoundCount
    rounds: int  # that its directory has; a resumed run begins with some
    reader: threading.Thread = field(init=False)
    started: float = field(default_factory=time.perf_counter)
    has_moved: bool = False  # whether it has finished a round since it was started
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=200))


# A line of output, None for it when there will be no more, and None for the whole when the user wants to stop.
_Event = tuple[_Child, str | None] | None


@dataclass
class _Pool:
    """The running processes; every event is handled in the caller's thread."""

    plan: SuitePlan
    jobs: int
    observer: SuiteObserver
    ended: list[SuiteRun]
    workers: str | None
    pages: bool
    idle: bool

    def __post_init__(self) -> None:
        self.children: list[_Child] = []
        self.free = list(range(self.jobs))
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._hopeless: dict[str, SuiteRun] = {}
        self._stop_requests = 0

    def ask_to_stop(self) -> None:
        """Interrupt :meth:`wait`; safe in a signal handler, which must not raise just anywhere: between the start of a
        process and our note of it, that would leave the process to itself."""
        self._stop_requests += 1
        self._events.put(None)

    def start(self, run: SuiteRun) -> None:
        """Start one run, unless it is known not to work or another process is at it."""
        failed = self._hopeless.get(run.cell.name)
        if failed is not None:
            self._end(run.ended("not tried", f"seed {failed.seed} failed before its first round was finished"))
            return
        output_file = _open_output(run)
        with ExitStack() as unless_started:
            unless_started.enter_context(output_file)
            run = self._claim(run, output_file)
            if not run.to_do:
                self._end(run)
                return
            run.lost.unlink(missing_ok=True)  # of another recipe: it says nothing of what is run now
            words = [*command(self.plan, run, self.workers), "--plain"]
            if not self.pages:
                words.append("--no-page")
            if self.idle:  # each run begins a session of its own, whose priority it sets itself
                words.append("--idle")
            count = RoundCount(RunDirectory(run.directory).rounds)
            rounds = count.now()  # before the start: from here on nothing may fail that leaves a process to itself
            process, output = started(PROGRAM, words, environment(self.free[0], self.jobs, self.workers))
            unless_started.pop_all()  # the thread that reads the process closes the file
        child = _Child(run, self.free.pop(0), process, count, rounds)
        child.reader = threading.Thread(target=self._read, args=(child, output, output_file), daemon=True)
        self.children.append(child)
        child.reader.start()
        self.observer.run_started(run, child.rounds)

    def _claim(self, run: SuiteRun, output_file: IO[str]) -> SuiteRun:
        """The run as it is now, which no other process can start any more; ended, where it is not to be started."""
        if not lock(output_file.fileno()):
            return run.ended("elsewhere", "another calfat suite is running it")
        directory = RunDirectory(run.directory)
        deadline = time.monotonic() + ORPHAN_SECONDS  # a process that a killed suite left behind may end until then
        while directory.busy:
            if time.monotonic() > deadline or self._stop_requests:
                return run.ended("elsewhere", "another process is writing it")
            time.sleep(_POLL_SECONDS)
        (run,) = look_again(self.plan.suite.record, run)
        if run.state == "finished":
            return run.ended("finished")
        if run.state == "lost":
            return run.ended("lost", why_lost(run))
        return run

    def wait(self) -> None:
        event = self._events.get()
        if event is None:
            raise KeyboardInterrupt
        child, line = event
        if line is None:
            self._ended(child)
            return
        child.lines.append(line)
        self.observer.run_said(child.run, line)
        # A run prints a line after each round, so its rounds are counted whenever it prints one. Which line that was
        # does not matter: a round may be on disk before an earlier line is read.
        rounds = child.count.now()
        if rounds != child.rounds:
            child.rounds, child.has_moved = rounds, True
            self.observer.run_progress(child.run, rounds)

    def stop(self) -> None:
        """Ask every child to stop, kill those that do not, and report them."""
        for child in self.children:
            child.process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        impatient = self._stop_requests + 1
        while (
            any(child.process.exitcode is None for child in self.children)
            and time.monotonic() < deadline
            and self._stop_requests < impatient
        ):
            time.sleep(_POLL_SECONDS)
        for child in self.children[:]:
            if child.process.exitcode is None:
                child.process.kill()
                child.process.join()
            child.reader.join(timeout=1.0)  # its last lines are in the file then
            self.children.remove(child)
            state: State = "interrupted"
            if child.process.exitcode == 0:
                state = "finished"
            self._end(child.run.ended(state, seconds=time.perf_counter() - child.started))

    def _read(self, child: _Child, output: TextIO, output_file: IO[str]) -> None:
        """Copy a child's output to its file and to the queue. In a thread of its own."""
        with output_file, output:
            for line in output:
                with suppress(OSError):  # a full disk: the run itself reports it
                    output_file.write(line)
                    output_file.flush()
                self._events.put((child, line.rstrip("\n")))
        self._events.put((child, None))

    def _ended(self, child: _Child) -> None:
        self.children.remove(child)
        self.free.append(child.slot)
        child.process.join()
        state: State = "finished"
        message = ""
        code = child.process.exitcode
        assert code is not None  # it has ended
        if code == _INTERRUPTED:
            state, message = "interrupted", "someone else stopped it"
        elif code == UNKNOWN:
            state, message = "failed", "how it ended is unknown: the process that runs are forked from was killed"
        elif code != 0:
            state, message = "failed", _what_went_wrong(child.lines, code)
            # That training diverged is an answer, and of a choice run an exception, too. A signal is none, nor what the
            # user can put right, such as a full disk: the values that are tried after it are not the worst.
            if code > 0 and (NO_UPDATE in message or (child.run.cell.tried and code != _BAD_INPUT)):
                state = "lost"
                mark_lost(child.run, message)
            elif not (
                child.has_moved or child.run.cell.tried or RunDirectory(child.run.directory).last_checkpoint.exists()
            ):
                self._hopeless.setdefault(child.run.cell.name, child.run)
        self._end(child.run.ended(state, message, time.perf_counter() - child.started))

    def _end(self, run: SuiteRun) -> None:
        self.ended.append(run)
        record_runs(self.plan.suite, [run])
        self.observer.run_ended(run)


def _open_output(run: SuiteRun) -> IO[str]:
    """The file to which what a run prints is added."""
    for path in (run.output, run.directory, run.directory.parent):  # the suite's folder may be from elsewhere
        refuse_link(path)
    if run.output.exists() and not run.output.is_file():  # opening a pipe would wait for its reader for ever
        raise RunError(f"{run.output}: is no file, so what the run prints cannot be kept there. Remove it.")
    try:
        run.output.parent.mkdir(parents=True, exist_ok=True)
        return run.output.open("a", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{run.output}: cannot be written ({error.strerror}).") from None


def record_runs(suite: Suite, runs: Sequence[SuiteRun]) -> None:
    """Write a row for each of these runs that has ended into the suite's record, if it has one.

    Processor (or GPU, and an arithmetic other than fp32) and version are those of the run, as far as its files or an
    earlier row say: who looks at a finished suite changes nothing.
    """
    if suite.record is None:
        return
    rows = {}
    earlier_rows = read_record(suite.record)
    for run in look_again(suite.record, *runs):
        if run.recorded is not None:
            continue
        if run.state == "finished" or run.state == "lost":
            rows[run.key] = _row_of(suite, run, run.state, earlier_rows.get(run.key))
    add_to_record(suite.record, rows)


def _row_of(suite: Suite, run: SuiteRun, state: Literal["finished", "lost"], earlier: Recorded | None) -> Recorded:
    """The row of a run that was finished or lost; its ``earlier`` row says what its files do not."""
    directory = RunDirectory(run.directory)
    results = None
    seconds, version = "", ""
    if state == "finished":
        results = read_results(directory.results)
    if results is not None:
        seconds, version = f"{results.seconds:.1f}", results.calfat_plugin
    recipe = digest(run.experiment)
    if earlier is None or (earlier.state, earlier.recipe) != (state, recipe):
        earlier = Recorded(state, recipe, {}, processor=processor())
    measured_on = read_typed(Environment, directory.environment) or Environment()
    computed_on = measured_on.gpu or measured_on.processor
    if computed_on and measured_on.precision != "fp32":  # where the recipe says auto, machines differ in it
        computed_on = f"{computed_on}, {measured_on.precision}"
    verdict = ""
    if not run.cell.tried:
        verdict = run.verdict or ""
    return Recorded(
        state=state,
        recipe=recipe,
        values=_values_of(suite, run, results),
        seconds=seconds,
        processor=computed_on or earlier.processor,
        calfat_plugin=version or earlier.calfat_plugin,
        verdict=verdict,
    )


def _values_of(suite: Suite, run: SuiteRun, results: Results | None) -> dict[str, float]:
    """Metric to what a run measured; nothing of a lost run of the table."""
    values: dict[str, float | None] = {}
    if run.cell.tried and suite.choose is not None:
        measured = ChoiceRun.read(run, suite.choose)
        values = {CHOICE: measured.value, GUESS: measured.guess}
    elif run.state == "finished":
        metrics = list(suite.metrics)
        if run.cell.name in suite.reported.percent:  # published numbers are compared with the release's accuracy
            metrics += map(release_of, suite.reported.percent[run.cell.name].percent)
        with_results = replace(run, results=results)
        for metric in metrics:
            values[metric] = with_results.value(metric)
    return {metric: value for metric, value in values.items() if value is not None}


@contextmanager
def _stopped_by_signals(pool: _Pool) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and a closed terminal into a stop request."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    previous_handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup means it
            previous_handlers[number] = signal.signal(number, lambda signum, frame: pool.ask_to_stop())
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _what_went_wrong(lines: Sequence[str], code: int) -> str:
    """The error that a command printed, or the exception that ended it, or its last line."""
    for line in reversed(lines):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    last_line = last_exception = ""
    for line in lines:
        if line.strip():
            last_line = line.strip()
            if _EXCEPTION.match(last_line):
                last_exception = last_line
    text = ending(code)
    printed = last_exception or last_line
    if printed:
        text = f"{printed} ({text})"
    cause = likely_cause(code)
    if cause:
        text += f". {cause}"
    return text
