"""Fixtures of the report's tests."""

from __future__ import annotations

import pytest

from tests.report.made import draw_nothing
from tests.report.real import RealRun, real_run


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """A small real run with both loggers on."""
    return real_run(tmp_path_factory.mktemp("real"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test."""
    draw_nothing(monkeypatch)
