"""A column that is declared in one place is everywhere: file, page, loggers, suites, Python, checks of labels, docs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from calfat_plugin import Registry, load_run, rounds_csv
from calfat_plugin.errors import CalfatError
from calfat_plugin.federation.server import Snapshot
from calfat_plugin.loggers.base import round_scalars
from calfat_plugin.report import write_run_report
from calfat_plugin.results import RunResult
from calfat_plugin.rounds_csv import COLUMNS, Column
from calfat_plugin.runs.directory import RunDirectory
from calfat_plugin.runs.writer import RunWriter
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from tests.report.made import experiment, made_run, record
from tests.report.pages import Page
from tests.runs import columns
from tests.runs.remains import read_rows
from tests.suites.files import SUITE, write_suite

USED = Column(
    "used",
    "number of clients whose updates were used",
    value=lambda record: len(record.clients),
    page="clients used",
    logged="clients/used",
    in_results="last",
)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_csv, "COLUMNS", (*COLUMNS, USED))


@pytest.mark.usefixtures("no_figures")
def test_it_is_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = made_run(tmp_path / "run", final={"natural": 0.5})
    number = len(record(1, {}).clients)
    assert read_rows(run / "rounds.csv")[-1]["used"] == str(number)
    assert load_run(run).rounds["used"].iloc[-1] == number
    assert round_scalars(record(1, {}))["clients/used"] == float(number)
    assert "clients used" in Page.read(write_run_report(run)).text
    assert f"| `used` | {USED.about} |" in columns.table()

    assert load_run(run).value("used") == float(number)
    suite = write_suite(tmp_path, SUITE.replace("pgd20: PGD-20", "used: clients"))
    assert make_plan(load_suite(suite), Registry.load(entry_points=False)).suite.metrics["used"] == "clients"


def test_no_evaluator_can_be_called_like_it() -> None:
    with pytest.raises(CalfatError) as raised:
        experiment("calfat.monitor.evaluators=[{name: natural, label: used}]")
    assert "the label 'used' is the name of a column of every run in rounds.csv" in str(raised.value)


def test_a_sum_needs_every_round(tmp_path: Path) -> None:
    """A client of a plugin need not count passes in each round: what is left is no sum of all."""
    run = experiment()
    with RunWriter(RunDirectory.create(run, tmp_path / "run"), run) as writer:
        for number, passes in ((1, None), (2, 70.0)):
            one = dataclasses.replace(record(number, {}), passes=passes)
            writer.round_finished(one, Snapshot(round=number, global_state={}))
        writer.run_finished(RunResult((), 2, 1.0))
    metrics = json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]
    assert metrics == {"bytes_down": 2000.0, "bytes_up": 2200.0, "overfitted": 0.0, "used": 2.0}
