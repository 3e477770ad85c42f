"""``--idle``: a run beside a process that wants the whole core takes next to nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is about Linux's scheduler")
RECIPE = Path(__file__).parents[2] / "recipes" / "fedpgd_digits.yaml"
RUN = [sys.executable, "-m", "calfat_plugin.cli.main", "run", str(RECIPE), "--run-dir", "a-run", "--plain"]
BUSY = [sys.executable, "-c", "while True: pass"]
WINDOW = 3.0  # seconds of processor time that the busy process has while both are measured
PATIENCE = 240.0  # seconds on a machine that does much else


@contextmanager
def on_one_core(words: list[str], folder: Path) -> Iterator[psutil.Process]:
    """A process on the first core, in a session of its own as a second terminal would be."""
    core = min(os.sched_getaffinity(0))
    process = subprocess.Popen(
        words,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_busy_process_has_nineteen_twentieths_of_its_core(tmp_path: Path) -> None:
    with on_one_core([*RUN, "--idle"], tmp_path) as run:
        wait_for(lambda: os.sched_getscheduler(run.pid) == os.SCHED_IDLE)
        with on_one_core(BUSY, tmp_path) as busy:
            run_before, busy_before = processor_seconds(run), processor_seconds(busy)
            wanted_the_core = []
            while processor_seconds(busy) - busy_before < WINDOW:
                wanted_the_core.append(run.status() == psutil.STATUS_RUNNING)
                time.sleep(0.02)
            taken = processor_seconds(run) - run_before
            had = processor_seconds(busy) - busy_before
    assert taken < had / 20
    assert any(wanted_the_core), "the run stood still by itself"


def test_every_thread_and_the_session_have_the_lowest_priority(tmp_path: Path) -> None:
    with on_one_core([*RUN, "--idle"], tmp_path) as run:
        wait_for(lambda: run.num_threads() > 1)  # PyTorch is there
        with suppress(FileNotFoundError):  # a kernel that does not schedule by session
            assert Path(f"/proc/{run.pid}/autogroup").read_text().split()[-1] == "19"
        threads = [thread.id for thread in run.threads()]
        assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_IDLE}
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {19}


def test_without_the_option_a_run_is_like_any_process(tmp_path: Path) -> None:
    with on_one_core(RUN, tmp_path) as run:
        wait_for(lambda: run.num_threads() > 1)
        assert os.sched_getscheduler(run.pid) == os.SCHED_OTHER


def test_the_session_has_its_priority_back_afterwards(tmp_path: Path) -> None:
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel does not schedule by session")
    program = (
        "from calfat_plugin.runs.compute import lowest_priority\n"
        "def said(): return open('/proc/self/autogroup').read().split()[-1]\n"
        "before = said()\n"
        "try:\n"
        "    with lowest_priority():\n"
        "        inside = said()\n"
        "        raise KeyError\n"
        "except KeyError:\n"
        "    print(before, inside, said())\n"
    )
    words = [sys.executable, "-c", program]
    said = subprocess.run(words, capture_output=True, text=True, check=True, start_new_session=True, cwd=tmp_path)
    before, inside, after = said.stdout.split()
    assert (inside, after) == ("19", before)
    assert before != "19"
