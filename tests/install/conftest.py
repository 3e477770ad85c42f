"""The distributions, built once for all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.install.environments import build


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our sdist, and the wheel that was built from it."""
    return build(tmp_path_factory.mktemp("dist"))
