"""``calfat suite``: with a stand-in for ``calfat run``, and once with the real thing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from tests.cli.runner import calfat
from tests.suites.files import write_suite

call = partial(calfat, "suite", "tiny.yaml")

PLACES = "tables: runs/suites/tiny\nreport: runs/suites/tiny/report.html\n"


@pytest.fixture(autouse=True)
def _stand_in(tmp_path, stand_in):
    write_suite(tmp_path)


def shown():
    """The table as it was written, and where."""
    return f"\n{Path('runs/suites/tiny/table.md').read_text()}\n{PLACES}"


def test_a_suite_runs_and_shows_its_table(snapshot):
    done = call()
    assert done.code == 0, done
    lines = done.out.splitlines()
    assert lines[0] == "tiny: 4 of 4 runs to do, 1 at a time with 1 thread each, in runs/suites/tiny"
    assert lines[1] == "running CalFAT seed 0 in runs/suites/tiny/calfat/seed-0"
    assert lines[2].startswith("[1/4] CalFAT seed 0: finished in 0:0")
    assert done.out.endswith(shown())
    snapshot(shown())

    assert call().out == f"tiny: nothing to do, in runs/suites/tiny\n{shown()}"
    assert json.loads(call("--table", "--json").out)["suite"] == "tiny"


@pytest.mark.parametrize("also", ["--jobs=1", "--dry-run"])
def test_cells_that_no_single_process_can_run_are_refused_before_the_first_run(also):
    done = call("--set", "common_args.training_type=cross_silo", "--set", "comm_args.backend=GRPC", also)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: tiny.yaml: the cell 'CalFAT' is a cross-silo run, whose parties are ")
    assert not Path("runs").exists()


@pytest.mark.parametrize("there", [True, False])
def test_no_table_is_written_over_the_record(there):
    record = Path("runs/suites/tiny/table.csv")
    if there:
        record.parent.mkdir(parents=True)
        record.write_text("cell,tried,seed,state\n")
    done = call("--record", str(record))
    assert done.code == 2
    assert done.err.startswith(f"error: --record {record}: a table of the suite is written there")
    assert record.exists() == there


def test_dry_run_lists_and_runs_nothing(snapshot):
    done = call("--dry-run", "--seeds", "5", "--only", "FedPGD", "--set", "calfat.threat.eps=8/255")
    snapshot(done.out)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "share"),
    [
        (["--workers", "2"], "2 at a time with 2 workers of 1 thread each"),
        (["--workers", "1", "--jobs", "1"], "1 at a time with 1 worker of 4 threads each"),
        (["--workers", "auto"], "1 at a time with 4 threads for its workers each"),
    ],
)
def test_the_machine_is_divided_between_runs_and_their_workers(words, share, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    asked = []
    monkeypatch.setattr(
        "calfat_plugin.cli.suite.run_all",
        lambda plan, jobs, observer, ended, workers, **_: asked.append((jobs, workers)),
    )
    done = call(*words)
    assert done.out.splitlines()[0] == f"tiny: 4 of 4 runs to do, {share}, in runs/suites/tiny"
    assert asked == [(int(share[0]), words[1])]
    assert f" --workers {words[1]}\n" in call("--dry-run", *words).out
    planned = json.loads(call("--dry-run", "--json", *words).out)["runs"]
    assert {tuple(run["command"][-2:]) for run in planned} == {("--workers", words[1])}


def test_a_run_is_started_with_its_workers(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    done = call("--workers", "2", "--seeds", "0", "--only", "FedPGD")
    assert done.code == 0, done
    assert "running with 2 threads and 2 workers\n" in Path("runs/suites/tiny/fedpgd/seed-0.txt").read_text()


def test_an_idle_suite_and_its_runs_have_the_lowest_priority(monkeypatch):
    """The runs begin sessions of their own, so each is told."""
    entered = []
    monkeypatch.setattr("calfat_plugin.cli.suite.lowest_priority", lambda: nullcontext(entered.append("suite")))
    for words, priority in ((["--idle"], " at the lowest priority"), ([], "")):
        shutil.rmtree("runs", ignore_errors=True)
        done = call(*words, "--seeds", "0", "--only", "FedPGD")
        assert done.code == 0, done
        assert f"running with 1 threads{priority}\n" in Path("runs/suites/tiny/fedpgd/seed-0.txt").read_text()
    assert entered == ["suite"]


@pytest.mark.parametrize("words", [["--workers", "0"], ["--workers", "auto", "--jobs", "2"]])
def test_workers_that_cannot_be_are_refused(words, snapshot):
    done = call("--dry-run", *words)
    assert (done.code, done.out) == (2, "")
    snapshot(done.err)


def test_failures_are_shown_and_end_with_1(monkeypatch, snapshot):
    monkeypatch.setenv("FAKE_RUN", json.dumps({"fedpgd": "fail"}))
    done = call("--seeds", "0")
    assert done.code == 1
    assert "| FedPGD |   0 |                  - |                  - |" in done.out
    assert "- FedPGD: seed 0 failed: the data set is missing. Do something.\n" in done.out
    snapshot(done.err)


def test_ctrl_c_ends_everything_and_says_how_to_resume(monkeypatch):
    monkeypatch.setenv("FAKE_RUN", json.dumps({"fedpgd": "wait"}))

    def stop():
        output = Path("runs/suites/tiny/fedpgd/seed-0.txt")
        while not (output.exists() and "round" in output.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    done = call()
    thread.join()
    assert done.code == 130, done
    calfat = "| CalFAT |   1 | 80.00 [71.1, 86.7] | 40.00 [30.9, 49.8] |\n"
    assert f"{calfat}| FedPGD |   0 |                  - |                  - |\n" in done.out
    assert "2 of 2 cells have seeds left to run.\n\n- FedPGD: seed 0 interrupted\n" in done.out
    assert done.err == "error: stopped.\nFinished runs are kept. Resume with:\n  calfat suite tiny.yaml\n"


@pytest.mark.parametrize("seeds", ["0,x", "", "1,1", "1,01", "4294967296", "-1"])
def test_bad_seeds(seeds):
    done = call("--seeds", seeds)
    assert done.code == 2
    assert done.err == f"error: --seeds: got '{seeds}', expected different whole numbers such as 0,1,2.\n"


def test_download_reads_each_data_set_once():
    done = call("--download", "--seeds", "0", "--only", "CalFAT")
    assert done.code == 0, done
    assert done.out.startswith("digits: 1438 training and 359 test examples\ntiny: 1 of 2 runs to do")


def test_runs_draw_a_page_only_if_asked(tmp_path):
    for asked, pages in (((), 0), (("--pages", "--seeds", "7"), 2)):
        assert call(*asked).code == 0
        assert len(list(Path("runs/suites/tiny").glob("*/*/report.html"))) == pages


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_real_thing_is_stopped_and_continues(number, tmp_path):
    """Two methods, two seeds, one round each: stopped after the first run, then finished by the same command."""
    words = [sys.executable, "-m", "calfat_plugin.cli.main", "suite", "tiny.yaml", "--jobs", "2"]
    first = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    for line in first.stdout:
        if line.startswith("[1/4]"):
            break
    os.killpg(first.pid, number)
    rest, errors = first.communicate()
    if number == signal.SIGINT:
        assert first.returncode == 130, rest
        assert errors == "error: stopped.\nFinished runs are kept. Resume with:\n  calfat suite tiny.yaml --jobs 2\n"
    runs = tmp_path / "runs" / "suites" / "tiny"
    kept = {path: path.stat().st_mtime_ns for path in runs.glob("*/seed-*/results.json")}
    assert 1 <= len(kept) < 4

    second = subprocess.run(words, capture_output=True, text=True, check=True)
    told = re.search(r"tiny: (\d) of 4 runs to do", second.stdout)  # what was left behind may have ended meanwhile
    assert told is not None
    assert int(told[1]) <= 4 - len(kept)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    content = json.loads((runs / "suite.json").read_text(encoding="utf-8"))
    for cell in content["cells"]:
        assert cell["scores"]["natural"]["n"] == 2
        for run in cell["runs"]:
            results = json.loads(Path(run["directory"], "results.json").read_text(encoding="utf-8"))
            assert run["evaluations"] == results["evaluations"]
            assert results["trainer"] == cell["name"].lower()
            assert results["seed"] == run["seed"]
    written = (runs / "table.md").read_text(encoding="utf-8")
    assert written in second.stdout
