"""The verdicts of ``calfat trust`` in a suite's table and record, and ``calfat suite --trust``."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from calfat_plugin.errors import RunError
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from calfat_plugin.suites.record import verdict_of
from tests.cli.runner import calfat
from tests.suites.files import SUITE, write_suite

VERDICT = {"word": "holds", "text": "holds", "sentence": "It holds.", "causes": [], "usable": True}
DAMAGED = "The file is damaged or was changed by hand. Restore it from a copy, or remove it and make it again.\n"
FIRST = Path("runs/suites/tiny/{}/seed-0")


pytestmark = pytest.mark.usefixtures("finished")


@pytest.fixture
def judged(monkeypatch):
    """Which models `--trust` judges: their directories; each gets a verdict."""
    asked = []

    def judge(directory, **how):
        asked.append(str(directory))
        said(directory)

    monkeypatch.setattr("calfat_plugin.cli.suite.planned", lambda directory, attacks: directory)
    monkeypatch.setattr("calfat_plugin.cli.suite.judge", judge)
    return asked


def said(directory, finished=True, eps="0.1", checkpoint="last", round=1, **verdict):
    """Leave what ``calfat trust`` leaves in a run directory."""
    model = {"checkpoint": f"{directory}/checkpoints/{checkpoint}.safetensors", "round": round}
    threat = {"norm": "linf", "eps": eps}
    content = {**model, "attack": "pgd20", "examples": 9, "threat": threat, "finished": finished, "checks": []}
    (Path(directory) / "trust.json").write_text(json.dumps({**content, "verdict": VERDICT | verdict}))


def call(*words):
    done = calfat("suite", "tiny.yaml", *words)
    assert done.code == 0, done
    return done


def rows(done):
    """Of the first table: label and what follows it."""
    table = done.out.split("\n# ")[1].split("\n\n")[1]
    return {line.split("|")[1].strip(): line.split("|")[2].strip() for line in table.splitlines()}


def test_trust_judges_the_first_seed_of_each_row_once(judged):
    found = rows(call("--trust"))
    assert judged == [str(FIRST).format("calfat"), str(FIRST).format("fedpgd")]
    assert found["method"] == "calfat trust"
    assert (found["CalFAT"], found["FedPGD"]) == ("holds (seed 0)", "holds (seed 0)")
    call("--trust")
    assert len(judged) == 2


@pytest.mark.usefixtures("judged")
def test_a_polite_kill_ends_the_judging_as_ctrl_c_does(monkeypatch):
    def judge(directory):
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL  # which would end the tests
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("calfat_plugin.cli.suite.judge", judge)
    done = calfat("suite", "tiny.yaml", "--trust")
    assert (done.code, done.err) == (130, "error: stopped.\n")


def test_a_model_that_cannot_be_judged_costs_neither_the_other_rows_nor_the_table(judged, monkeypatch):
    def judge(directory):
        if "calfat" in str(directory):
            raise RunError("its checkpoint is damaged.")
        said(directory)

    monkeypatch.setattr("calfat_plugin.cli.suite.judge", judge)
    done = call("--trust")
    again = f"Try again with: calfat trust {str(FIRST).format('calfat')}"
    assert done.err == f"warning: CalFAT seed 0 is not judged: its checkpoint is damaged. {again}\n"
    assert (rows(done)["CalFAT"], rows(done)["FedPGD"]) == ("-", "holds (seed 0)")


def test_what_a_row_says():
    said(str(FIRST).format("fedpgd"))
    for left, text in (
        ({"text": "overstated by 10.4 points"}, "overstated by 10.4 points (seed 0)"),
        ({"text": "not shown", "usable": False}, "not shown, no usable number (seed 0)"),
        ({"finished": False}, "-"),
        ({"eps": "0.2"}, "-"),
        ({"checkpoint": "best-natural"}, "-"),
        ({"round": 2}, "-"),
    ):
        said(str(FIRST).format("calfat"), **left)
        found = rows(call())
        assert (found["CalFAT"], found["FedPGD"]) == (text, "holds (seed 0)")


def test_a_verdict_without_a_checkpoint_is_of_another_model(registry):
    run = make_plan(load_suite("tiny.yaml"), registry).runs[0]
    said(run.directory)
    path = run.directory / "trust.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "checkpoint": None}))
    assert verdict_of(run.directory, run.experiment) is None


def test_a_verdict_on_another_model_is_kept_and_the_row_is_not_judged(judged):
    """Of the run's best checkpoint, made by hand; and of a run that has since been given more rounds."""
    run = Path(str(FIRST).format("calfat"))
    said(run, text="of the best", checkpoint="best-natural")
    done = call("--trust", "--only", "CalFAT")
    assert done.err.startswith(f"warning: {run}/trust.json is about another checkpoint, round or budget: ")
    (run / "trust.json").unlink()
    call("--trust", "--only", "CalFAT", "--record", "record.csv")
    write_suite(Path(), SUITE.replace("comm_round: 1", "comm_round: 2"))
    Path("record.csv").unlink()
    found = call("--only", "CalFAT", "--record", "record.csv")
    assert rows(found)["CalFAT"] == "2"  # no such column
    assert {row["verdict"] for row in csv.DictReader(Path("record.csv").read_text().splitlines())} == {""}
    assert judged == [str(run)]


def test_every_form_of_the_table_has_the_verdict():
    said(str(FIRST).format("calfat"))
    call()
    folder = Path("runs/suites/tiny")
    assert "& calfat trust &" in (folder / "table.tex").read_text()
    table = list(csv.DictReader((folder / "table.csv").read_text().splitlines()))
    assert {(row["method"], row["calfat trust"]) for row in table} == {("CalFAT", "holds (seed 0)"), ("FedPGD", "-")}
    cells = json.loads((folder / "suite.json").read_text())["cells"]
    assert [[run["verdict"] for run in cell["runs"]] for cell in cells] == [["holds", None], [None, None]]


def test_a_record_carries_the_verdict_to_another_machine(judged, tmp_path, monkeypatch):
    shutil.rmtree("runs/suites/tiny/fedpgd")
    call("--record", "record.csv", "--trust", "--only", "CalFAT")
    recorded = list(csv.DictReader(Path("record.csv").read_text().splitlines()))
    assert [(row["cell"], row["seed"], row["verdict"]) for row in recorded] == [
        ("CalFAT", "0", "holds"),
        ("CalFAT", "1", ""),
    ]
    other = tmp_path / "other"
    other.mkdir()
    write_suite(other)
    (other / "record.csv").write_text(Path("record.csv").read_text())
    monkeypatch.chdir(other)
    found = rows(call("--record", "record.csv", "--trust", "--only", "CalFAT"))
    assert (found["CalFAT"], len(judged)) == ("holds (seed 0)", 1)


def test_a_model_that_is_elsewhere_cannot_be_judged(judged):
    call("--record", "record.csv")
    Path("runs").rename("moved")
    done = call("--record", "record.csv", "--trust", "--only", "FedPGD")
    assert judged == []
    assert done.err == ("warning: FedPGD seed 0 was run elsewhere, and its model is not here: it is not judged.\n")


def test_a_damaged_verdict_is_an_error():
    path = Path(str(FIRST).format("calfat")) / "trust.json"
    path.write_text('{"attack": "pgd20", "examples": 9, "finished": true}')
    done = calfat("suite", "tiny.yaml")
    assert (done.code, done.err) == (2, f"error: {path}: the file has no 'threat'. {DAMAGED}")
