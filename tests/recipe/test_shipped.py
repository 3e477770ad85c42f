"""Shipped recipes and presets: each is good, and the recipe as run is a recipe that runs the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from calfat_plugin.entries import DatasetEntry, TrainerEntry
from calfat_plugin.errors import RecipeError
from calfat_plugin.experiment import Experiment, assemble, same_but_rounds
from calfat_plugin.host.runtimes import supported_runtime
from calfat_plugin.recipe import read_document
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.registry import Registry
from tests.cli.runner import RECIPES

REGISTRY = Registry.load(entry_points=False)
SHIPPED = sorted(RECIPES.glob("*.yaml"))
PRESETS = [
    (dataset.name, trainer.name, preset)
    for trainer, _ in REGISTRY.offers(TrainerEntry)
    for preset in trainer.presets
    for dataset, _ in REGISTRY.offers(DatasetEntry)
]


def assemble_text(text: str) -> Experiment:
    return assemble(parse_document(text, "again.yaml"), REGISTRY)


def assert_runs_again(experiment: Experiment) -> None:
    as_run = experiment.as_run()
    again = assemble_text(yaml.safe_dump(as_run, sort_keys=False)).as_run()
    assert again == as_run
    assert same_but_rounds(as_run, again) == []


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_a_shipped_recipe_is_good_and_runs_again(file: Path) -> None:
    experiment = assemble(read_document(file), REGISTRY)
    supported_runtime(experiment)
    assert experiment.warnings == ()
    assert_runs_again(experiment)


@pytest.mark.parametrize(("dataset", "trainer", "preset"), PRESETS)
def test_a_preset_runs_again(dataset: str, trainer: str, preset: str) -> None:
    text = f"data_args: {{dataset: {dataset}}}\ncalfat: {{trainer: {{name: {trainer}, preset: {preset}}}}}\n"
    assert_runs_again(assemble_text(text))


def test_a_preset_fills_only_what_the_recipe_leaves_out() -> None:
    experiment = assemble_text(
        "data_args: {dataset: cifar10}\ntrain_args: {weight_decay: 0, epochs: 3}\n"
        "calfat: {trainer: {name: calfat, preset: release, start_noise: 0.01}}\n"
    )
    train = experiment.train
    assert (train.weight_decay, train.epochs, train.comm_round, train.batch_size) == (0, 3, 150, 128)
    assert experiment.aggregator.options.weights == "uniform"
    assert experiment.partition.name == "dirichlet"
    assert experiment.trainer.options.start_noise == 0.01
    assert experiment.trainer.options.prior == "counts"
    loss = "{name: robal, preset: cifar100-r, gamma: 0.5}"  # the preset's is 0.03125
    assert assemble_text(f"calfat: {{trainer: {{name: fedpgd, loss: {loss}}}}}\n").modifier.options.gamma == 0.5


FULL = """\
common_args: {random_seed: 7, run_note: mine}
data_args: {data_cache_dir: /data/a}
device_args: {gpu_id: 0}
train_args: {client_num_in_total: 9, learning_rate: 1e-3, weight_decay: 1/500, comm_round: 3}
dp_args: {enable_dp: false, epsilon: 3}
tracking_args: {enable_wandb: false, run_name: mine}
calfat:
  trainer: {name: fedpgd, loss: {name: calibrated, preset: release, delta: 1/3}}
  threat: {norm: l2, eps: 1/2, step_size: 1/8, steps: 3}
  evaluators: [natural, {name: pgd5, label: quick}, pgd20]
  monitor: {every: 2, max_examples: 100, evaluators: [natural]}
  partition: {seed: null, min_size: 3}
"""


def test_of_a_data_sets_options_all_but_the_download_are_the_runs() -> None:
    def with_data(dataset: str, option: str) -> dict[str, object]:
        text = f"data_args: {{dataset: {dataset}}}\ncalfat: {{dataset: {{{option}}}}}\n"
        return assemble_text(text).as_run()

    cifar = [with_data("cifar10", f"download: {answer}") for answer in ("true", "false")]
    folder = [with_data("image_folder", f"crop_padding: {padding}") for padding in (4, 2)]
    assert same_but_rounds(*cifar) == []
    assert same_but_rounds(*folder) == ["calfat.dataset.crop_padding"]


def test_a_name_of_its_own_makes_no_other_run() -> None:
    named = assemble_text(FULL.replace("calfat:\n", "calfat:\n  name: my study\n"))
    assert named.name == "my study"
    assert named.as_run() == assemble_text(FULL).as_run()
    assert assemble_text(FULL).name == "again"


@pytest.mark.parametrize("name", ["''", "..", "a/b", "'a\\b'", "7", "' . '"])
def test_a_name_that_no_folder_can_have_is_refused(name: str) -> None:
    with pytest.raises(
        RecipeError, match=r"^again.yaml:1: calfat.name: got .*, expected a name for the folder of its "
    ):
        assemble_text(f"calfat: {{name: {name}}}\n")


def test_a_recipe_that_uses_everything_runs_again() -> None:
    experiment = assemble_text(FULL)
    assert_runs_again(experiment)
    as_run = experiment.as_run()
    assert as_run["train_args"]["client_num_per_round"] == 9
    assert as_run["train_args"]["learning_rate"] == 0.001
    assert not {"dp_args", "tracking_args"} & set(as_run)  # switched off, and what has no effect is not written
    assert "run_note" not in as_run["common_args"]
    assert as_run["calfat"]["threat"] == {"norm": "l2", "eps": "0.5", "step_size": "0.125", "steps": 3}
    assert as_run["calfat"]["trainer"]["loss"]["delta"] == 1 / 3
    assert [evaluator["name"] for evaluator in as_run["calfat"]["evaluators"]] == ["natural", "pgd5", "pgd20"]
    assert as_run["calfat"]["evaluators"][1]["label"] == "quick"
    assert as_run["calfat"]["evaluators"][1]["steps"] == 5


@pytest.mark.parametrize(
    ("change", "different"),
    [
        ("comm_round: 3", []),
        ("device_args: {gpu_id: 0", []),
        ("data_cache_dir: /data/a", []),
        ("random_seed: 7", ["common_args.random_seed"]),
        ("norm: l2, eps: 1/2", ["calfat.threat.eps"]),
    ],
)
def test_a_run_may_be_resumed_elsewhere_and_with_more_rounds_but_with_nothing_else_changed(
    change: str, different: list[str]
) -> None:
    first, second = assemble_text(FULL), assemble_text(FULL.replace(change, change[:-1] + "9"))
    assert same_but_rounds(first.as_run(), second.as_run()) == different
