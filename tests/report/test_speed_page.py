"""docs/speed.md: its commands are understood, its rows and columns are those of the code, its links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from calfat_plugin.cli.run import run
from calfat_plugin.runs.rounds import COST_COLUMNS
from tests.cli.runner import ROOT
from tests.runs.test_profile import SPANS

TEXT = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
BENCHMARKS = re.findall(r"^python -m (benchmarks\.\w+) ?(.*)$", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("module", "words"), BENCHMARKS)
def test_the_commands_are_understood(module: str, words: str, tmp_path: Path) -> None:
    """Up to an option that no benchmark has, at which argparse stops: all those before it are known."""
    (tmp_path / "fat.py").touch()
    given = shlex.split(words.replace("/tmp/CalFAT", str(tmp_path)).replace("/tmp/gpu", str(tmp_path)))
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit):
        import_module(module).main([*given, "--no-such-option"])
    assert "unrecognized arguments: --no-such-option\n" in errors.getvalue()
    assert import_module(module).__doc__.splitlines()[2].startswith(f"    python -m {module}")


def test_every_benchmark_of_this_page_is_there() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", TEXT.partition("## Benchmarks")[2], re.MULTILINE)
    assert listed == [module.removeprefix("benchmarks.") for module, _ in BENCHMARKS]
    assert len(listed) == 8


def test_the_rows_of_a_profile_are_listed() -> None:
    rows = re.findall(r"^\| ([a-z, ]+) \|", TEXT.partition("| row |")[2].partition("\n\n")[0], re.MULTILINE)
    shown = {", ".join(path[:2]) for path in SPANS if path[0] == "training" and len(path) > 1}
    shown |= {path[0] for path in SPANS if path[0] != "training"}
    assert set(rows) == {*shown, "training, full gradient", "everything else"}
    assert "--profile" in CliRunner().invoke(run, ["--help"]).output


def test_the_columns_are_those_of_rounds_csv() -> None:
    columns = re.findall(r"^\| `(\w+_mb)` \|", TEXT, re.MULTILINE)
    assert ("seconds", *columns) == COST_COLUMNS


def test_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^a-z -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^##+ (.*)$", TEXT, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert target.startswith("https://") or target.removeprefix("#") in headings, target
    assert "benchmarks/work.py" in TEXT
    assert (ROOT / "benchmarks" / "work.py").is_file()
