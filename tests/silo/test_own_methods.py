"""Methods beyond two losses, from outside the package: the same bits in every runtime, as the built-in ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.test_beyond import METHODS, install_methods
from tests.silo import broker, parity

pytestmark = pytest.mark.slow


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[parity.Tools]:
    """Runtimes whose processes find the methods."""
    install_methods(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    for method in METHODS:
        monkeypatch.setitem(parity.METHODS, method, {"trainer": {"name": method}})  # type: ignore[arg-type]
    with parity.Tools(tmp_path / "tools") as found:
        yield found


def test_every_runtime_ends_with_the_same_model(tmp_path: Path, tools: parity.Tools) -> None:
    runtimes = [name for name in parity.RUNTIMES if name != "MQTT_S3" or broker.MOSQUITTO is not None]
    cases = [parity.Case(method, "2 of 3") for method in METHODS]
    rows = {case.method: [parity.model_hash(runtime, case, tmp_path, tools) for runtime in runtimes] for case in cases}
    assert [method for method, row in rows.items() if len(set(row)) > 1] == [], rows
    assert len({row[0] for row in rows.values()}) == len(rows)  # and no two methods are alike
