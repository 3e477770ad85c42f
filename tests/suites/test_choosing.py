"""``calfat suite`` on a suite that chooses values: with a stand-in for ``calfat run``, and with the real thing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from calfat_plugin.datasets import published
from calfat_plugin.registry import Registry
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.request import Request
from calfat_plugin.runs.session import run
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from tests.cli.runner import calfat
from tests.runs import remains
from tests.runs.mortals import FailOnWarning
from tests.suites.files import BASE, CHOOSING, FAKE_RUN, write_suite

call = partial(calfat, "suite", "tiny.yaml")

TEXT = CHOOSING.replace("[0.02, 0.05, 0.1]", "[0.05, 0.1]").replace("[100, 101]", "[100]").replace("[0, 1]", "[0]")
HOW = (
    "Values are chosen for each row by pgd20 on the validation split after the last round, the mean over seed 100, in "
    "runs that never see the test split; a run that failed counts as 0. Tries of every row: 2.\n"
)
UNKNOWN = "no run has finished here yet; the key seconds_per_round of the suite may say what one costs\n"


@pytest.fixture(autouse=True)
def _stand_in(tmp_path, monkeypatch, stand_in):
    monkeypatch.setenv("FAKE_BEST", json.dumps({"calfat": 0.05, "fedpgd": 0.1}))
    write_suite(tmp_path, TEXT)


def content():
    return json.loads(Path("runs/suites/tiny/suite.json").read_text())


def test_dry_run_lists_choice_runs_and_what_waits_for_them(tmp_path):
    done = call("--dry-run", "--only", "FedPGD")
    lines = done.out.splitlines()
    place = "runs/suites/tiny/fedpgd/choose/learning_rate={}/seed-100"
    assert lines[:4] == [
        f"new         FedPGD, learning_rate 0.05, seed 100  {place.format(0.05)}",
        f"new         FedPGD, learning_rate 0.1, seed 100  {place.format(0.1)}",
        "left out    CalFAT: --only does not select it",
        "waiting     FedPGD, seed 0: until its values are chosen",
    ]
    assert lines[4].startswith("the first one: calfat run base.yaml ")
    assert done.out.endswith(
        f"{HOW}cost: 2 choice runs and 1 run to do; {UNKNOWN}tiny.yaml: good. 2 cells, 3 runs to do.\n"
    )
    assert not Path("runs").exists()

    write_suite(tmp_path, TEXT + "seconds_per_round: 30\n")
    cost = "cost: 4 choice runs and 2 runs to do, about 3 min 0 s of one process, 1 min 30 s with 2 at a time\n"
    assert cost in call("--dry-run", "--jobs", "2").out
    plan = json.loads(call("--dry-run", "--json").out)
    assert (len(plan["choice_runs"]), plan["runs"], plan["waiting"]) == (4, [], ["CalFAT", "FedPGD"])
    assert plan["seconds_left"] == 180
    checked = calfat("check", "tiny.yaml")
    assert checked.out == "tiny.yaml: good. A suite of 2 cells, 4 choice runs and 2 runs.\n"


def test_a_suite_chooses_then_runs_and_shows_what_it_chose():
    done = call()
    assert done.code == 0, done
    assert done.out.startswith(
        f"{HOW}cost: 4 choice runs and 2 runs to do; {UNKNOWN}"
        "tiny: 4 of 4 choice runs to do, 1 at a time with 1 thread each, in runs/suites/tiny\n"
        "running CalFAT, learning_rate 0.05, seed 100 in runs/suites/tiny/calfat/choose/learning_rate=0.05/seed-100\n"
    )
    assert "tiny: 2 of 2 runs to do, 1 at a time with 1 thread each, in runs/suites/tiny\n" in done.out
    assert "| CalFAT | learning_rate 0.05, lower edge of the grid |   1 | 80.00 [71.1, 86.7] |" in done.out
    assert "| FedPGD | learning_rate 0.1, upper edge of the grid  |   1 | 60.00 [50.2, 69.1] |" in done.out
    assert [run["seed"] for run in content()["cells"][1]["runs"]] == [0]
    page = Path("runs/suites/tiny/report.html").read_text()
    assert "FedPGD: learning_rate 0.1, upper edge of the grid (tried learning_rate 0.05: 40.00; " in page
    assert "in runs that never see the test split" in page

    again = call()
    assert again.out.startswith(
        f"{HOW}tiny: no choice run to do, in runs/suites/tiny\ntiny: nothing to do, in runs/suites/tiny\n"
    )


def test_runs_that_diverge_are_lost_and_not_tried_again(monkeypatch):
    monkeypatch.setenv("FAKE_LIMIT", "0.07")
    done = call("--only", "FedPGD")
    assert done.code == 0, done
    assert re.search(
        r"\[2/2\] FedPGD, learning_rate 0\.1, seed 100: lost after \d+:\d\d: round 1: not one client delivered a "
        r"usable update\.  \(runs/suites/tiny/fedpgd/choose/learning_rate=0\.1/seed-100\.txt\)\n",
        done.out,
    )
    assert "| FedPGD | learning_rate 0.05, lower edge of the grid |   1 |" in done.out
    assert "learning_rate 0.1: 0.00, 1 of 1 run lost\n" in done.out
    assert "tiny: no choice run to do" in call("--only", "FedPGD").out


def test_a_run_of_the_table_that_diverges_is_lost_and_recorded(monkeypatch, tmp_path):
    """Unlike one that fails for want of data, which is tried again."""
    write_suite(tmp_path, TEXT.partition("choose:")[0])
    monkeypatch.setenv("FAKE_LIMIT", "0.01")
    done = call("--only", "FedPGD", "--record", "runs.csv")
    assert done.code == 0, done
    reason = "round 1: not one client delivered a usable update."
    assert f"- FedPGD: seed 0 lost, which counts as 0 in accuracies: {reason}" in done.out
    assert "FedPGD,,0,lost," in Path("runs.csv").read_text()
    assert "nothing to do" in call("--only", "FedPGD", "--record", "runs.csv").out
    shutil.rmtree("runs")
    elsewhere = call("--only", "FedPGD", "--record", "runs.csv").out
    assert "nothing to do" in elsewhere
    assert "- FedPGD: seed 0 lost, which counts as 0 in accuracies: it is so in the suite's record" in elsewhere

    monkeypatch.setenv("FAKE_RUN", json.dumps({"calfat": "fail"}))
    assert call("--only", "CalFAT", "--record", "runs.csv").code == 1
    assert "CalFAT" not in Path("runs.csv").read_text()


def test_a_run_that_is_killed_is_not_lost(monkeypatch):
    """It says nothing about its values: the cell waits for the next call."""
    monkeypatch.setenv("FAKE_RUN", json.dumps({"fedpgd": "die"}))
    done = call("--only", "FedPGD")
    assert done.code == 1
    assert done.err.startswith("error: 2 of 2 runs did not finish.\n")
    assert list(Path("runs").rglob("*.lost")) == []
    assert content()["cells"][1]["seeds_left"] == [0]


def test_a_run_that_fails_for_want_of_room_is_not_lost(monkeypatch):
    """Else the values that were tried after a disk was full would be the worst, for ever."""
    words = ("--only", "FedPGD", "--record", "runs.csv")
    monkeypatch.setenv("FAKE_FULL", "0.07")
    done = call(*words)
    assert (done.code, list(Path("runs").rglob("*.lost"))) == (1, [])
    assert done.err.startswith("error: 1 of 2 runs did not finish.\n")
    assert "learning_rate 0.1" not in Path("runs.csv").read_text()
    assert content()["cells"][1]["seeds_left"] == [0]
    monkeypatch.delenv("FAKE_FULL")
    assert call(*words).code == 0
    assert content()["cells"][1]["choice"]["chosen"] == {"train_args.learning_rate": 0.1}


def test_a_run_that_ends_by_an_exception_is_lost(monkeypatch):
    monkeypatch.setenv("FAKE_RUN", json.dumps({"fedpgd": "crash"}))
    assert call("--only", "FedPGD").code == 1  # nothing can be chosen
    assert len(list(Path("runs").rglob("*.lost"))) == 2


KILLED = "import sys; from calfat_plugin.suites import runner; runner.PROGRAM = {program!r}; "
KILLED += "from calfat_plugin.cli.suite import suite; suite()"


def kill_the_suite_in(output: Path) -> None:
    """Start the suite, and kill it while the run that writes ``output`` is in a round."""
    words = [sys.executable, "-c", KILLED.format(program=FAKE_RUN), "tiny.yaml"]
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while not (output.exists() and "in round" in output.read_text()):
        assert first.poll() is None
        time.sleep(0.02)
    (run,) = (run for child in children(first.pid) for run in children(child))
    left = [*children(first.pid), run]
    first.kill()
    first.wait()
    while any(map(is_there, left)):
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    """Other than as a zombie, which has no command line."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    return False


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_killed_hard_in_the_middle_it_repeats_nothing(monkeypatch):
    """The run that the killed suite leaves behind ends by itself; then it is resumed, not run beside it."""
    monkeypatch.setenv("FAKE_RUN", json.dumps({"fedpgd": "slow"}))
    output = Path("runs/suites/tiny/fedpgd/choose/learning_rate=0.05/seed-100.txt")
    kill_the_suite_in(output)
    finished = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("results.json")}
    assert len(finished) == 2

    monkeypatch.setenv("FAKE_RUN", "{}")
    done = call()
    assert done.code == 0, done
    assert "tiny: 2 of 4 choice runs to do" in done.out
    assert "resuming FedPGD, learning_rate 0.05, seed 100 in " in done.out
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert output.read_text().count("resuming with 1 threads") == 1
    assert "| FedPGD | learning_rate 0.1, upper edge of the grid" in done.out


def choice_run(folder: Path) -> tuple[str, list[object], str]:
    """Make the first choice run of the suite in this process: (its rounds without costs, its final evaluations, the
    digest of its data)."""
    planned = make_plan(load_suite("tiny.yaml"), Registry.load(entry_points=False)).choosing.runs[0]
    request = Request(planned.experiment, run_dir=folder, resume=False, command=[])
    directory = RunDirectory.open(request)
    run(request, directory, FailOnWarning())  # no finding, and a page that could be written
    rounds = json.dumps(remains.rows(directory.path))
    evaluations, data = (json.loads(file.read_text()) for file in (directory.results, directory.partition))
    return rounds, evaluations["evaluations"], data["dataset_sha256"]


def test_a_choice_run_never_looks_at_the_test_split(monkeypatch, tmp_path):
    """With other test images and labels it does the same, bit for bit; and its final evaluation is left out."""
    base = BASE.replace("dataset: digits", "dataset: digits, max_train_examples: 200")
    write_suite(tmp_path, TEXT, base=base.replace("batch_size: 64", "batch_size: 16"))
    rows, evaluations, digest = choice_run(tmp_path / "first")
    assert json.loads(rows)[0]["pgd20"]
    assert evaluations == []
    load = published.load_digits

    def other(root, **options):
        dataset = load(root, **options)
        x, y = dataset.test.x.flip(0).roll(3, -1), (dataset.test.y + 1) % 10
        return dataclasses.replace(dataset, test=dataclasses.replace(dataset.test, x=x, y=y))

    monkeypatch.setattr(published, "load_digits", other)
    again = choice_run(tmp_path / "second")
    assert again[:2] == (rows, [])
    assert again[2] != digest
