"""Every shipped recipe runs: its own model and trainer, one round on a tiny stand-in of its data set."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from calfat_plugin.datasets.entries import MEMORY
from calfat_plugin.entries import DatasetEntry, TrainerEntry
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe import read_document
from calfat_plugin.registry import Registry
from tests.inputs import on_disk
from tests.runs.processes import ROOT, WarmServer
from tests.runs.remains import read_rows

REGISTRY = Registry.load(entry_points=False)
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

# Files in the data set's true on-disk format; two clients get at least ten images each.
WRITERS: dict[str, Callable[[Path], object]] = {
    "cifar10": lambda root: on_disk.write_cifar10(root, n_train=40, n_test=10),
    "cifar100": lambda root: on_disk.write_cifar100(root, n_train=100, n_test=100),
    "svhn": lambda root: on_disk.write_svhn(root, n_train=40, n_test=10),
    "mnist": lambda root: on_disk.write_mnist(root, n_train=40, n_test=10),
    "fmnist": lambda root: on_disk.write_fmnist(root, n_train=60, n_test=10),
    "imagenet_subset": lambda root: on_disk.write_imagenet_subset(root, n_train=48, n_test=12),
    "image_folder": lambda root: on_disk.write_class_folders(root, ["cat", "dog"], n_train=40, n_test=10),
    "digits": lambda root: None,
}
NO_GPU = "warning: device_args.using_gpu is true, but torch sees no GPU here; computing on the CPU."
WITH_CHECKSUMS = ("cifar10", "cifar100", "svhn", "mnist", "fmnist")
CUT = (
    *("train_args.comm_round=1", "train_args.client_num_in_total=2", "train_args.client_num_per_round=2"),
    "train_args.batch_size=8",
    *("calfat.threat.step_size=eps/2", "calfat.evaluators=[natural, fgsm]", "calfat.monitor.max_examples=10"),
)


def run_one_round(warm: WarmServer, experiment: Experiment, folder: Path, *changes: str) -> None:
    """Run the experiment's recipe, cut down in time, and look at what it leaves."""
    data = experiment.dataset.name
    WRITERS[data](folder / "data")
    changes = (*CUT, f"data_args.data_cache_dir={folder / 'data'}", *changes)
    if experiment.threat.inner.name == "pgd":  # the others take one step anyway
        changes += ("calfat.threat.steps=2",)
    if experiment.threat.inner.name == "atas":
        changes += ("calfat.threat.inner={name: atas, warmup: 0}",)  # its own leaves none of one round
    if data in WITH_CHECKSUMS:
        changes += ("calfat.dataset.verify=false",)
    words = [word for change in changes for word in ("--set", change)]
    done = warm.run("run", experiment.document.file, "--run-dir", "run", *words, cwd=folder)
    assert done.code == 0, done.err
    assert set(done.err.splitlines()) <= {NO_GPU}
    (row,) = read_rows(folder / "run" / "rounds.csv")
    assert (row["clients"], row["refused"]) == ("0 1", "")
    results = json.loads((folder / "run" / "results.json").read_text())
    assert results["trainer"] == experiment.trainer.name
    assert results["recipe"] == experiment.name
    assert [evaluation["label"] for evaluation in results["evaluations"]] == ["natural", "fgsm"]


def test_there_is_a_stand_in_for_every_data_set() -> None:
    assert {*WRITERS, MEMORY} == {entry.name for entry, _ in REGISTRY.offers(DatasetEntry)}


# What docs/methods.md makes of a recipe, so that each method begins to differ in the first round.
OTHER_METHODS = {
    "mixfat": "mixfat",
    "fedtrades": "fedtrades",
    "fedmart": "fedmart",
    "fedrbn": "fedrbn",
    "fedgairat": "{name: fedgairat, start_round: 1}",
    "fedawp": "{name: fedawp, warmup: 0}",
    "fedlat": "{name: fedlat, clean_rounds: 0}",
}


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_one_round(file: Path, warm: WarmServer, tmp_path: Path) -> None:
    run_one_round(warm, assemble(read_document(file), REGISTRY), tmp_path)


def test_methods_without_a_recipe_are_tried_too() -> None:
    shipped = {assemble(read_document(file), REGISTRY).trainer.name for file in RECIPES}
    assert {*shipped, *OTHER_METHODS} == {entry.name for entry, _ in REGISTRY.offers(TrainerEntry)}


@pytest.mark.parametrize("trainer", OTHER_METHODS)
@pytest.mark.parametrize("data", ["digits", pytest.param("cifar10", marks=pytest.mark.slow)])
def test_one_round_of_another_method(trainer: str, data: str, warm: WarmServer, tmp_path: Path) -> None:
    change = f"calfat.trainer={OTHER_METHODS[trainer]}"
    document = read_document(ROOT / "recipes" / f"fedavg_{data}.yaml").with_overrides([change])
    run_one_round(warm, assemble(document, REGISTRY), tmp_path, change)


@pytest.mark.parametrize(
    ("data", "model"),
    [
        ("cifar100", "cnn"),
        ("svhn", "cnn"),
        pytest.param("cifar10", "vgg8", marks=pytest.mark.slow),
        pytest.param("cifar10", "resnet18", marks=pytest.mark.slow),
        pytest.param("imagenet_subset", "alexnet64", marks=pytest.mark.slow),
    ],
)
def test_one_round_of_what_the_suites_make_of_a_recipe(data: str, model: str, warm: WarmServer, tmp_path: Path) -> None:
    """Tables 1, 5 and 10 change data set and architecture of the CIFAR-10 recipe."""
    changes = (f"data_args.dataset={data}", f"model_args.model={model}")
    document = read_document(ROOT / "recipes" / "calfat_cifar10.yaml").with_overrides(changes)
    run_one_round(warm, assemble(document, REGISTRY), tmp_path, *changes)
