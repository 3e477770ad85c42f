"""The warm process: what it forks is as good as a fresh process, and where it is gone, fresh processes do."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from calfat_plugin.suites import runner
from calfat_plugin.suites.runner import SuiteObserver, run_all
from calfat_plugin.suites.warm import UNKNOWN, ForkedRun, WarmProcess
from tests.cli.runner import ROOT
from tests.suites.files import BASE, FAKE_RUN, SUITE, note_in, write_suite

RUN = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from calfat_plugin.suites.warm import fork_runs
fork_runs(lambda: None)
first, *_ = sys.argv[1:]
print(len(sys.argv[1]), os.environ["SHARE"], os.getsid(0) == os.getpid(), "ü", flush=True)
if first == "read":
    print(repr(os.read(0, 1)))
elif first == "sleep":
    time.sleep(60)
elif first.isdecimal():
    sys.exit(int(first))
"""


@pytest.fixture
def warm() -> Iterator[WarmProcess]:
    process = WarmProcess((sys.executable, "-c", RUN), {**os.environ, "SHARE": "none"})
    assert process.ready(60)
    yield process
    process.end()


def started(warm: WarmProcess, *words: str) -> ForkedRun:
    run = warm.start(words, {"SHARE": "half", "PYTHONIOENCODING": "utf-8"})
    assert run is not None
    return run


def test_a_fork_has_its_own_arguments_environment_output_session_and_exit_code(warm: WarmProcess) -> None:
    """Arguments of any length: these are longer than a pipe holds."""
    runs = [started(warm, "3"), started(warm, "0"), started(warm, "x" * 300_000)]
    said = []
    for run in runs:
        with run:
            said.append((run.stdout.read(), run.wait()))
    assert said == [("1 half True ü\n", 3), ("1 half True ü\n", 0), ("300000 half True ü\n", 0)]


def test_a_fork_sees_the_end_of_its_suite_whatever_others_hold(warm: WarmProcess) -> None:
    first, second = started(warm, "read"), started(warm, "read")
    first.stdin.close()
    assert first.stdout.read() == "4 half True ü\nb''\n"
    assert first.wait() == 0
    assert second.poll() is None
    second.stdin.close()
    assert second.stdout.read() == "4 half True ü\nb''\n"
    assert second.wait() == 0


def test_signals_reach_a_fork_and_are_how_it_ended(warm: WarmProcess) -> None:
    for stop, code in ((ForkedRun.terminate, -signal.SIGTERM), (ForkedRun.kill, -signal.SIGKILL)):
        with started(warm, "sleep") as run:
            run.stdout.readline()
            stop(run)
            assert run.wait() == run.poll() == code
            stop(run)  # of a process that is no more


def test_a_warm_process_that_is_gone_starts_nothing_and_forgets_how_runs_ended(warm: WarmProcess) -> None:
    with started(warm, "sleep") as run:
        run.stdout.readline()
        warm.end()
        assert warm.start(["0"], {}) is None
        assert run.poll() is None
        run.kill()
        assert run.stdout.read() == ""
        assert run.wait() == run.poll() == UNKNOWN


# --- with a suite -----------------------------------------------------------------------------------------------------


@pytest.fixture
def suite(plan_of, stand_in: None, monkeypatch: pytest.MonkeyPatch):
    """Plans a suite of a stand-in; the processes that are forked and started for it."""
    forked, fresh = [], []

    note_in(forked, monkeypatch, WarmProcess, "start")
    note_in(fresh, monkeypatch, subprocess, "Popen")
    return lambda **asked: plan_of(SUITE, **asked), forked, fresh


def test_one_warm_process_forks_all_runs_and_ends(suite) -> None:
    plan, forked, fresh = suite
    outcomes = []
    run_all(plan(), 2, SuiteObserver(), outcomes)
    assert [outcome.status for outcome in outcomes] == ["finished"] * 4
    assert [run.returncode for run in forked] == [0] * 4
    assert len({run.pid for run in forked}) == 4
    assert [process.returncode for process in fresh] == [-signal.SIGKILL]  # itself

    run_all(plan(), 2, SuiteObserver(), [])
    assert len(fresh) == 1  # nothing to do: not even that


def test_the_warm_process_has_the_runs_share_and_a_session_of_its_own(suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries read the number of threads when they are loaded; Ctrl-C in the suite's terminal is not for it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    plan, _, fresh = suite
    seen = []

    class Looking(SuiteObserver):
        def run_started(self, run):
            variables = Path(f"/proc/{fresh[0].pid}/environ").read_bytes().split(b"\0")
            seen.append((b"OMP_NUM_THREADS=2" in variables, os.getsid(fresh[0].pid) == fresh[0].pid))

    run_all(plan(seeds=[0]), 2, Looking(), [])
    assert seen == [(True, True)] * 2


def test_each_slot_has_its_gpu(suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    given = []
    monkeypatch.setattr(WarmProcess, "start", lambda self, words, variables: given.append(variables))
    run_all(suite[0](seeds=[0]), 2, SuiteObserver(), [])
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in given] == ["3", "5"]


def test_without_a_warm_process_runs_are_fresh_processes(suite, tmp_path: Path, monkeypatch) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        f"import runpy, sys\nif not sys.argv[1:]: 1 / 0\nrunpy.run_path({FAKE_RUN[1]!r}, None, '__main__')"
    )
    monkeypatch.setattr(runner, "PROGRAM", (sys.executable, str(broken)))
    plan, forked, fresh = suite
    outcomes = []
    run_all(plan(seeds=[0]), 1, SuiteObserver(), outcomes)
    assert [outcome.status for outcome in outcomes] == ["finished"] * 2
    assert forked == [None] * 2
    assert [process.returncode for process in fresh] == [1, 0, 0]


def test_a_warm_process_that_is_killed_is_missed_by_one_run_alone(suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_RUN", '{"calfat": "wait"}')
    plan, forked, fresh = suite

    class Killer(SuiteObserver):
        def run_progress(self, run, round, num_rounds, eta):
            if fresh[0].poll() is None:
                fresh[0].kill()
                fresh[0].wait()
                os.kill(forked[0].pid, signal.SIGKILL)

    outcomes = []
    run_all(plan(seeds=[0]), 1, Killer(), outcomes)
    assert [(outcome.run.name, outcome.status, outcome.message) for outcome in outcomes] == [
        ("CalFAT seed 0", "failed", "how it ended is unknown: the process that runs are forked from was killed"),
        ("FedPGD seed 0", "finished", ""),
    ]
    assert len(fresh) == 2


def test_a_suite_that_is_stopped_during_the_imports_does_not_wait_for_them(suite, monkeypatch) -> None:
    slow = "import sys, time; time.sleep(120)"
    monkeypatch.setattr(runner, "PROGRAM", (sys.executable, "-c", slow))
    plan, forked, fresh = suite
    ready, waiting, outcomes = WarmProcess.ready, threading.Event(), []

    def noting(self: WarmProcess, seconds: float) -> bool | None:
        waiting.set()
        return ready(self, seconds)

    def stop() -> None:
        if waiting.wait(60):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(WarmProcess, "ready", noting)
    thread = threading.Thread(target=stop)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_all(plan(), 2, SuiteObserver(), outcomes)
    thread.join()
    assert time.monotonic() - begun < 60
    assert (outcomes, forked) == ([], [])
    assert [process.returncode for process in fresh] == [-signal.SIGKILL]


@pytest.mark.slow
def test_a_forked_run_has_the_bits_of_calfat_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write_suite(tmp_path, base=BASE.replace("runtime: {threads: 1}", "runtime: {threads: 2}"))
    calfat = [sys.executable, "-m", "calfat_plugin.cli.main"]
    subprocess.run([*calfat, "suite", "tiny.yaml", "--jobs", "1"], check=True)
    for seed in ("0", "1"):
        words = ["run", "base.yaml", "--set", "train_args.comm_round=1", "--seed", seed, "--run-dir", f"alone-{seed}"]
        subprocess.run([*calfat, *words], check=True)
        alone, forked = Path(f"alone-{seed}"), Path("runs/suites/tiny/calfat") / f"seed-{seed}"
        assert bits(forked) == bits(alone)


def bits(directory: Path) -> tuple[dict[str, bytes], list[dict[str, str]]]:
    files = {path.name: path.read_bytes() for path in (directory / "checkpoints").glob("*.safetensors")}
    with (directory / "rounds.csv").open() as table:
        rows = [{name: value for name, value in row.items() if "second" not in name and "memory" not in name}
                for row in csv.DictReader(table)]  # fmt: skip
    assert files
    assert rows
    return files, rows
