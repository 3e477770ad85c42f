"""tests/snapshot.py: another text, a missing and an unused one fail, and what is written is what passes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import bare
from tests.snapshot import TextSnapshot

ROOT = Path(__file__).parents[1]
CONFTEST = """
import pytest
import its_snapshots as snapshots
from its_snapshots import snapshot
pytest_addoption = snapshots.add_option
pytest_collection_modifyitems = snapshots.note_collected

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    snapshots.note_outcome(item, report)
    return report
"""


def run(folder: Path, body: str, *options: str) -> str:
    """What pytest says of a project of one test file."""
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "tests" / "conftest.py").write_text(CONFTEST)
    (folder / "tests" / "test_it.py").write_text(body)
    shutil.copy(ROOT / "tests" / "snapshot.py", folder / "tests" / "its_snapshots.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", *options]
    environment = bare(PYTHONDONTWRITEBYTECODE="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


def test_what_is_written_passes_and_what_is_missing_unused_or_left_over_fails(tmp_path: Path) -> None:
    two = 'def test_one(snapshot, tmp_path):\n    snapshot(f"{tmp_path}/a: no\\nmore")\n    snapshot("next")\n'
    stored = tmp_path / "tests" / "snapshots" / "test_it.yaml"
    assert "not in the snapshot (--update-snapshots writes it):" in run(tmp_path, two)
    assert not stored.exists()
    assert "1 passed" in run(tmp_path, two, "--update-snapshots")
    assert stored.read_text() == "test_one:\n- |-\n  {tmp_path}/a: no\n  more\n- next\n"
    assert "1 passed" in run(tmp_path, two)
    assert "texts that the test did not come to" in run(tmp_path, two.replace('    snapshot("next")\n', ""))
    other = two.replace("test_one", "test_other")
    assert "has entries of no test (--update-snapshots drops them): ['test_one']" in run(tmp_path, other)
    assert "1 passed" in run(tmp_path, other, "--update-snapshots")
    assert "test_one" not in stored.read_text()
    failing = other + "    assert False\n"
    before = stored.read_text()
    assert "1 failed" in run(tmp_path, failing.replace("next", "changed"), "--update-snapshots")
    assert stored.read_text() == before  # a test that fails writes nothing


def test_another_text_fails_with_the_difference() -> None:
    snapshot = TextSnapshot(["error: {folder}/a"], {"/tmp/1": "folder"})
    with pytest.raises(AssertionError, match=r"(?s)- error: {folder}/a.*\+ error: {folder}/b"):
        snapshot("error: /tmp/1/b")


@pytest.mark.parametrize(("error", "part"), [(KeyError, "eps"), (ValueError, "epsilon")])
def test_class_and_parts_of_an_error_hold_whatever_is_stored(error: type[Exception], part: str) -> None:
    def refuse() -> None:
        raise ValueError("eps: got 8")

    with TextSnapshot(None, {}).raises(ValueError, "eps"):
        refuse()
    with pytest.raises((AssertionError, ValueError)), TextSnapshot(None, {}).raises(error, part):
        refuse()


def test_each_stored_text_is_of_a_test_that_there_is() -> None:
    stored = sorted((ROOT / "tests" / "snapshots").rglob("*.yaml"))
    assert stored
    for file in stored:
        tests = (ROOT / "tests" / file.relative_to(ROOT / "tests" / "snapshots")).with_suffix(".py")
        names = set(re.findall(r"^(?:\w+::)*(test_\w+)", file.read_text(), re.MULTILINE))
        assert names <= set(re.findall(r"^ *def (test_\w+)", tests.read_text(), re.MULTILINE)), file
