"""Which round's model is kept as the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calfat_plugin.runs.checkpoints import load_checkpoint
from tests.report.made import made_run

# The best rounds are 2 by natural accuracy, 1 by FGSM, 3 by PGD-20; round 4 equals round 3.
ROUNDS = [
    {"natural": 0.5, "fgsm": 0.4, "pgd20": 0.1},
    {"natural": 0.7, "fgsm": 0.3, "pgd20": 0.2},
    {"natural": 0.6, "fgsm": 0.2, "pgd20": 0.3},
    {"natural": 0.6, "fgsm": 0.1, "pgd20": 0.3},
]


@pytest.mark.parametrize(
    ("attacks", "evaluator", "round", "accuracy"),
    [("fgsm, pgd20", "pgd20", 3, 0.3), ("pgd20, fgsm", "fgsm", 1, 0.4), ("pgd20, natural", "pgd20", 3, 0.3)],
)
def test_best_robust_is_by_the_last_attack(
    tmp_path: Path, attacks: str, evaluator: str, round: int, accuracy: float
) -> None:
    labels = attacks if "natural" in attacks else f"natural, {attacks}"
    seen = [{label: row[label] for label in labels.split(", ")} for row in ROUNDS]
    run = made_run(tmp_path / "run", f"calfat.monitor.evaluators=[{labels}]", rounds=seen, final={"natural": 0.6})
    selected = json.loads((run / "results.json").read_text())["test_selected"]
    assert selected == {
        "best-natural": {
            "round": 2,
            "evaluator": "natural",
            "accuracy": 0.7,
            "checkpoint": "checkpoints/best-natural.safetensors",
        },
        "best-robust": {
            "round": round,
            "evaluator": evaluator,
            "accuracy": accuracy,
            "checkpoint": "checkpoints/best-robust.safetensors",
        },
    }
    assert load_checkpoint(run / "checkpoints/best-robust.safetensors")[0].round == round
