"""``calfat check`` takes suites, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from calfat_plugin.cli.check import check

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "suites").glob("*.yaml")))
def test_every_shipped_suite_passes_check(name: str) -> None:
    file = str(ROOT / "suites" / name)
    result = CliRunner().invoke(check, [file])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith(f"{file}: good. A suite of ")


def test_a_bad_cell_is_reported_by_check(tmp_path: Path) -> None:
    suite = tmp_path / "bad.yaml"
    suite.write_text(
        f"base: {ROOT}/recipes/calfat_digits.yaml\n"
        "axes:\n  method:\n    A: {calfat.trainer: {name: calfatt}}\n"
        "metrics: [natural]\nseeds: [0]\n"
    )
    result = CliRunner().invoke(check, [str(suite)])
    assert result.exit_code == 2
    assert "no local trainer called 'calfatt'. Did you mean 'calfat'?" in result.output
