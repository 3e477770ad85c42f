"""A cross-silo run that stops early: the server decides, and clients end as after the last round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs.test_early_stopping import SCRIPTED
from tests.silo.federation import Federation, assert_same_bits


@pytest.mark.slow
def test_all_parties_end_in_the_round_of_the_simulation_and_go_on_with_more_patience(tmp_path: Path) -> None:
    file = tmp_path / "scripted.py"
    file.write_text(SCRIPTED)
    changes = {
        "train_args": {"comm_round": 5, "patience": 2},
        "data_args": {"validation_share": 0.1},
        "monitor": {"evaluators": ["scripted"]},
    }
    with Federation(tmp_path / "run", **changes) as federation:
        federation.options, federation.reports = ("--plugin", str(file)), False
        federation.start_all()
        federation.finish()
        simulated = federation.simulate(None, "--plugin", str(file))
        assert_same_bits(federation.model(), simulated)
        assert [row["round"] for row in federation.rounds()] == ["1", "2", "3", "4"]
        results = json.loads((federation.directory(0) / "results.json").read_text())
        assert results["stopped_early"]["round"] == results["rounds"] == 4
        for rank in (1, 2):
            goodbye = json.loads((federation.directory(rank) / "finished.json").read_text())
            assert (goodbye["rounds"], goodbye["patience"]) == (4, 2)
        federation.start(1, resume=True)  # alone: the server is gone
        assert federation.exit_status(1) == 0
        assert "the run stopped early after round 4. To go further, resume all parties with a" in federation.output(1)
        federation.options += ("--set", "train_args.patience=3")
        for rank in (0, 1, 2):
            federation.start(rank, resume=True)
        federation.finish()
        assert [row["round"] for row in federation.rounds()] == ["1", "2", "3", "4", "5"]
