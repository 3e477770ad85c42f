"""What was run, by recipe key."""

from __future__ import annotations

from pathlib import Path

from calfat_plugin.report.charts import learning_curves
from calfat_plugin.report.labels import highlights
from calfat_plugin.report.run_page import final_tables
from calfat_plugin.stored_run import Run
from tests.report.made import FINAL, made_run


def test_what_was_run_is_keys_of_the_recipe(tmp_path: Path) -> None:
    added = "calfat.trainer.awp.warmup=2", "calfat.ema={}", "train_args.max_grad_norm=1/2", "calfat.threat.inner=n-fgsm"
    found = highlights(Run.load(made_run(tmp_path / "run", *added)))
    wanted = {
        "data_args.dataset": "digits",
        "data_args.partition_alpha": "0.1",
        "train_args.max_grad_norm": "0.5",
        "train_args.nesterov": "false",
        "calfat.trainer.name": "calfat",
        "calfat.trainer.awp.warmup": "2",
        "calfat.ema.decay": "0.9",
        "calfat.threat.eps": "0.1",
        "calfat.threat.inner.name": "n-fgsm",
    }
    assert wanted.items() <= found.items()
    plain = highlights(Run.load(made_run(tmp_path / "plain")))
    assert not {"train_args.max_grad_norm", "calfat.ema.decay", "calfat.clients"} & plain.keys()  # null, none, empty
    left_out = "calfat.runtime.", "calfat.evaluators", "calfat.monitor.", "common_args.random_seed", "tracking_args."
    assert [key for key in found if key.startswith(left_out)] == []


def test_curves_and_table_say_which_model_they_are_of(tmp_path: Path) -> None:
    recipes = {"a": (), "b": ["calfat.ema={}"]}
    plain, averaged = (Run.load(made_run(tmp_path / name, *ema, final=FINAL)) for name, ema in recipes.items())
    charts = list(filter(None, map(learning_curves, (plain, averaged))))
    starts = [chart.caption.partition(" after each round.")[0] for chart in charts]
    assert starts == ["The global model", "The moving average of the global models"]
    notes = [final_tables(run)[0].notes[0].partition(" after the final round.")[0] for run in (plain, averaged)]
    assert notes == ["Global model", "Moving average of the global models"]
