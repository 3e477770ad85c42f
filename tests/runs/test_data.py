"""What is said of the data once they are split: in ``partition.json``, which changes with them, and as a warning."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.runs.session import describe_data
from tests.methods.helpers import small_digits
from tests.runs.processes import WarmServer


def shards(dataset: Dataset) -> dict[int, ImageData]:
    return {client: dataset.train.subset(list(range(client, 90, 3))) for client in range(3)}


def description(dataset: Dataset) -> dict[str, Any]:
    return describe_data(dataset, shards(dataset))


def other_image(data: ImageData) -> ImageData:
    x = data.x.clone()
    x[7] = x[8]
    return dataclasses.replace(data, x=x)


def other_label(data: ImageData) -> ImageData:
    y = data.y.clone()
    y[7] = (y[7] + 1) % 10
    return dataclasses.replace(data, y=y)


def other_order(data: ImageData) -> ImageData:
    return data.subset(torch.arange(len(data)).flip(0).tolist())


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("change", [other_image, other_label, other_order])
def test_another_data_set_has_another_digest(split: str, change: Callable[[ImageData], ImageData]) -> None:
    dataset = small_digits()
    assert description(dataset) == description(small_digits())
    changed = dataclasses.replace(dataset, **{split: change(getattr(dataset, split))})
    assert description(changed)["dataset_sha256"] != description(dataset)["dataset_sha256"]


def test_another_partition_has_another_digest() -> None:
    """Two images of one class change their clients: the class counts are the same."""
    dataset = small_digits()
    first, second = (int(index) for index in (dataset.train.y == 3).nonzero().flatten()[:2])
    indices = [list(range(client, 90, 3)) for client in range(3)]
    swapped = [[{first: second, second: first}.get(index, index) for index in mine] for mine in indices]
    one, other = (
        describe_data(dataset, {client: dataset.train.subset(mine) for client, mine in enumerate(dealt)})
        for dealt in (indices, swapped)
    )
    assert one["class_counts"] == other["class_counts"]
    assert one["dataset_sha256"] == other["dataset_sha256"]
    assert one["partition_sha256"] != other["partition_sha256"]


def test_batches_that_no_client_can_fill_are_warned_of(warm: WarmServer, recipe: Path) -> None:
    """What is known once the partition is drawn."""
    words = ("--set", "train_args.batch_size=5000", "--set", "train_args.comm_round=1", "--run-dir", "run")
    done = warm.run("run", recipe.name, *words, cwd=recipe.parent)
    counts = json.loads((recipe.parent / "run" / "partition.json").read_text())["class_counts"]
    said = f"a batch is larger than every client's data (the largest client has {max(map(sum, counts))} ex"
    assert done.err.startswith(f"warning: --set train_args.batch_size=5000: train_args.batch_size: {said}")
    assert done.err.count("\n") == 1


ODD = """
from pathlib import Path

from calfat_plugin import Dataset, DatasetEntry, ImageData, hookimpl


def load(root: Path) -> Dataset:
    import numpy as np

    x = np.random.default_rng(0).integers(0, 256, (60, 1, 8, 8)).astype(np.uint8)
    x_test = np.concatenate([x[:3], np.zeros((5, 1, 8, 8), np.uint8)])
    return Dataset("odd", ImageData(x, np.arange(60) % 3), ImageData(x_test, np.arange(8) % 2), 4)


@hookimpl
def calfat_datasets():
    yield DatasetEntry("odd", build=load, summary="it has what data should not have")
"""


def test_what_looks_wrong_in_a_plugins_data_is_warned_of_in_a_run_and_of_its_model(
    warm: WarmServer, recipe: Path
) -> None:
    folder = recipe.parent
    (folder / "odd.py").write_text(ODD)
    changes = ("data_args.dataset=odd", "data_args.partition_method=iid", "train_args.comm_round=1")
    words = [word for change in changes for word in ("--set", change)]
    done = warm.run("run", recipe.name, "--plugin", "odd.py", *words, "--run-dir", "run", cwd=folder)
    findings = (
        "5 of 8 test images are of one colour all over, 5 of them black",
        "2 of 4 classes have no test image (2, 3)",
        "3 of 8 test images (37.50 %) are training images, too",
    )
    said = [line for line in done.err.splitlines() if "batch is larger" not in line]
    assert said[0].startswith("warning: --set data_args.dataset=odd: data_args.dataset: no client has a training ex")
    for line, finding in zip(said[1:], findings, strict=True):
        assert line.startswith(f"warning: --set data_args.dataset=odd: data_args.dataset: {finding}")
    attacked = warm.run("attack", "run", "--attacks", "natural", cwd=folder)
    assert attacked.code == 0
    for line, finding in zip(attacked.err.splitlines(), findings, strict=True):
        assert line.startswith("warning: run/recipe.yaml:")
        assert f": data_args.dataset: {finding}" in line
