"""Suites whose columns are those that a model serves worst, and rows that are compared over seeds."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from calfat_plugin.errors import CalfatError
from calfat_plugin.registry import Registry
from calfat_plugin.report.scores import DIFFERENCES, WORST_DEFINED
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import SuitePlan, make_plan
from calfat_plugin.suites.summary import SuiteSummary, summarise
from calfat_plugin.suites.tables import as_csv, as_json, caption, latex, markdown
from tests.snapshot import TextSnapshot
from tests.suites.fake_run import written
from tests.suites.files import SUITE, write_suite

METRICS = "metrics: {pgd20: PGD-20, 'pgd20:worst-class': worst class, 'pgd20:worst-clients': worst clients}"
TEXT = SUITE.replace("metrics: {natural: natural, pgd20: PGD-20}", METRICS).replace("[0, 1]", "[0, 1, 2, 3]")
COUNTS = [[30, 10], [10, 30]]


pytestmark = pytest.mark.usefixtures("in_a_folder")


def plan(folder: Path, text: str = TEXT) -> SuitePlan:
    return make_plan(load_suite(write_suite(folder, text)), Registry.load(entry_points=False))


def summary(folder: Path, per_class: dict[str, tuple[float, float]], text: str = TEXT, **beside: Any) -> SuiteSummary:
    """Every run finished: a cell's accuracies of two classes, a tenth more with odd seeds; ``beside``: more keys."""
    planned, outcomes = plan(folder, text), []
    for run in planned.runs:
        run.directory.mkdir(parents=True)
        values = [value + run.seed % 2 / 10 for value in per_class[run.cell.labels[-1]]]
        clients = [(3 * one + other) / 4 for one, other in (values, values[::-1])]
        worst = {"worst_clients": {"accuracy": min(clients), "ids": [0]}}
        found = written("pgd20", sum(values) / 2, per_class=values) | worst | beside
        (run.directory / "results.json").write_text(json.dumps({"evaluations": [found]}))
        (run.directory / "partition.json").write_text(json.dumps({"class_counts": COUNTS}))
        outcomes.append(run.ended("finished"))
    return summarise(planned, outcomes)


def test_the_worst_are_columns(tmp_path: Path) -> None:
    """Clients weight the classes 3 : 1 and 1 : 3, so the worse of CalFAT's is at 0.75 x 0.2 + 0.25 x 0.6 = 0.3."""
    found = summary(tmp_path, {"CalFAT": (0.2, 0.6), "FedPGD": (0.4, 0.4)})
    calfat, fedpgd = (cell.scores for cell in found.cells)
    assert [score.mean for score in calfat.values()] == pytest.approx([0.45, 0.25, 0.35])
    assert [score.mean for score in fedpgd.values()] == pytest.approx([0.45, 0.45, 0.45])
    assert [score.is_clear_best for score in fedpgd.values()] == [False, True, True]
    assert WORST_DEFINED in caption(found)
    row = markdown(found).splitlines()[4]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        *("CalFAT", "4", "45.00 ± 5.77 [35.8, 54.2]", "25.00 ± 5.77 [15.8, 34.2]", "35.00 ± 5.77 [25.8, 44.2]")
    ]


def test_one_seed_has_wilsons_interval_and_its_worst_class_has_none(tmp_path: Path) -> None:
    found = summary(tmp_path, {"CalFAT": (0.2, 0.6), "FedPGD": (0.4, 0.4)}, TEXT.replace("[0, 1, 2, 3]", "[0]"))
    row = markdown(found).splitlines()[4]
    assert [cell.strip() for cell in row.split("|")[3:-1]] == ["40.00 [30.9, 49.8]", "20.00", "30.00"]
    assert DIFFERENCES not in markdown(found)
    assert "**" not in markdown(found)
    assert "mathbf" not in latex(found)


def test_differences_are_paired_and_clear_ones_bold(tmp_path: Path) -> None:
    text = TEXT.replace(METRICS, "metrics: [pgd20]").replace(
        "    FedPGD", "    Other: {calfat.trainer: mixfat}\n    FedPGD"
    )
    found = summary(tmp_path, {"CalFAT": (0.6, 0.6), "Other": (0.2, 0.2), "FedPGD": (0.5, 0.5)}, text)
    written = markdown(found)
    assert "| CalFAT |   4 | **65.00 ± 5.77** [55.8, 74.2] |" in written
    assert (
        "| method |   n |                   pgd20 |\n"
        "| ------ | --: | ----------------------: |\n"
        "| CalFAT |   4 | +10.00 [+10.00, +10.00] |\n"
        "| Other  |   4 | -40.00 [-40.00, -40.00] |\n"
        "| FedPGD |   4 | -10.00 [-10.00, -10.00] |\n"
        f"\n{DIFFERENCES}\n"
    ) in written
    assert r"CalFAT & 4 & $\mathbf{65.00} \pm 5.77$ {\scriptsize [55.8, 74.2]} \\" in latex(found)
    first, second, third = csv.DictReader(io.StringIO(as_csv(found)))
    assert (first["rival"], second["rival"], third["rival"]) == ("FedPGD", "CalFAT", "CalFAT")
    assert (third["rival_points"], third["rival_low_points"], third["rival_high_points"]) == ("-10.0000",) * 3
    scores = [cell["scores"]["pgd20"] for cell in as_json(found)["cells"]]
    assert [score["clear_best"] for score in scores] == [True, False, False]
    assert scores[1]["rival"]["seeds"] == 4


@pytest.mark.parametrize(
    "setting", ["data_args.partition_alpha: 0.5", "calfat.evaluators: [{name: pgd20, restarts: 2}]"]
)
def test_rows_of_other_problems_or_attacks_do_not_compare(setting: str, tmp_path: Path) -> None:
    text = TEXT.replace("{calfat.trainer: fedpgd}", f"{{{setting}}}")
    found = summary(tmp_path, {"CalFAT": (0.6, 0.6), "FedPGD": (0.2, 0.2)}, text)
    assert [score.rival for cell in found.cells for score in cell.scores.values()] == [None] * 6


@pytest.mark.parametrize("metric", ["pgd20:worst-clas", "cw20:worst-class", "pgd20:tail"])
def test_a_metric_that_no_run_has_is_refused(metric: str, snapshot: TextSnapshot, tmp_path: Path) -> None:
    with snapshot.raises(CalfatError, "tiny.yaml:5: metrics: "):
        plan(tmp_path, TEXT.replace(METRICS, f"metrics: ['{metric}']"))


def test_published_numbers_may_be_of_the_worst_class(tmp_path: Path) -> None:
    reported = "reported: {source: a paper, percent: {CalFAT: {pgd20: 40, 'pgd20:worst-class': 20}}}\n"
    found = summary(tmp_path, {"CalFAT": (0.2, 0.6), "FedPGD": (0.4, 0.4)}, TEXT + reported)
    assert found.plan.warnings == ()
    assert [score.reported for score in found.cells[0].scores.values()] == [0.4, 0.2, None]
    experiment = found.cells[0].cell.experiment
    assert experiment is not None
    assert experiment.as_run()["calfat"]["reported"] == {"source": "a paper", "pgd20": 40}
