"""The local optimiser on the page: its settings in words, and the learning rate as a curve where it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from calfat_plugin.report.charts import learning_rate
from calfat_plugin.report.labels import highlights, method
from calfat_plugin.report.reading import read_run
from tests.report.made import made_run

PLAIN = {
    "Rounds": "4, local epochs 1, batches of 64",
    "Local SGD": "learning rate 0.01, momentum 0.9, weight decay 0.0002",
}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ((), PLAIN),
        (
            ("local_steps=30", "nesterov=true", "max_grad_norm=1/2"),
            {
                "Rounds": "4, local steps 30, batches of 64",
                "Local SGD": "learning rate 0.01, momentum 0.9 (Nesterov), weight decay 0.0002, gradients clipped to "
                "norm 0.5",
            },
        ),
        (
            ("client_optimizer=adamw", "warmup_rounds=2", "lr_schedule=cosine", "learning_rate_min=1e-3"),
            {"Local AdamW": "learning rate 0.01 (warm-up rounds 2, cosine to 0.001), weight decay 0.0002"},
        ),
        (
            ("client_optimizer=adam", "lr_schedule=step", "lr_step_size=2"),
            {"Local Adam": "learning rate 0.01 (times 0.1 every 2 rounds), weight decay 0.0002"},
        ),
    ],
)
def test_settings_that_are_in_force_are_said(asked: tuple[str, ...], found: dict[str, str], tmp_path: Path) -> None:
    run = read_run(made_run(tmp_path / "run", *(f"train_args.{each}" for each in asked)))
    said = highlights(run)
    assert {term: said[term] for term in found} == found
    assert len([term for term in said if term.startswith("Local ")]) == 1


def test_what_is_added_to_a_method_is_said(tmp_path: Path) -> None:
    added = "calfat.trainer.awp.warmup=2", "calfat.trainer.label_smoothing=0.1", "calfat.ema={}"
    run = read_run(made_run(tmp_path / "run", *added, final={"natural": 0.5}))
    assert highlights(run)["Method"].endswith(", label_smoothing 0.1, awp gamma 0.005, warmup 2)")
    assert highlights(run)["Moving average"] == "of the global models, decay 0.9"
    assert method(run) == "calfat + label smoothing + awp"
    assert run.results["model"] == "moving average of the global models after the final round"
    plain = read_run(made_run(tmp_path / "plain"))
    assert "Moving average" not in highlights(plain)
    assert method(plain) == "calfat"


def test_a_learning_rate_that_changes_is_a_curve(tmp_path: Path) -> None:
    assert learning_rate(read_run(made_run(tmp_path / "constant"))) is None
    run = read_run(made_run(tmp_path / "warm", "train_args.warmup_rounds=3", "train_args.learning_rate=0.4"))
    assert run.curve("learning_rate") == [(number, pytest.approx(number / 10)) for number in range(1, 5)]
    chart = learning_rate(run)
    assert chart is not None
    assert chart.caption == "Of the clients' optimisers, as the recipe has it. Last round: 0.4."


@pytest.mark.parametrize(
    ("inner", "searched"),
    [("pgd", "2 training steps of ε/2"), ("n-fgsm", "training by n-fgsm (noise 2, step 1)")],
)
def test_the_attack_of_training_is_said(inner: str, searched: str, tmp_path: Path) -> None:
    run = read_run(made_run(tmp_path / "run", f"calfat.threat.inner={inner}"))
    assert highlights(run)["Threat"].endswith(f", {searched}")
