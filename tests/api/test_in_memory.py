"""``run(data=...)`` and ``load_dataset(train=..., test=...)``: data that no file has."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import calfat_plugin as calfat
from tests.api.test_runs import SECTIONS
from tests.cli.runner import calfat as command_line
from tests.report.made import draw_nothing
from tests.snapshot import TextSnapshot

X, Y = np.zeros((6, 3, 4, 4)), np.zeros(6, int)
DATASET = calfat.Dataset("mine", calfat.ImageData(X, Y), calfat.ImageData(X, Y), 1)
FEW = {"data_args.max_train_examples": 300, "data_args.max_test_examples": 50}


def arrays() -> dict[str, tuple[Any, Any]]:
    digits = calfat.load_dataset("digits")
    return {split: (getattr(digits, split).x.numpy(), getattr(digits, split).y.numpy()) for split in ("train", "test")}


@pytest.fixture(scope="module")
def data() -> calfat.Dataset:
    return calfat.load_dataset(**arrays())


def a_run(folder: Path, rounds: int = 1, **more: Any) -> calfat.Run:
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        changes = {**FEW, "train_args.comm_round": rounds}
        return calfat.run(SECTIONS, seed=3, set=changes, run_dir=folder, progress=False, **more)


@pytest.fixture(scope="module")
def done(data: calfat.Dataset, tmp_path_factory: pytest.TempPathFactory) -> calfat.Run:
    return a_run(tmp_path_factory.mktemp("runs") / "run", data=data)


def partition(run: calfat.Run) -> Any:
    return json.loads((run.directory / "partition.json").read_text())


def test_it_is_the_run_on_the_same_images_from_a_file(done: calfat.Run, tmp_path: Path) -> None:
    by_name = a_run(tmp_path / "by_name")
    first, second = (load_file(run.directory / "checkpoints" / "last.safetensors") for run in (done, by_name))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert partition(done) == partition(by_name)
    assert partition(done)["image_shape"] == [1, 8, 8]
    assert (done.recipe["data_args"]["dataset"], len(done.recipe["calfat"]["dataset"]["sha256"])) == ("memory", 64)
    assert "dataset" not in SECTIONS["calfat"]


def test_it_is_resumed_with_the_same_data_alone(data: calfat.Dataset, tmp_path: Path, snapshot: TextSnapshot) -> None:
    folder = tmp_path / "run"
    first = a_run(folder, data=data)
    recipe = (folder / "recipe.yaml").read_bytes()
    turned = dataclasses.replace(data, train=calfat.ImageData(data.train.x.flip(3), data.train.y))
    other = a_run(tmp_path / "other", data=turned)
    then, now = (partition(each)["dataset_sha256"] for each in (first, other))
    assert first.recipe["calfat"]["dataset"] != other.recipe["calfat"]["dataset"]
    with snapshot.raises(calfat.RunError, "the data are not those", then=then, now=now):
        a_run(folder, 2, data=turned, resume=True)
    with snapshot.raises(calfat.RunError):
        a_run(folder, 2, resume=True)
    assert (folder / "recipe.yaml").read_bytes() == recipe
    assert len(a_run(folder, 2, data=data, resume=True).rounds) == 2


def test_its_model_is_loaded_and_commands_say_where_the_images_are(
    done: calfat.Run, data: calfat.Dataset, snapshot: TextSnapshot
) -> None:
    model = calfat.load_model(done.directory)
    assert model(data.test.x[:2]).shape == (2, 10)
    run, sha256 = str(done.directory), done.recipe["calfat"]["dataset"]["sha256"]
    with snapshot.raises(calfat.DataError, sha256=sha256):
        calfat.trust(run)
    for command in (["trust", run], ["attack", run], ["run", f"{run}/recipe.yaml", "--run-dir", f"{run}/again"]):
        ended = command_line(*command)
        assert (ended.code, ended.out) == (2, "")
        snapshot(ended.err, sha256=sha256)
    assert not (done.directory / "again").exists()


def test_labels_that_begin_at_1_are_warned_of_also_without_progress(data: calfat.Dataset, tmp_path: Path) -> None:
    train, test = ((part.x, part.y + 1) for part in (data.train, data.test))
    with pytest.warns(UserWarning, match=r"no client has a training example of 1 of 11 classes \(0\), so no model"):
        a_run(tmp_path / "run", data=calfat.load_dataset(train=train, test=test))


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 2},
        {"set": {"common_args.training_type": "cross_silo", "comm_args.backend": "GRPC"}},
        {"set": {"common_args.host": "flower"}},
        {"data": arrays()},
        {"data": "validated"},
        {"data": DATASET},
    ],
    ids=["workers", "silos", "flower", "no data set", "validation", "one class"],
)
def test_what_cannot_be(
    changes: dict[str, Any],
    data: calfat.Dataset,
    snapshot: TextSnapshot,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if changes.get("data") == "validated":
        changes = {"data": dataclasses.replace(data, validation=data.test)}
    with snapshot.raises(calfat.CalfatError):
        calfat.run(SECTIONS, **{"data": data, **changes})
    assert list(tmp_path.iterdir()) == []


def test_a_data_set_in_memory() -> None:
    x, y = np.zeros((6, 3, 4, 4), np.uint8), np.array([0, 1, 2, 0, 1, 2])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2, 3, 4, 4), torch.tensor([4, 1])))
    found = calfat.load_dataset("mine", train=(x, y), test=loader)
    assert (found.name, found.num_classes, len(found.train), found.test.y.tolist()) == ("mine", 5, 6, [4, 1])
    named = calfat.load_dataset(train=calfat.ImageData(x, y), test=[x, y])
    assert (named.name, named.class_names, named.train.x.dtype) == ("memory", ("0", "1", "2"), torch.uint8)


def test_what_looks_wrong_in_a_data_set_is_warned_of(data: calfat.Dataset) -> None:
    train, test = data.train, data.test
    few = calfat.ImageData(torch.cat([test.x[:18], train.x[:2]]), [0, 1] * 10)
    with pytest.warns(UserWarning, match="training images, too") as caught:
        calfat.load_dataset("mine", train=train, test=few)
    first, second = (str(each.message) for each in caught)
    assert first.startswith("data set mine: 8 of 10 classes have no test image (2, 3, 4, ...), so ")
    assert second.startswith("data set mine: 2 of 20 test images (10.00 %) are training images, too, equal in every ")
    assert {each.filename for each in caught} == {__file__}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"train": (X, Y)},
        {"test": (X, Y)},
        {"train": (X, Y, Y), "test": (X, Y)},
        {"train": X, "test": (X, Y)},
        {"train": (X, Y - 1), "test": (X, Y)},
        {"train": (X, Y), "test": (X, Y), "root": "."},
        {"train": (X, Y), "test": (X, Y), "download": True},
        {"name": "memory"},
        {"train": DATASET, "test": DATASET},
        {"train": (X, Y + 10**12), "test": (X, Y + 10**12)},
    ],
    ids=range(11),
)
def test_a_data_set_in_memory_that_does_not_fit(arguments: dict[str, Any], snapshot: TextSnapshot) -> None:
    with snapshot.raises(calfat.CalfatError):
        calfat.load_dataset(**arguments)
