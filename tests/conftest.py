"""What every test runs under."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import programs, reaper
from tests import snapshot as snapshots
from tests.snapshot import snapshot  # noqa: F401  (a fixture of every test)

# What this user has run before is noted in his home (recipe/plugin_files.py): not what tests run.
_STATE = tempfile.TemporaryDirectory(prefix="calfat-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: tests share few cores, also through subprocesses

# Tests of the studies, the documentation and the packaging: marked `repository`, and no part of `make test`.
_TESTS = Path(__file__).parent
REPOSITORY = (_TESTS / "studies", _TESTS / "docs", _TESTS / "install", _TESTS / "test_setup.py")

settings.register_profile("house", derandomize=True, deadline=None)
settings.load_profile("house")

# A shell's background job starts with SIGINT ignored, and nohup ignores SIGHUP; what tests start would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

reaper.watch_this_process()


def pytest_addoption(parser: pytest.Parser) -> None:
    snapshots.add_option(parser)
    parser.addoption(
        "--weight-noise",
        type=int,
        metavar="SEED",
        help="multiply the weights of stored models by 1 + 1e-4 noise of this seed",
    )


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of the test is the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process ends without its page: drawing the figures takes most of a short run's time."""
    monkeypatch.setattr("calfat_plugin.report.write_run_report", lambda path: path / "report.html")


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of this process list figures that nobody has drawn."""
    from tests.report.made import draw_nothing

    draw_nothing(monkeypatch)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked as needing a program is skipped, or fails, before its fixtures look for that program."""
    for marker in item.iter_markers("needs"):
        programs.require(*marker.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    snapshots.note_outcome(item, report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whole federations are trained last: with ``-x`` quick tests find most mistakes first."""
    snapshots.note_collected(config, items)
    items.sort(key=lambda item: "reference" in item.path.parts)
    for item in items:
        if "stored_model" in getattr(item, "fixturenames", ()):
            item.add_marker("stored")
        if any(item.path.is_relative_to(place) for place in REPOSITORY):
            item.add_marker("repository")
