"""``calfat.loggers`` and ``calfat.reported`` in a recipe."""

from __future__ import annotations

import pytest

from calfat_plugin.errors import RecipeError
from calfat_plugin.experiment import assemble, same_but_rounds
from calfat_plugin.loggers.wandb import WandbOptions
from calfat_plugin.recipe.document import Document
from tests.report.made import experiment
from tests.snapshot import TextSnapshot


def test_neither_is_needed_nor_keeps_a_run_from_being_resumed() -> None:
    run, other = experiment(), experiment("calfat.loggers=[tensorboard]", "calfat.reported={natural: 60}")
    assert (run.loggers, run.reported.percent) == ((), {})
    assert run.as_run()["calfat"]["loggers"] == []
    assert run.as_run()["calfat"]["reported"] == {"source": ""}
    assert same_but_rounds(run.as_run(), other.as_run()) == []


def test_both_are_written_out_in_full_and_read_again() -> None:
    run = experiment(
        "calfat.loggers=[tensorboard, {name: wandb, project: fat, label: mine}]",
        "calfat.reported={source: Table 1, natural: 64.69, pgd20: 1e1}",
    )
    assert [(pick.name, pick.label) for pick in run.loggers] == [("tensorboard", "tensorboard"), ("wandb", "mine")]
    assert run.loggers[1].options == WandbOptions(project="fat", entity=None, mode="offline")
    assert run.reported.percent == {"natural": 64.69, "pgd20": 10.0}
    again = assemble(Document("again.yaml", run.as_run()), run.registry)
    assert again.as_run() == run.as_run()


@pytest.mark.parametrize(
    "override",
    [
        "calfat.loggers=tensorboard",
        "calfat.loggers=[wandb, wandb]",
        "calfat.loggers=[tensorbord]",
        "calfat.loggers=[{name: wandb, mode: onlin}]",
        "calfat.reported={source: 3}",
        "calfat.reported={natural: many}",
        "calfat.reported={natural: 101}",
    ],
)
def test_what_is_wrong_is_reported_with_its_place(override: str, snapshot: TextSnapshot) -> None:
    with snapshot.raises(RecipeError, f"--set {override}: calfat."):
        experiment(override)
