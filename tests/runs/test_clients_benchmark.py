"""``benchmarks/clients.py``, small: it measures two runs whose rounds differ in the number of clients alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from calfat_plugin.runs.checkpoints import load_checkpoint
from tests.runs.processes import ROOT


@pytest.fixture(scope="module")
def clients() -> ModuleType:
    spec = importlib.util.spec_from_file_location("clients_benchmark", ROOT / "benchmarks" / "clients.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("undrawn")
def test_a_round_of_two_clients_is_measured(clients: ModuleType, tmp_path: Path) -> None:
    setting = clients.Setting(12, 2, 2, 12, "cnn_small", 1)
    clients.make(setting, tmp_path / "12")
    snapshot, _ = load_checkpoint(tmp_path / "12" / "checkpoints" / "last.safetensors")
    assert (snapshot.round, len(snapshot.client_states)) == (1, 12)
    measured = clients.run_rounds(setting, tmp_path / "12", 2)
    size = (tmp_path / "12" / "checkpoints" / "last.safetensors").stat().st_size
    assert 1.4 * size < measured.written < 2.2 * size  # three models in the checkpoint, one for each of two clients
    assert measured.seconds > 0
    assert measured.memory > 1e7
    assert load_checkpoint(tmp_path / "12" / "checkpoints" / "last.safetensors")[0].round == 5


def test_the_table_has_ratios_of_each_repeat(clients: ModuleType) -> None:
    settings = [clients.Setting(count, 10, 2, 1000, "cnn", 1) for count in (10, 1000)]
    few = [clients.Measured(2.0, 4e6, 5e8), clients.Measured(4.0, 4e6, 5e8)]
    many = [clients.Measured(3.0, 5e6, 5e8), clients.Measured(4.0, 5e6, 6e8)]
    assert clients.table(settings, [few, many]).splitlines()[2:] == [
        "| 10 | 10 | 3 (2-4) | 500 (500-500) | 4 (4-4) |",
        "| 1,000 | 10 | 3.5 (3-4) | 550 (500-600) | 5 (5-5) |",
        "| ratio | | 1.25 (1-1.5) | 1.1 (1-1.2) | 1.25 (1.25-1.25) |",
    ]
