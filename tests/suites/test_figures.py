"""Columns that are no accuracies: what trainers, aggregators and evaluators of plugins measure beside."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from calfat_plugin import EvaluatorEntry, Registry, TrainerEntry
from calfat_plugin.errors import CalfatError
from calfat_plugin.evaluators.natural import Natural
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import SuitePlan, make_plan
from calfat_plugin.suites.summary import SuiteSummary, summarise
from calfat_plugin.suites.tables import as_csv, caption, markdown
from calfat_plugin.trainers.fedpgd import FedPGD
from tests.plugins import offering
from tests.snapshot import TextSnapshot
from tests.suites.fake_run import written
from tests.suites.files import write_suite

SUITE = """\
base: base.yaml
title: Figures
set: {calfat.trainer: wide, calfat.evaluators: [natural, fog]}
axes:
  batch:
    small: {train_args.batch_size: 16}
    large: {train_args.batch_size: 64}
seeds: [0, 1]
metrics: {fog: Fog, fog/ece: ECE, train/margin: margin}
"""
PLUGIN = offering(
    TrainerEntry("wide", build=FedPGD, metrics={"margin": "of a test"}),
    EvaluatorEntry("fog", build=Natural, metrics={"ece": "calibration error"}),
)


pytestmark = pytest.mark.usefixtures("in_a_folder")


def plan(folder: Path, text: str = SUITE) -> SuitePlan:
    registry = Registry.load(entry_points=False, plugins=[PLUGIN])
    return make_plan(load_suite(write_suite(folder, text)), registry)


@pytest.fixture
def summary(tmp_path: Path) -> SuiteSummary:
    """The small batches finished twice; the second has no calibration error."""
    return finished(tmp_path, "small")


def finished(folder: Path, *cells: str) -> SuiteSummary:
    planned, outcomes = plan(folder), []
    for run in planned.runs:
        if run.cell.name in cells:
            run.directory.mkdir(parents=True)
            fog = written("fog", 0.5, num_examples=30, metrics={"ece": None if run.seed else 0.0625})
            natural = written("natural", 0.75, num_examples=30)
            content = {"seconds": 1.0, "evaluations": [natural, fog], "metrics": {"train/margin": 1.5 + run.seed}}
            (run.directory / "results.json").write_text(json.dumps(content))
            outcomes.append(run.ended("finished"))
    return summarise(planned, outcomes)


def test_they_are_shown_as_measured(summary: SuiteSummary, snapshot: TextSnapshot) -> None:
    small = markdown(summary).splitlines()[4]
    assert [cell.strip() for cell in small.split("|")[1:-1]] == [
        *("small", "2", "50.00 ± 0.00", "0.0625", "2 ± 0.7071 [-4.353, 8.353]")
    ]
    snapshot(caption(summary))


def test_rows_do_not_compare_by_what_may_be_better_if_it_is_less(tmp_path: Path) -> None:
    for cell in finished(tmp_path, "small", "large").cells:
        compared = {metric: score.rival is not None for metric, score in cell.scores.items()}
        assert compared == {"fog": True, "fog/ece": False, "train/margin": False}


def test_of_a_lost_run_an_accuracy_is_0_and_a_figure_is_nothing(tmp_path: Path) -> None:
    planned = plan(tmp_path)
    (cell, _) = summarise(planned, [run.ended("lost", "it diverged") for run in planned.runs]).cells
    assert {metric: dict(score.by_seed) for metric, score in cell.scores.items()} == {
        "fog": {0: 0.0, 1: 0.0},
        "fog/ece": {},
        "train/margin": {},
    }


def test_csv_has_columns_for_them(summary: SuiteSummary) -> None:
    fog, ece, margin, *_ = csv.DictReader(io.StringIO(as_csv(summary)))
    assert (fog["mean_percent"], fog["mean"]) == ("50.0000", "")
    assert (fog["seeds"], fog["values_percent"], fog["values"]) == ("0 1", "50.0000 50.0000", "")
    assert (ece["mean_percent"], ece["mean"], ece["std"]) == ("", "0.0625", "")
    assert (margin["n"], margin["mean"], margin["std"]) == ("2", "2.0", repr(0.5**0.5))
    assert (margin["seeds"], margin["values_percent"], margin["values"]) == ("0 1", "", "1.5 2.5")


def test_one_that_no_plugin_declares_or_that_is_reported_is_refused(tmp_path: Path, snapshot: TextSnapshot) -> None:
    with snapshot.raises(CalfatError):
        plan(tmp_path, SUITE.replace("fog/ece", "fog/ecc"))
    with snapshot.raises(CalfatError):  # published numbers are accuracies
        plan(tmp_path, SUITE + "reported: {source: nowhere, percent: {small: {fog/ece: 3}}}\n")
