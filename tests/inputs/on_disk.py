"""Write tiny data sets in their true on-disk formats, for tests of whatever reads them.

Each writer returns what it wrote, so that a test can compare. Labels go round the classes, so every
class occurs once there are as many images; images are noise, brighter for higher labels, so that a
short training has something to learn.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy.io import savemat

from calfat_plugin.datasets.folders import IMAGENET_SUBSET

CIFAR10_NAMES = (*("airplane", "automobile", "bird", "cat", "deer"), *("dog", "frog", "horse", "ship", "truck"))


@dataclass(frozen=True)
class Written:
    """x: (N, C, H, W) uint8; y: (N,) int64, for each split."""

    x_train: npt.NDArray[np.uint8]
    y_train: npt.NDArray[np.int64]
    x_test: npt.NDArray[np.uint8]
    y_test: npt.NDArray[np.int64]


def write_cifar10(root: Path, n_train: int = 50, n_test: int = 20, seed: int = 0) -> Written:
    """root/cifar-10-batches-py with its five training batches, test batch and names."""
    made = _make(n_train, n_test, (3, 32, 32), 10, seed)
    folder = root / "cifar-10-batches-py"
    parts = np.array_split(np.arange(n_train), 5)
    for number, part in enumerate(parts, start=1):
        x, y = made.x_train[part], made.y_train[part]
        _pickle(folder / f"data_batch_{number}", _cifar_batch(x, labels=y.tolist()))
    _pickle(folder / "test_batch", _cifar_batch(made.x_test, labels=made.y_test.tolist()))
    names = {"label_names": list(CIFAR10_NAMES), "num_vis": 3072}
    _pickle(folder / "batches.meta", names)
    return made


def write_cifar100(root: Path, n_train: int = 200, n_test: int = 100, seed: int = 0) -> Written:
    """root/cifar-100-python with train, test and meta."""
    made = _make(n_train, n_test, (3, 32, 32), 100, seed)
    folder = root / "cifar-100-python"
    for name, x, y in (("train", made.x_train, made.y_train), ("test", made.x_test, made.y_test)):
        labels = {"fine_labels": y.tolist(), "coarse_labels": (y // 5).tolist()}
        _pickle(folder / name, _cifar_batch(x, **labels))
    _pickle(folder / "meta", {"fine_label_names": [f"class{i}" for i in range(100)]})
    return made


def write_svhn(root: Path, n_train: int = 50, n_test: int = 20, seed: int = 0) -> Written:
    """root/{train,test}_32x32.mat: images last axis, digit 0 labelled 10."""
    made = _make(n_train, n_test, (3, 32, 32), 10, seed)
    root.mkdir(parents=True, exist_ok=True)
    for name, x, y in (("train", made.x_train, made.y_train), ("test", made.x_test, made.y_test)):
        labels = np.where(y == 0, 10, y).astype(np.uint8)[:, None]
        savemat(root / f"{name}_32x32.mat", {"X": x.transpose(2, 3, 1, 0), "y": labels})
    return made


def write_mnist(root: Path, n_train: int = 50, n_test: int = 20, seed: int = 0) -> Written:
    """root/MNIST/raw with the four idx files."""
    return _write_idx(root / "MNIST" / "raw", n_train, n_test, seed)


def write_fmnist(root: Path, n_train: int = 50, n_test: int = 20, seed: int = 0) -> Written:
    """root/FashionMNIST/raw with the four idx files."""
    return _write_idx(root / "FashionMNIST" / "raw", n_train, n_test, seed)


def write_class_folders(
    root: Path,
    classes: list[str],
    n_train: int = 20,
    n_test: int = 10,
    *,
    size: int = 16,
    splits: tuple[str, str] = ("train", "test"),
    suffix: str = ".png",
    seed: int = 0,
) -> Written:
    """root/<split>/<class>/<number><suffix>, square colour images; what is returned is by class."""
    made = _make(n_train, n_test, (3, size, size), len(classes), seed)
    ordered = []
    for split, x, y in ((splits[0], made.x_train, made.y_train), (splits[1], made.x_test, made.y_test)):
        for number, (image, label) in enumerate(zip(x, y, strict=True)):
            path = root / split / classes[label] / f"{number:05d}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(path)
        by_class = np.argsort(y, kind="stable")
        ordered += [x[by_class], y[by_class]]
    return Written(*ordered)


def write_imagenet_subset(root: Path, n_train: int = 24, n_test: int = 12, *, size: int = 72, seed: int = 0) -> Written:
    """root/{train,val}/<WordNet id>/*.JPEG for the twelve classes; JPEG changes pixels."""
    return write_class_folders(
        root, list(IMAGENET_SUBSET), n_train, n_test, size=size, splits=("train", "val"), suffix=".JPEG", seed=seed
    )


def _make(n_train: int, n_test: int, shape: tuple[int, int, int], num_classes: int, seed: int) -> Written:
    rng = np.random.RandomState(seed)

    def split(n: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        y = rng.permutation(np.arange(n) % num_classes).astype(np.int64)
        light = (y * 156 // num_classes).reshape(-1, 1, 1, 1)
        return (rng.randint(0, 100, (n, *shape)) + light).astype(np.uint8), y

    return Written(*split(n_train), *split(n_test))


def _cifar_batch(x: npt.NDArray[np.uint8], **labels: list[int]) -> dict[str, object]:
    return {
        "batch_label": "a small one",
        "data": x.reshape(len(x), -1),
        "filenames": [f"{i}.png" for i in range(len(x))],
        **labels,
    }


def _pickle(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))


def _write_idx(folder: Path, n_train: int, n_test: int, seed: int) -> Written:
    made = _make(n_train, n_test, (1, 28, 28), 10, seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, x, y in (("train", made.x_train, made.y_train), ("t10k", made.x_test, made.y_test)):
        images = struct.pack(">4B3i", 0, 0, 8, 3, len(x), 28, 28) + x.tobytes()
        labels = struct.pack(">4Bi", 0, 0, 8, 1, len(y)) + y.astype(np.uint8).tobytes()
        (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    return made
