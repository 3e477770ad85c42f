"""Fixtures of the tests that run ``calfat`` in processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.processes import RECIPE, WarmServer


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmServer]:
    """Starts ``calfat`` processes in no time."""
    server = WarmServer(tmp_path_factory.mktemp("warm"))
    yield server
    server.close()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The tests' recipe, in a folder of its own."""
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_page: None) -> Path:
    """The current folder, with the recipe of ``mortals.py`` in it."""
    from tests.runs.mortals import MORTAL, RECIPE

    monkeypatch.syspath_prepend(str(MORTAL))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mortal.yaml").write_text(RECIPE)
    return tmp_path
