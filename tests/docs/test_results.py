"""The tables of the results pages show what the committed tables of their suites say."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from calfat_plugin.suites.record import read_record
from tests.cli.runner import ROOT
from tests.docs.pages import DOCS

MARK = re.compile(r"<!-- table: results/(\w+)\.csv -->\n+((?:\|.*\n)+)")
NUMBER = re.compile(r"\**([\d.]+) ± ([\d.]+)\**")
PAGES = [DOCS / "results_digits.md", DOCS / "results_fmnist.md", ROOT / "README.md"]
RECORDS = sorted((DOCS / "results").glob("*_runs.csv"))
TABLES = [(page, *found) for page in PAGES if page.exists() for found in MARK.findall(page.read_text(encoding="utf-8"))]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def scores(name: str) -> Iterator[tuple[tuple[str, ...], str, dict[str, str]]]:
    """(labels of the row, label of the metric, the row of the CSV file)."""
    axes = list(load_suite(str(ROOT / "suites" / f"{name}.yaml")).axes)
    with open(DOCS / "results" / f"{name}.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield tuple(row[axis] for axis in axes), row["metric"], row


def test_there_are_tables():
    tables = {path.stem for path in (DOCS / "results").glob("*.csv") if path not in RECORDS}
    assert {name for _, name, _ in TABLES} == tables


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_record_continues_its_suite(record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is of a run that the suite has today, with the recipe that it has today."""
    monkeypatch.chdir(tmp_path)
    suite = load_suite(str(ROOT / "suites" / f"{record.stem.removesuffix('_runs')}.yaml"))
    plan = make_plan(replace(suite, record=record), Registry.load(entry_points=False))
    known = {run.key for run in (*plan.choosing.runs, *plan.runs) if run.recorded is not None}
    assert known == set(read_record(record))


@pytest.mark.parametrize(("page", "name", "table"), TABLES, ids=[f"{page.name}-{name}" for page, name, _ in TABLES])
def test_every_number_is_that_of_the_suite(page: Path, name: str, table: str) -> None:
    suite = load_suite(str(ROOT / "suites" / f"{name}.yaml"))
    label = {heading: metric for metric, heading in suite.metrics.items()}
    known = {(labels, metric): row for labels, metric, row in scores(name)}
    head, _, *rows = map(cells, table.splitlines())
    counted = [heading for heading in head if heading.partition(" ")[0] in ("FGSM", "BIM", "CW", "PGD-20")]
    assert all(heading.endswith(" (release)") for heading in counted)  # what these runs wrote was so counted
    head = [re.sub(r" \(.*\)$", "", heading) for heading in head]
    columns = [index for index, heading in enumerate(head) if heading in label]
    assert columns
    assert rows
    for row in rows:
        labels = tuple(row[: len(suite.axes)])
        for index in columns:
            of = known[labels, label[head[index]]]
            shown = NUMBER.fullmatch(row[index])
            assert shown, f"{labels}: {row[index]}"
            measured = [float(of["mean_percent"]), float(of["std_percent"])]
            assert [float(number) for number in shown.groups()] == pytest.approx(measured, rel=0, abs=0.00505), labels
        if "rate" in head:
            assert of["chosen"].startswith(f"learning_rate {row[head.index('rate')]},"), labels
