"""Attacks from inside across silos: the server has what the clients sent, and measures what the simulator measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.silo.federation import Federation


def internal(directory: Path) -> dict[str, Any]:
    """The final evaluation's ``internal``, its seconds aside."""
    evaluations = json.loads((directory / "results.json").read_text())["evaluations"]
    (found,) = (each for each in evaluations if each["label"] == "internal2")
    return {key: value for key, value in found.items() if key not in ("seconds", "worst_clients")}


def test_internal_across_silos_is_that_of_the_simulator(tmp_path: Path) -> None:
    with Federation(tmp_path, train_args={"comm_round": 2}) as federation:
        federation.content["calfat"]["evaluators"] = ["natural", "internal2"]
        federation.recipe.write_text(yaml.safe_dump(federation.content))
        federation.start_all()
        federation.finish()
        federation.simulate()
        found = internal(federation.directory(0))
        assert found["details"]["clients"] == [0, 1]
        assert found == internal(federation.simulated)
