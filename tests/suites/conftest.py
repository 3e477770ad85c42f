"""What tests of suites share: the built-in plugins, and plans of small suites in a directory of their own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from calfat_plugin.registry import Registry
from calfat_plugin.suites import load_suite, runner
from calfat_plugin.suites.plan import SuitePlan, make_plan
from tests.suites.files import CHOOSING, use_fake_run, write_suite


@pytest.fixture(scope="session")
def registry() -> Registry:
    return Registry.load(entry_points=False)


@pytest.fixture
def plan_of(tmp_path: Path, in_a_folder: None, registry: Registry) -> Callable[..., SuitePlan]:
    """Write a suite that chooses, or another text, to the working directory of the test, and plan it."""

    def make(text: str = CHOOSING, name: str = "tiny", **asked) -> SuitePlan:
        return make_plan(load_suite(write_suite(tmp_path, text, name)), registry, **asked)

    return make


def use_stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`calfat suite tiny.yaml` in a folder, with a stand-in for ``calfat run`` on one thread."""
    monkeypatch.chdir(folder)
    use_fake_run(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["calfat", "suite", "tiny.yaml"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None) -> None:
    """The same in the directory of the test."""
    use_stand_in(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def all_finished(tmp_path_factory: pytest.TempPathFactory, registry: Registry) -> Path:
    """The runs of :data:`SUITE`, all finished."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_stand_in(folder, monkeypatch)
        runner.run_all(make_plan(load_suite(write_suite(folder)), registry), 1, runner.SuiteObserver(), [])
    return folder / "runs"


@pytest.fixture
def finished(tmp_path: Path, all_finished: Path, stand_in: None) -> None:
    """The directory of the test has that suite and its finished runs."""
    write_suite(tmp_path)
    shutil.copytree(all_finished, tmp_path / "runs")
