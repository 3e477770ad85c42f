"""CIFAR-10, CIFAR-100, SVHN, MNIST and Fashion-MNIST, read by torchvision and kept as uint8.

All loaders look below ``root`` where torchvision puts the files, and in ``root/<name>``; Fashion-MNIST is also found
where Debian's package puts it. They keep the standard split whole. ``download=True`` lets torchvision fetch what is
missing.

``verify=False`` reads any files in the same format, such as the small ones that tests write. The CIFAR files are
pickles, which can run code when read: without the checksum, read only your own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from calfat_plugin.compat import make_torchvision_importable
from calfat_plugin.datasets.data import Augmentation, Dataset, ImageData
from calfat_plugin.datasets.files import (
    NpmPackage,
    PublishedFiles,
    SystemPackage,
    naming_file,
    uncompressed,
)

CIFAR_AUGMENTATION = Augmentation(crop_padding=4, flip=True)

# Of the files whose images and labels are those of torchvision's; the authors publish the archive's sum alone.
_BINARY_CIFAR10_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    "batches.meta.txt": "728051cd483f366e254dddb25bead8b3",
}
# torchvision knows the checksums of the compressed files only, and does not look at the others.
_IDX_MD5 = {
    "mnist": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "fmnist": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
}


def load_cifar10(root: Path, *, download: bool = False, verify: bool = True) -> Dataset:
    """Load CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 images of 3x32x32, 10 classes.

    Augmented by a crop with padding 4 and a flip. Both layouts of the authors are read: the pickles, as torchvision
    has them, or where these are missing the binary files (``cifar-10-batches-bin``).
    """
    if (files := _cifar10_files(root)).md5 is _BINARY_CIFAR10_MD5:
        return _load_binary_cifar10(files.locate(root, verify=verify, download=False))
    return _load_cifar("cifar10", 10, root, download, verify)


def load_cifar100(root: Path, *, download: bool = False, verify: bool = True) -> Dataset:
    """Load CIFAR-100 (Krizhevsky 2009): 50,000 + 10,000 images of 3x32x32, 100 fine classes.

    Augmented like CIFAR-10. Raises like :func:`load_cifar10`.
    """
    return _load_cifar("cifar100", 100, root, download, verify)


def load_svhn(root: Path, *, download: bool = False, verify: bool = True) -> Dataset:
    """Load SVHN, cropped (Netzer et al. 2011): 73,257 + 26,032 images of 3x32x32, 10 digits.

    The "extra" split is not used. Not augmented. Raises like :func:`load_cifar10`.
    """
    svhn = _reader("svhn")
    splits = {split: svhn.split_list[split] for split in ("train", "test")}
    folder = _svhn_files().locate(root, verify=verify, download=download)
    # torchvision would compute the checksums again, and without the file's name
    unchecked = {split: [url, file, None] for split, (url, file, _) in splits.items()}
    reader = type("SVHN", (svhn,), {"split_list": unchecked})

    def read(split: str) -> ImageData:
        with naming_file("svhn", folder / splits[split][1]):
            part = reader(folder, split=split)
            return _image_data(part.data, part.labels)

    return Dataset("svhn", read("train"), read("test"), 10)


def load_mnist(root: Path, *, download: bool = False, verify: bool = True) -> Dataset:
    """Load MNIST (LeCun et al. 1998): 60,000 + 10,000 images of 1x28x28, 10 digits.

    Not augmented. Raises like :func:`load_cifar10`.
    """
    return _load_idx("mnist", root, download, verify)


def load_fmnist(root: Path, *, download: bool = False, verify: bool = True) -> Dataset:
    """Load Fashion-MNIST (Xiao et al. 2017): 60,000 + 10,000 images of 1x28x28, 10 classes.

    Not augmented. Raises like :func:`load_cifar10`.
    """
    return _load_idx("fmnist", root, download, verify)


def _load_cifar(name: str, num_classes: int, root: Path, download: bool, verify: bool) -> Dataset:
    """Load with one of torchvision's two CIFAR classes."""
    cifar, meta = _reader(name), _reader(name).meta
    folder = _cifar_files(name).locate(root, verify=verify, download=download)

    def read(file: str) -> Any:
        """Let torchvision read one file at a time, for then an error can name it."""
        unchecked = {"train_list": [[file, None]], "test_list": [], "meta": {**meta, "md5": None}}
        with naming_file(name, folder / file):
            return type(cifar.__name__, (cifar,), unchecked)(folder.parent)

    def split(listed: list[list[str]]) -> ImageData:
        parts = [read(file) for file, _ in listed]
        x = np.concatenate([part.data for part in parts])  # (N, H, W, C)
        y = np.concatenate([part.targets for part in parts])
        return _image_data(x.transpose(0, 3, 1, 2), y)

    return Dataset(
        name=name,
        train=split(cifar.train_list),
        test=split(cifar.test_list),
        num_classes=num_classes,
        class_names=tuple(read(cifar.test_list[0][0]).classes),
        augment=CIFAR_AUGMENTATION,
    )


def _load_binary_cifar10(folder: Path) -> Dataset:
    """Records of 3,073 bytes: the label, then the 1,024 values of each colour row by row."""

    def read(files: Iterable[str]) -> ImageData:
        parts = []
        for file in files:
            with naming_file("cifar10", folder / file):
                parts.append(np.fromfile(folder / file, np.uint8).reshape(-1, 1 + 3 * 32 * 32))
        records = np.concatenate(parts)
        return _image_data(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0])

    *train, test, names = _BINARY_CIFAR10_MD5
    with naming_file("cifar10", folder / names):
        class_names = tuple((folder / names).read_text(encoding="ascii").split())
    return Dataset("cifar10", read(train), read([test]), 10, class_names, augment=CIFAR_AUGMENTATION)


def _load_idx(name: str, root: Path, download: bool, verify: bool) -> Dataset:
    """Load with torchvision's readers of MNIST's file format."""
    mnist = _reader(name)
    from torchvision.datasets.mnist import read_image_file, read_label_file

    files = _idx_files(name)
    folder = files.locate(root, verify=verify, download=download)

    def read(split: str, kind: str, reader: Callable[[str], Any]) -> Any:
        path = files.stored(folder, f"{split}-{kind}-ubyte")
        with naming_file(name, path), uncompressed(path) as plain:
            return reader(str(plain))

    def image_data(split: str) -> ImageData:
        x = read(split, "images-idx3", read_image_file)  # (N, H, W) uint8
        return ImageData(x.unsqueeze(1), read(split, "labels-idx1", read_label_file))

    class_names = () if name == "mnist" else tuple(mnist.classes)
    return Dataset(name, image_data("train"), image_data("t10k"), 10, class_names)


# --- the files --------------------------------------------------------------------------------------------------------

_READERS = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "svhn": "SVHN", "mnist": "MNIST", "fmnist": "FashionMNIST"}
_MEGABYTES = {"cifar10": 170, "cifar100": 169, "svhn": 246, "mnist": 12, "fmnist": 31}
_NPM = {"cifar10": NpmPackage("convnetjs@0.1.4", "package/demo/cifar10")}
_PACKAGES = {"fmnist": SystemPackage("dataset-fashion-mnist", "datasets/fashion-mnist")}


def _cifar_files(name: str) -> PublishedFiles:
    cifar = _reader(name)
    listed = [*cifar.train_list, *cifar.test_list, (cifar.meta["filename"], cifar.meta["md5"])]
    return PublishedFiles(
        name=name,
        source=cifar.url.removesuffix(cifar.filename),
        downloads=(cifar.filename,),
        megabytes=_MEGABYTES[name],
        unpack_in="",
        folders=(cifar.base_folder, f"{name}/{cifar.base_folder}"),
        md5=dict(listed),
        fetch=lambda into: cifar(into, download=True),
        npm=_NPM.get(name),
    )


def _cifar10_files(root: Path) -> PublishedFiles:
    """The pickles, or where only these are below ``root``, the binary files, which have the same images."""
    name, folder = "cifar-10-binary.tar.gz", "cifar-10-batches-bin"
    pickles = _cifar_files("cifar10")
    binary = dataclasses.replace(
        pickles, downloads=(name,), folders=(folder, f"cifar10/{folder}"), md5=_BINARY_CIFAR10_MD5, npm=None
    )
    return binary if pickles.seen(root) is None and binary.seen(root) is not None else pickles


def _svhn_files() -> PublishedFiles:
    svhn = _reader("svhn")
    splits = {split: svhn.split_list[split] for split in ("train", "test")}
    return PublishedFiles(
        name="svhn",
        source=splits["train"][0].removesuffix(splits["train"][1]),
        downloads=tuple(file for _, file, _ in splits.values()),
        megabytes=_MEGABYTES["svhn"],
        unpack_in="",
        folders=("", "svhn"),
        md5={file: md5 for _, file, md5 in splits.values()},
        fetch=lambda into: [svhn(into, split=split, download=True) for split in splits],
    )


def _idx_files(name: str) -> PublishedFiles:
    mnist = _reader(name)
    raw = f"{mnist.__name__}/raw"
    return PublishedFiles(
        name=name,
        source=mnist.mirrors[0],
        downloads=tuple(file for file, _ in mnist.resources),
        megabytes=_MEGABYTES[name],
        unpack_in=raw,
        folders=(raw, f"{name}/{raw}", name, ""),
        md5=_IDX_MD5[name],
        fetch=lambda into: mnist(into, download=True),
        package=_PACKAGES.get(name),
        compressed=True,
    )


#: Name of a data set to what finds its files, called with the data root.
FILES: Mapping[str, Callable[[Path], PublishedFiles]] = {
    "cifar10": _cifar10_files,
    "cifar100": lambda root: _cifar_files("cifar100"),
    "svhn": lambda root: _svhn_files(),
    "mnist": lambda root: _idx_files("mnist"),
    "fmnist": lambda root: _idx_files("fmnist"),
}


def _reader(name: str) -> Any:
    """torchvision's class for the data set ``name``."""
    make_torchvision_importable()
    from torchvision import datasets

    return getattr(datasets, _READERS[name])


def _image_data(x: npt.NDArray[np.uint8], y: npt.ArrayLike) -> ImageData:
    """x: (N, C, H, W) in any memory layout."""
    import torch

    return ImageData(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(np.asarray(y, dtype=np.int64)))
