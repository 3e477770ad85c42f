"""The numbers of studies/short can be made again, within the differences between processors."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from calfat_plugin.suites.record import read_record
from tests.cli.runner import COMMAND, ROOT

RECORD = ROOT / "studies" / "short" / "study_digits_runs.csv"
KEY = ("0.1/FedPGD", "", 1001)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_run_of_the_study(tmp_path: Path) -> None:
    """A clone without this run's row trains it again, with the learning rate that the record says was chosen."""
    with RECORD.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    place = [head.index(column) for column in ("cell", "tried", "seed")]
    this = [row for row in rows if [row[column] for column in place] == list(map(str, KEY))]
    assert len(this) == 1
    record = tmp_path / "runs.csv"
    with record.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([head, *(row for row in rows if row not in this)])
    suite = ["suite", str(ROOT / "studies" / "short" / "study_digits.yaml"), "--record", str(record), "--only", KEY[0]]
    subprocess.run([sys.executable, "-c", COMMAND, *suite, "--jobs", "1"], cwd=tmp_path, check=True)
    published, again = read_record(RECORD), read_record(record)
    assert published.keys() == again.keys()
    for metric in ("natural", "pgd20"):  # other processors round differently, which is as good as another seed
        assert again[KEY].values[metric] == pytest.approx(published[KEY].values[metric], rel=0, abs=0.15)
