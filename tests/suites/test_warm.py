"""The process that runs are forked from: a fork of it is as good as a fresh process, and it may be killed."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TextIO

import pytest

from calfat_plugin.errors import RunError
from calfat_plugin.suites import processes, runner
from calfat_plugin.suites.processes import UNKNOWN, started, warm_up
from calfat_plugin.suites.runner import SuiteObserver, run_all
from tests.cli.runner import ROOT
from tests.suites.files import BASE, SUITE, note_in, write_suite

ECHO = """
import os, sys, time
def main():
    first = sys.argv[1]
    print(len(first), os.environ["SHARE"], os.getsid(0) == os.getpid(), repr(sys.stdin.read()), "ü", flush=True)
    if first == "sleep":
        time.sleep(60)
    elif first.isdecimal():
        sys.exit(int(first))
"""


def server() -> int:
    """The process that runs are forked from."""
    return int(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _new_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "echo.py").write_text(ECHO, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def test_a_fork_has_its_own_arguments_environment_output_session_and_exit_code() -> None:
    """Arguments of any length: these are longer than a pipe holds."""
    runs = [started("echo", [word], {"SHARE": "half"}) for word in ("3", "0", "x" * 300_000)]
    said = []
    for run, output in runs:
        with output:
            text = output.read()
        run.join()
        said.append((text, run.exitcode))
    assert said == [("1 half True '' ü\n", 3), ("1 half True '' ü\n", 0), ("300000 half True '' ü\n", 0)]
    assert len({run.pid for run, _ in runs}) == 3


def test_a_server_that_has_just_died_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It no longer listens before the system says that it has ended: Python takes it for alive."""
    start, refused = ForkServerProcess.start, []

    def start_at_the_third_time(process: ForkServerProcess) -> None:
        if len(refused) < 2:
            refused.append(process)
            raise ConnectionRefusedError
        start(process)

    monkeypatch.setattr(ForkServerProcess, "start", start_at_the_third_time)
    run, output = started("echo", ["0"], {"SHARE": "half"})
    with output:
        assert output.read().startswith("1 half True")
    run.join()
    assert (run.exitcode, len(refused)) == (0, 2)


def test_a_server_that_is_never_there_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: ForkServerProcess) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(processes, "SECONDS_TO_DIE", 0.1)
    monkeypatch.setattr(ForkServerProcess, "start", refuse)
    with pytest.raises(RunError, match=r"cannot be started \(Connection refused\)\. Use fewer --jobs"):
        started("echo", ["0"], {"SHARE": "half"})


def test_a_signal_reaches_a_fork_and_is_how_it_ended() -> None:
    run, output = started("echo", ["sleep"], {"SHARE": "half"})
    with output:
        output.readline()
        assert run.exitcode is None
        run.terminate()
        run.join()
        assert run.exitcode == -signal.SIGTERM
        run.terminate()  # of a process that is no more


# --- with a suite -----------------------------------------------------------------------------------------------------


@pytest.fixture
def suite(plan_of, stand_in: None, monkeypatch: pytest.MonkeyPatch):
    """Plans a suite of a stand-in; the runs that are started for it."""
    forked: list[tuple[ForkServerProcess, TextIO]] = []
    note_in(forked, monkeypatch, runner, "started")
    return lambda **asked: plan_of(SUITE, **asked), forked


def test_the_process_has_the_runs_share_and_no_signal_of_a_terminal(suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries read the number of threads when they are loaded."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    plan, forked = suite
    outcomes = []
    run_all(plan(), 2, SuiteObserver(), outcomes)
    assert [outcome.state for outcome in outcomes] == ["finished"] * 4
    assert [run.exitcode for run, _ in forked] == [0] * 4
    assert b"OMP_NUM_THREADS=2" in Path(f"/proc/{server()}/environ").read_bytes().split(b"\0")
    assert os.environ["OMP_NUM_THREADS"] == "4"
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(server(), number)
    run_all(plan(seeds=[7]), 2, SuiteObserver(), outcomes)
    assert [outcome.state for outcome in outcomes[4:]] == ["finished"] * 2


def test_each_slot_has_its_gpu(suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    given = []

    def start(program, words, variables):
        given.append(variables["CUDA_VISIBLE_DEVICES"])
        return started(program, words, variables)

    monkeypatch.setattr(runner, "started", start)
    run_all(suite[0](seeds=[0]), 2, SuiteObserver(), [])
    assert given == ["3", "5"]


def test_a_process_that_is_killed_is_missed_by_one_run_alone(suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_RUN", '{"calfat": "wait"}')
    plan, forked = suite

    class Killer(SuiteObserver):
        def run_progress(self, run, rounds):
            if len(forked) == 1:
                os.kill(server(), signal.SIGKILL)
                forked[0][0].kill()

    outcomes = []
    run_all(plan(seeds=[0]), 1, Killer(), outcomes)
    assert [(outcome.name, outcome.state, outcome.message) for outcome in outcomes] == [
        ("CalFAT seed 0", "failed", "how it ended is unknown: the process that runs are forked from was killed"),
        ("FedPGD seed 0", "finished", ""),
    ]
    assert forked[0][0].exitcode == UNKNOWN


def test_a_module_that_cannot_be_imported_fails_the_run_and_says_so(suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PROGRAM", "no_such_module")
    outcomes = []
    run_all(suite[0](seeds=[0], only=["CalFAT"]), 1, SuiteObserver(), outcomes)
    assert [outcome.state for outcome in outcomes] == ["failed"]
    assert "no_such_module" in outcomes[0].message


def test_variables_are_as_before_when_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    warm_up("echo", {**os.environ, "SHARE": "all"})
    assert dict(os.environ) == before


@pytest.mark.slow
def test_a_forked_run_has_the_bits_of_calfat_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
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


def test_a_silent_run_of_a_killed_suite_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    program = (
        "import time; from calfat_plugin.suites.processes import started; "
        "run, output = started('echo', ['sleep'], {'SHARE': ''}); "
        "print(run.pid, output.readline()[:0], flush=True); time.sleep(99)"
    )
    suite = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert suite.stdout is not None
    run = Path("/proc") / suite.stdout.readline().strip() / "cmdline"
    suite.kill()
    suite.wait()
    end = time.monotonic() + 40  # it sleeps for 60 s
    while run.exists() and run.read_bytes() and time.monotonic() < end:
        time.sleep(0.05)
    assert not (run.exists() and run.read_bytes())
