"""``partition_method: silo``: each client trains on its own folder, and nothing of it leaves but the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from tests.cli.runner import calfat
from tests.silo.federation import Federation
from tests.snapshot import TextSnapshot

CLASSES = ("bone", "lung", "skin")
HELD = {0: {"bone": 4, "lung": 4, "skin": 4}, 1: {"bone": 20, "lung": 7}, 2: {"lung": 5, "skin": 30}}
SETTINGS: dict[str, Any] = {
    "dataset": {"size": 8, "channels": 1, "classes": ",".join(CLASSES)},
    "data_args": {"dataset": "image_folder", "partition_method": "silo", "data_cache_dir": "DATA/rank-{rank}"},
}


def write_images(folder: Path) -> None:
    stream = np.random.default_rng(0)
    for rank, held in HELD.items():
        for name, count in held.items():
            place = folder / f"rank-{rank}" / ("train" if rank else "test") / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = stream.integers(0, 256, (8, 8)).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")


def settings(tmp_path: Path) -> dict[str, Any]:
    data = {**SETTINGS["data_args"], "data_cache_dir": str(tmp_path / "rank-{rank}")}
    return {**SETTINGS, "data_args": data}


def test_clients_read_their_own_folder_and_send_nothing_of_it(tmp_path: Path) -> None:
    write_images(tmp_path)
    for place in ("rank-0/test/skin", "rank-2/train/lung"):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / place / "0.png")
    with Federation(tmp_path / "run", **settings(tmp_path)) as federation:
        federation.start_all()
        federation.finish()
        model = set(federation.model())
        assert [row["clients"] for row in federation.rounds()] == ["0 1"] * 3
    wrong = "images are of one colour all over, 1 of them black"  # each party is told of its own images alone
    assert f"data_args.dataset: 1 of 12 test {wrong}" in federation.output(0)
    assert f"data_args.dataset: 1 of 35 training {wrong}" in federation.output(2)
    said = [federation.output(rank).count("data_args.dataset") for rank in (0, 1, 2)]
    assert said == [1, 0, 1]
    for rank in (1, 2):
        assert f"client {rank - 1} of recipe: {sum(HELD[rank].values())} examples" in federation.output(rank)
        sent = list((federation.folder / f"sent-{rank}").iterdir())
        assert len(sent) == 3
        for path in sent:
            with safe_open(path, framework="pt") as message:
                assert set(message.keys()) == model | {"metric/loss", "metric/passes", "metric/alignment"}
                assert set(message.metadata()) == {"calfat"}
                fields = message.metadata()["calfat"]
        for name in ("msg_type", "sender", "receiver", "num_samples", "round", "ticket"):
            assert f'"{name}"' in fields
        assert fields.count('":') == 6


@pytest.mark.parametrize(
    "change", ["common_args.training_type=simulation comm_args.backend=sp", "data_args.dataset=digits"]
)
def test_what_cannot_be_read_by_party_is_refused_at_check(tmp_path: Path, change: str, snapshot: TextSnapshot) -> None:
    recipe = Federation(tmp_path, data_args=SETTINGS["data_args"]).recipe
    words = [word for each in change.split() for word in ("--set", each)]
    done = calfat("check", recipe, *words)
    assert done.code == 2
    snapshot(done.out + done.err)


def test_unnamed_classes_are_refused(tmp_path: Path, snapshot: TextSnapshot) -> None:
    write_images(tmp_path)
    without = {**settings(tmp_path), "dataset": {"size": 8, "channels": 1}}
    with Federation(tmp_path / "run", **without) as federation:
        federation.start(1)
        assert federation.exit_status(1) == 2
        snapshot(federation.output(1).splitlines()[-1])


SHARED = """
from pathlib import Path

from calfat_plugin import Dataset, DatasetEntry, ImageData, hookimpl


def load(root: Path) -> Dataset:
    import numpy as np

    x = np.random.default_rng(0).integers(0, 256, (80, 1, 8, 8)).astype(np.uint8)
    return Dataset("shared", ImageData(x[:60], np.arange(60) % 3 + 1), ImageData(x[50:], np.arange(30) % 4), 4)


@hookimpl
def calfat_datasets():
    yield DatasetEntry("shared", build=load, summary="labels begin at 1, and ten images are in both splits")
"""


def test_of_data_that_all_parties_have_the_server_says_what_looks_wrong(tmp_path: Path) -> None:
    plugin = tmp_path / "shared.py"
    plugin.write_text(SHARED)
    data = {"dataset": "shared", "partition_method": "iid"}
    with Federation(tmp_path / "run", data_args=data, plugins={"shared": {"file": str(plugin)}}) as federation:
        federation.start_all()
        federation.finish()
    findings = [line for line in federation.output(0).splitlines() if ": data_args.dataset: " in line]
    assert len(findings) == 2
    assert "no client has a training example of 1 of 4 classes (0), so no model learns" in findings[0]
    assert "10 of 30 test images (33.33 %) are training images, too" in findings[1]
    assert "data_args.dataset" not in federation.output(1) + federation.output(2)
