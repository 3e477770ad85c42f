"""The section ``front`` of a suite: what rows reach for what they cost, in the table, in suite.json and on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calfat_plugin.errors import RecipeError, RunError
from calfat_plugin.maths.intervals import student
from calfat_plugin.registry import Registry
from calfat_plugin.report.comparison import comparison_page, group_runs
from calfat_plugin.report.front import front_chart
from calfat_plugin.report.reading import read_run, read_suite
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.cells import PlannedRun
from calfat_plugin.suites.front import points
from calfat_plugin.suites.record import Recorded, digest
from calfat_plugin.suites.summary import SuiteSummary
from calfat_plugin.suites.tables import markdown, write_tables
from tests.report.made import made_run
from tests.report.pages import Page
from tests.snapshot import TextSnapshot
from tests.suites.files import recorded, write_suite

SUITE = """\
base: base.yaml
seeds: [1, 2]
metrics: {pgd20: PGD-20, passes: passes}
front: {cost: passes, reached: pgd20, curve: method}
axes:
  rounds:
    long: {train_args.comm_round: 40}
    short: {train_args.comm_round: 10}
  method:
    CalFAT: {}
    FedPGD: {calfat.trainer: fedpgd}
"""
#: Cell to (passes, PGD-20) of the seeds; None: its training diverged.
VALUES: dict[str, tuple[tuple[float, float] | None, ...]] = {
    "long/CalFAT": ((4000, 0.50), (4200, 0.54)),
    "long/FedPGD": ((3600, 0.50), (3600, 0.55)),  # fewer passes and more: CalFAT's long row is beaten
    "short/CalFAT": ((1000, 0.40), None),  # 0.2 with the lost run
    "short/FedPGD": ((1000, 0.30), (1000, 0.20)),
}


@pytest.fixture
def summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry) -> SuiteSummary:
    monkeypatch.chdir(tmp_path)

    def row(run: PlannedRun) -> Recorded:
        found = VALUES[run.cell.name][run.seed - 1]
        values = {} if found is None else {"passes": found[0], "pgd20": found[1]}
        return Recorded("finished" if values else "lost", digest(run.experiment), values)

    return recorded(tmp_path, SUITE, registry, row)


def test_the_front_is_what_nothing_cheaper_beats(summary: SuiteSummary) -> None:
    found = [(each.curve, each.name, each.cost, each.reached.mean, each.on_front) for each in points(summary)]
    assert found == [
        ("CalFAT", "short", 1000.0, pytest.approx(0.2), False),  # as dear as the next one
        ("FedPGD", "short", 1000.0, pytest.approx(0.25), True),
        ("FedPGD", "long", 3600.0, pytest.approx(0.525), True),
        ("CalFAT", "long", 4100.0, pytest.approx(0.52), False),
    ]
    assert points(summary)[2].reached.interval == student((0.5, 0.55))


def test_another_cost_makes_another_front(summary: SuiteSummary) -> None:
    dearer = {"short": 9.0, "long": 1.0}
    found = points(summary, lambda row: dearer[row.cell.labels[0]])
    assert [(each.curve, each.name, each.cost, each.on_front) for each in found] == [
        ("CalFAT", "long", 1.0, False),
        ("FedPGD", "long", 1.0, True),
        ("CalFAT", "short", 9.0, False),
        ("FedPGD", "short", 9.0, False),
    ]


def test_it_is_in_the_table_and_in_json(summary: SuiteSummary, snapshot: TextSnapshot) -> None:
    _, found = markdown(summary).split("\nNo row ")
    snapshot(f"No row {found}")
    (folder,) = write_tables(summary, None)
    front = read_suite(folder).front
    assert (front["cost"], front["reached"]) == ("passes", "PGD-20")
    assert [(point["curve"], point["mean"], point["on_front"]) for point in front["points"]] == [
        (each.curve, each.reached.mean, each.on_front) for each in points(summary)
    ]


def test_the_page_has_the_figure(summary: SuiteSummary, tmp_path: Path) -> None:
    (folder,) = write_tables(summary, None)
    suite = read_suite(folder)
    run = read_run(made_run(tmp_path / "run", final={"natural": 0.5}))
    (tmp_path / "page.html").write_text(comparison_page("t", group_runs([run]), tmp_path, suite=suite))
    text = Page.read(tmp_path / "page.html").text
    assert "What is reached for what it costs" in text
    assert "FedPGD, short: 25.0 %; FedPGD, long: 52.5 %." in text
    drawn = (tmp_path / "front.svg").read_text()
    assert "CalFAT" in drawn  # pale, but there
    assert ">1,000<" in drawn
    assert "mathdefault" not in drawn


def test_rows_of_one_axis_are_named_by_their_label_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> None:
    monkeypatch.chdir(tmp_path)
    one_axis = "\n".join(
        line for line in SUITE.splitlines() if not line.startswith(("  rounds", "    long", "    short"))
    )

    def row(run: PlannedRun) -> Recorded:
        cost = 1000.0 if run.cell.name == "CalFAT" else 2000.0
        return Recorded("finished", digest(run.experiment), {"passes": cost, "pgd20": cost / 4000})

    found = recorded(tmp_path, one_axis, registry, row)
    (folder,) = write_tables(found, None)
    assert "\n| CalFAT |   1000 |" in markdown(found).split("\nNo row ")[1]
    chart = front_chart(read_suite(folder).front)
    assert chart is not None
    assert chart.caption.endswith(
        "from cheap to dear: CalFAT: 25.0\N{NO-BREAK SPACE}%; FedPGD: 50.0\N{NO-BREAK SPACE}%."
    )


def test_one_row_alone_is_no_figure() -> None:
    assert front_chart({}) is None
    assert front_chart({"points": [{}]}) is None


def test_a_damaged_figure_is_named(summary: SuiteSummary) -> None:
    (folder,) = write_tables(summary, None)
    content = json.loads((folder / "suite.json").read_text())
    content["front"]["points"][1]["mean"] = 2
    (folder / "suite.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match=r"suite\.json: front\.points\[1\]\.mean is 2 "):
        read_suite(folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [("cost: passes", "cost: pases"), ("reached: pgd20", "reached: pgd10"), ("curve: method", "curve: methods")],
)
def test_a_name_that_the_suite_does_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, snapshot: TextSnapshot
) -> None:
    monkeypatch.chdir(tmp_path)
    with snapshot.raises(RecipeError, "tiny.yaml:4: front."):
        load_suite(write_suite(tmp_path, SUITE.replace(old, new)))
