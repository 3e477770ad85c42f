"""Fixtures of the report's tests."""

from __future__ import annotations

import pytest

from calfat_plugin.report.charts import Drawing
from tests.report.real import RealRun, real_run


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """A small real run with both loggers on."""
    return real_run(tmp_path_factory.mktemp("real"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without figures, where the test is about something else."""
    drawing = Drawing("title", "caption", False, "data:,")
    monkeypatch.setattr("calfat_plugin.report.charts.render", lambda chart, figures: drawing)
