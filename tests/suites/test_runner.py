"""The runner with a stand-in for ``calfat run``: real processes, no training."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import queue
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from calfat_plugin.cli.suite import SuiteProgress
from calfat_plugin.errors import RunError
from calfat_plugin.progress import Lines
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.suites import runner
from calfat_plugin.suites.cells import mark_lost
from calfat_plugin.suites.runner import SuiteObserver, run_all
from tests.suites.files import SUITE, note_in


class Recorder(SuiteObserver):
    """Keeps what it is informed of; stops the suite at the first finished round when asked to."""

    def __init__(self, *, stop=False):
        self.stop, self.events = stop, []

    def run_started(self, run, rounds):
        self.events.append(("started", run.name, rounds))

    def run_progress(self, run, rounds):
        self.events.append(("round", run.name, rounds))
        if self.stop:
            raise KeyboardInterrupt

    def run_said(self, run, text):
        self.events.append(("said", run.name, text))

    def run_ended(self, outcome):
        self.events.append((outcome.state, outcome.name))


@pytest.fixture
def plan_of(plan_of, stand_in, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    return functools.partial(plan_of, SUITE)


def behave(monkeypatch, **trainers):
    monkeypatch.setenv("FAKE_RUN", json.dumps(trainers))


def test_all_runs_two_at_a_time(plan_of):
    heard, outcomes = Recorder(), []
    run_all(plan_of(), 2, heard, outcomes)
    assert sorted((outcome.name, outcome.state) for outcome in outcomes) == [
        (f"{method} seed {seed}", "finished") for method in ("CalFAT", "FedPGD") for seed in (0, 1)
    ]
    assert heard.events[:2] == [("started", "CalFAT seed 0", 0), ("started", "FedPGD seed 0", 0)]
    assert ("round", "CalFAT seed 0", 1) in heard.events
    assert ("said", "CalFAT seed 0", "running with 2 threads") in heard.events
    output = Path("runs/suites/tiny/calfat/seed-0.txt").read_text(encoding="utf-8")
    assert output.startswith("running with 2 threads\nround   1/1  loss 1.0")
    assert all(run.state == "finished" for run in plan_of().runs)


def test_every_line_is_said_although_its_round_is_on_disk_before_it_is_read(plan_of, monkeypatch):
    heard, events, held_back = Recorder(), queue.SimpleQueue(), []

    def get_when_all_are_there():
        while not held_back or held_back[-1][1] is not None:  # None: the run has ended
            held_back.append(events.get())
        return held_back.pop(0)

    late = SimpleNamespace(put=events.put, get=get_when_all_are_there)
    monkeypatch.setattr(runner, "queue", SimpleNamespace(SimpleQueue=lambda: late))
    run_all(plan_of(only=["CalFAT"], seeds=[0]), 1, heard, [])
    said = [text for kind, _, text in (event for event in heard.events if event[0] == "said")]
    assert said[0] == "running with 4 threads"
    assert said[1].startswith("round   1/1")


def test_rounds_are_those_that_the_run_has_kept_whatever_it_prints(plan_of, monkeypatch):
    behave(monkeypatch, calfat="boast")
    heard = Recorder()
    run_all(plan_of(only=["CalFAT"], seeds=[0]), 1, heard, [])
    assert [event for event in heard.events if event[0] == "round"] == [("round", "CalFAT seed 0", 1)]
    assert ("said", "CalFAT seed 0", "round 7/9  loss 1.0  ETA 0:01") in heard.events


def test_a_suite_in_a_pipe_says_how_far_a_long_run_is(plan_of, monkeypatch, capsys):
    """Its own lines, and between them what runs print themselves, where half a minute has gone by."""
    now = [0.0]
    monkeypatch.setattr("calfat_plugin.progress.time.perf_counter", lambda: now[0])
    run = plan_of(overrides=["train_args.comm_round=40"]).runs[0]
    progress = SuiteProgress(Lines(), 4)
    progress.run_started(run, 0)
    for second in range(0, 151, 5):
        now[0] = float(second)
        if second < 75:
            progress.run_progress(run, 1 + second // 5)
        else:
            progress.run_said(run, f"autoattack: {second} % done, 50.0 % so far")
    progress.run_ended(run.ended("finished", seconds=150.0))
    assert capsys.readouterr().out.splitlines() == [
        f"running CalFAT seed 0 in {run.directory}",
        "CalFAT seed 0: round 6/40  ETA 2:22",
        "CalFAT seed 0: round 11/40  ETA 2:12",
        "CalFAT seed 0: autoattack: 75 % done, 50.0 % so far",
        "CalFAT seed 0: autoattack: 100 % done, 50.0 % so far",
        "CalFAT seed 0: autoattack: 125 % done, 50.0 % so far",
        "CalFAT seed 0: autoattack: 150 % done, 50.0 % so far",
        "[1/4] CalFAT seed 0: finished in 2:30",
    ]


def test_a_failure_does_not_stop_the_others_and_spares_its_later_seeds(plan_of, monkeypatch):
    behave(monkeypatch, fedpgd="fail")
    outcomes = []
    run_all(plan_of(), 1, Recorder(), outcomes)
    assert [(outcome.name, outcome.state, outcome.message) for outcome in outcomes] == [
        ("CalFAT seed 0", "finished", ""),
        ("FedPGD seed 0", "failed", "the data set is missing. Do something."),
        ("CalFAT seed 1", "finished", ""),
        ("FedPGD seed 1", "not tried", "seed 0 failed before its first round was finished"),
    ]


def test_a_resumed_run_that_fails_at_once_says_nothing_of_later_seeds(plan_of, monkeypatch):
    behave(monkeypatch, fedpgd="die")
    first = plan_of(only=["FedPGD"], seeds=[0])
    run_all(first, 1, Recorder(), [])
    RunDirectory(first.left[0].directory).last_checkpoint.touch()  # of the round that was finished
    behave(monkeypatch, fedpgd="fail")
    outcomes = []
    run_all(plan_of(only=["FedPGD"]), 1, Recorder(), outcomes)
    assert [outcome.state for outcome in outcomes] == ["failed", "failed"]


def test_a_bug_is_reported_by_its_exception_and_every_seed_is_tried(plan_of, monkeypatch):
    behave(monkeypatch, fedpgd="crash")
    outcomes = []
    run_all(plan_of(only=["FedPGD"]), 1, Recorder(), outcomes)
    assert [(outcome.state, outcome.message) for outcome in outcomes] == [
        ("failed", "RuntimeError: two lines (exit code 1)")
    ] * 2


def test_an_interrupt_ends_all_children_and_a_second_call_resumes(plan_of, monkeypatch):
    behave(monkeypatch, calfat="wait", fedpgd="wait")
    outcomes, heard = [], Recorder(stop=True)
    with pytest.raises(KeyboardInterrupt):
        run_all(plan_of(), 2, heard, outcomes)
    assert [outcome.state for outcome in outcomes] == ["interrupted", "interrupted"]

    behave(monkeypatch)
    plan = plan_of()
    assert "unfinished" in [run.state for run in plan.runs]
    outcomes = []
    run_all(plan, 2, Recorder(), outcomes)
    assert [outcome.state for outcome in outcomes] == ["finished"] * 4
    outputs = [path.read_text(encoding="utf-8") for path in Path("runs/suites/tiny").glob("*/seed-0.txt")]
    assert any("resuming with 2 threads" in output for output in outputs)


class Signalled(Recorder):
    """Sends this process a signal at the worst moment: just after the first run was started."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def run_started(self, run, rounds):
        super().run_started(run, rounds)
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_process_outlives_a_signal(number, plan_of, monkeypatch):
    behave(monkeypatch, calfat="wait", fedpgd="wait")
    before = signal.getsignal(number)
    begun = []
    note_in(begun, monkeypatch, runner, "started")
    outcomes = []
    with pytest.raises(KeyboardInterrupt):
        run_all(plan_of(), 2, Signalled(number), outcomes)
    assert len(outcomes) == 2
    assert len(begun) == 2
    assert all(process.exitcode is not None for process, _ in begun)
    assert signal.getsignal(number) is before


def test_nohup_is_respected(plan_of):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        outcomes = []
        run_all(plan_of(), 2, Signalled(signal.SIGHUP), outcomes)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [outcome.state for outcome in outcomes] == ["finished"] * 4


def test_a_run_that_does_not_stop_is_killed(plan_of, monkeypatch):
    behave(monkeypatch, calfat="deaf")
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.2)
    outcomes = []
    with pytest.raises(KeyboardInterrupt):
        run_all(plan_of(only=["CalFAT"]), 1, Recorder(stop=True), outcomes)
    assert [outcome.state for outcome in outcomes] == ["interrupted"]


def test_a_run_that_another_suite_is_at_is_left_to_it(plan_of):
    plan = plan_of(only=["CalFAT"], seeds=[0])
    plan.runs[0].output.parent.mkdir(parents=True)
    with plan.runs[0].output.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        outcomes = []
        run_all(plan, 1, Recorder(), outcomes)
    assert [(outcome.state, outcome.message) for outcome in outcomes] == [
        ("elsewhere", "another calfat suite is running it")
    ]


@pytest.mark.parametrize("what", ["output", "directory", "cell"])
def test_nothing_is_written_through_a_link_of_a_suite_from_elsewhere(plan_of, tmp_path, what):
    plan = plan_of(only=["CalFAT"], seeds=[0])
    run, elsewhere = plan.runs[0], tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = {"output": run.output, "directory": run.directory, "cell": run.directory.parent}[what]
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere / "file" if what == "output" else elsewhere)
    with pytest.raises(RunError, match=f"{link.name}: is a link, and results are written to no other place"):
        run_all(plan, 1, Recorder(), [])
    assert list(elsewhere.iterdir()) == []


def test_a_pipe_in_the_place_of_an_output_is_refused(plan_of):
    plan = plan_of(only=["CalFAT"], seeds=[0])
    plan.runs[0].output.parent.mkdir(parents=True)
    os.mkfifo(plan.runs[0].output)
    with pytest.raises(RunError, match=r"seed-0\.txt: is no file, so what the run prints cannot be kept there"):
        run_all(plan, 1, Recorder(), [])


def test_a_run_that_another_suite_lost_meanwhile_is_not_tried_again(plan_of):
    stale = plan_of(only=["CalFAT"], seeds=[0])
    stale.runs[0].lost.parent.mkdir(parents=True)
    mark_lost(stale.runs[0], "round 1: it diverged")
    heard, outcomes = Recorder(), []
    run_all(stale, 1, heard, outcomes)
    assert [(outcome.state, outcome.message) for outcome in outcomes] == [("lost", "round 1: it diverged")]
    assert heard.events == [("lost", "CalFAT seed 0")]


def test_a_place_that_cannot_be_written_is_reported(plan_of, snapshot):
    Path("runs").write_text("")
    plan = plan_of()
    with snapshot.raises(RunError):
        run_all(plan, 1, Recorder(), [])


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (-signal.SIGSEGV, r"^round 1/2 \(SIGSEGV\)\. SIGSEGV is no want of memory: native code"),
        (-signal.SIGKILL, r"^round 1/2 \(SIGKILL\)\. Whoever sends SIGKILL is most likely the system, because memory"),
        (-signal.SIGTERM, r"^round 1/2 \(SIGTERM\)$"),
        (-64, r"^round 1/2 \((SIGRTMAX|signal 64)\)$"),
        (3, r"^round 1/2 \(exit code 3\)$"),
    ],
)
def test_a_run_that_dies_names_the_signal(code: int, told: str) -> None:
    assert re.match(told, runner._what_went_wrong(["round 1/2"], code))
