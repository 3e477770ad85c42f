"""Fixtures of the report's tests."""

from __future__ import annotations

import pytest

from tests.report.real import RealRun, real_run


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """A small real run with both loggers on."""
    return real_run(tmp_path_factory.mktemp("real"))
