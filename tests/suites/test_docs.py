"""docs/suites.md says what is true."""

from __future__ import annotations

import re
from pathlib import Path

from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite
from calfat_plugin.suites.plan import make_plan
from calfat_plugin.suites.suite import Choose, Compare, SuiteFile

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "suites.md").read_text(encoding="utf-8")


def test_the_example_resolves(tmp_path, monkeypatch):
    text = PAGE.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "example.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    plan = make_plan(load_suite("example.yaml"), Registry.load(entry_points=False))
    assert [cell.name for cell in plan.cells] == ["0.1/FedPGD", "0.1/CalFAT", "0.5/FedPGD", "0.5/CalFAT"]
    assert len(plan.left) == 9


def test_every_key_is_reported():
    writing, choosing, comparing = re.split("## Choosing values|## Planned", PAGE.split("## Writing a suite")[1])
    assert set(re.findall(r"^\| `(\w+)` \|", writing, flags=re.M)) == set(SuiteFile.model_fields)
    assert set(re.findall(r"^\| `(\w+)` \|", choosing, flags=re.M)) == set(Choose.model_fields)
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", comparing, flags=re.M)
    assert re.findall(r"\w+", " ".join(rows)) == list(Compare.model_fields)
