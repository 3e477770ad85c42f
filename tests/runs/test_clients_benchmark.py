"""``benchmarks/clients.py``, small: it measures two runs whose rounds differ in the number of clients alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import clients
from calfat_plugin.runs.checkpoints import load_checkpoint
from tests.runs.test_benchmarks import tables


@pytest.mark.usefixtures("undrawn")
def test_a_round_of_two_clients_is_measured(tmp_path: Path) -> None:
    """Of the smaller run, which leaves out what the larger one's other clients have."""
    setting = clients.Setting(6, 2, 2, 12, "cnn_small", 1)
    clients.make(setting, tmp_path / "6")
    snapshot, _ = load_checkpoint(tmp_path / "6" / "checkpoints" / "last.safetensors")
    assert (snapshot.round, len(snapshot.client_states)) == (1, 6)
    measured = clients.run_rounds(setting, tmp_path / "6", 2)
    size = (tmp_path / "6" / "checkpoints" / "last.safetensors").stat().st_size / 1e6
    assert 1.4 * size < measured["MB written a round"] < 2.2 * size  # three models, and one for each of two clients
    assert measured["seconds a round"] > 0
    assert measured["peak memory, MB"] > 10
    assert load_checkpoint(tmp_path / "6" / "checkpoints" / "last.safetensors")[0].round == 5


def test_the_table_has_ratios_of_each_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run is made once, then measured in turn, with the words of the command."""
    seconds = iter([2.0, 3.0, 4.0, 4.0])
    called: list[str] = []

    def in_a_process(*words: str) -> object:
        called.append(" ".join(words[-2:]).replace(str(tmp_path), "."))
        assert words[:2] == ("--per-round", "10")
        return None if "--make" in words else {"seconds a round": next(seconds), "peak memory, MB": 500.0}

    monkeypatch.setattr(clients, "_in_a_process", in_a_process)
    path = tmp_path / "numbers.json"
    sizes = ["--per-round", "10", "--repeats", "2", "--runs", str(tmp_path), "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["clients", *sizes])
    clients.main()
    assert called == ["--make ./10", "--make ./1000", *(["--measure ./10", "--measure ./1000"] * 2)]
    out = capsys.readouterr().out
    assert out.startswith("### Many clients\n\n")
    assert "vector units" in out
    assert tables(out)["clients"] == [
        ["10", "10", "3 (2-4)", "500 (500-500)"],
        ["1,000", "10", "3.5 (3-4)", "500 (500-500)"],
        ["ratio", "", "1.25 (1-1.5)", "1 (1-1)"],
    ]
    assert json.loads(path.read_text())["numbers"]["1,000 clients"]["seconds a round"]["values"] == [3.0, 4.0]
