"""The published data sets: digits, which come with scikit-learn, and those that torchvision reads.

The others are CIFAR-10, CIFAR-100, SVHN, MNIST and Fashion-MNIST, kept as uint8. Their loaders look below ``root``
where torchvision puts the files, and in ``root/<name>``; Fashion-MNIST is also found where Debian's package puts it.
They keep the standard split whole. ``download=True`` lets torchvision fetch what is missing.

``verify=False`` reads any files in the same format, such as the small ones that tests write. The CIFAR files are
pickles, which can run code when read: without the checksum, read only your own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from calfat_plugin.datasets.data import Augmentation, Dataset, ImageData
from calfat_plugin.datasets.files import PublishedFiles, naming_file, uncompressed
from calfat_plugin.errors import DataError

_SPLIT_SEED = 1797  # of digits; fixed, whatever the seed of a run: the test set must not depend on it
CIFAR_AUGMENTATION = Augmentation(crop_padding=4, flip=True)
_READERS = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "svhn": "SVHN", "mnist": "MNIST", "fmnist": "FashionMNIST"}
_MEGABYTES = {"cifar10": 170, "cifar100": 169, "svhn": 246, "mnist": 12, "fmnist": 31}

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


def load_digits(root: Path | None = None) -> Dataset:
    """The optical digits of Alpaydin and Kaynak (1998) that scikit-learn ships, which needs no ``root``.

    1,797 images of 1x8x8, grey levels 0..16 divided by 16, float32. scikit-learn knows no split, so
    a fixed fifth of every class is the test set: 1,438 to train, 359 to test. Not augmented.
    """
    package = importlib.util.find_spec("sklearn")  # not imported, which takes a second
    folders = (package and package.submodule_search_locations) or []
    files = [Path(folder, "datasets", "data", "digits.csv.gz") for folder in folders]
    file = next(filter(Path.is_file, files), None)
    if file is None:
        raise DataError(
            "digits: scikit-learn's package has no datasets/data/digits.csv.gz. Install scikit-learn again."
        )
    table = np.loadtxt(file, delimiter=",")  # (1797, 65): 64 pixels and the label
    labels = table[:, -1].astype(np.int64)
    everything = ImageData((table[:, :-1].astype(np.float32) / 16).reshape(-1, 1, 8, 8), labels)
    rng = np.random.RandomState(_SPLIT_SEED)
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        members = rng.permutation(np.flatnonzero(labels == label))
        is_test[members[: round(len(members) * 0.2)]] = True
    train = everything.subset(np.flatnonzero(~is_test))
    test = everything.subset(np.flatnonzero(is_test))
    return Dataset("digits", train, test, 10)


def load_svhn(root: Path, *, download: bool = False, verify: bool = True) -> Dataset:
    """SVHN, cropped (Netzer et al. 2011): 73,257 + 26,032 images of 3x32x32, 10 digits; without the "extra" split."""
    svhn = _reader("svhn")
    folder = _svhn_files().locate(root, verify=verify, download=download)

    def read(split: str) -> ImageData:
        url, file, _ = svhn.split_list[split]
        # torchvision would compute the checksums again, and without the file's name
        unchecked = type("SVHN", (svhn,), {"split_list": {split: [url, file, None]}})
        with naming_file("svhn", folder / file):
            part = unchecked(folder, split=split)
            return ImageData(part.data, part.labels)

    return Dataset("svhn", read("train"), read("test"), 10)


def _load_cifar(name: str, num_classes: int, root: Path, *, download: bool = False, verify: bool = True) -> Dataset:
    """Load with one of torchvision's two CIFAR classes, file by file, for then an error can name it."""
    cifar = _reader(name)
    folder = _cifar_files(name).locate(root, verify=verify, download=download)

    def read(file: str) -> Any:
        unchecked = {"train_list": [[file, None]], "test_list": [], "meta": {**cifar.meta, "md5": None}}
        with naming_file(name, folder / file):
            return type(cifar.__name__, (cifar,), unchecked)(folder.parent)

    def split(listed: list[list[str]]) -> ImageData:
        parts = [read(file) for file, _ in listed]
        x = np.concatenate([part.data for part in parts])  # (N, H, W, C)
        return ImageData(x.transpose(0, 3, 1, 2), np.concatenate([part.targets for part in parts]))

    class_names = tuple(read(cifar.test_list[0][0]).classes)
    train, test = split(cifar.train_list), split(cifar.test_list)
    return Dataset(name, train, test, num_classes, class_names, augment=CIFAR_AUGMENTATION)


def _load_idx(name: str, root: Path, *, download: bool = False, verify: bool = True) -> Dataset:
    """Load with torchvision's readers of MNIST's file format."""
    mnist = _reader(name)
    files = _idx_files(name)
    from torchvision.datasets.mnist import read_image_file, read_label_file

    folder = files.locate(root, verify=verify, download=download)

    def read(file: str, reader: Callable[[str], Any]) -> Any:
        path = files.stored(folder, file)
        with naming_file(name, path), uncompressed(path) as plain:
            return reader(str(plain))

    def split(prefix: str) -> ImageData:
        x = read(f"{prefix}-images-idx3-ubyte", read_image_file)  # (N, H, W) uint8
        return ImageData(x.unsqueeze(1), read(f"{prefix}-labels-idx1-ubyte", read_label_file))

    class_names = () if name == "mnist" else tuple(mnist.classes)  # a digit's name is its label
    return Dataset(name, split("train"), split("t10k"), 10, class_names)


load_cifar10 = partial(_load_cifar, "cifar10", 10)  # Krizhevsky 2009: 50,000 + 10,000 images of 3x32x32, 10 classes
load_cifar100 = partial(_load_cifar, "cifar100", 100)  # Krizhevsky 2009: 50,000 + 10,000 of 3x32x32, fine classes
load_mnist = partial(_load_idx, "mnist")  # LeCun et al. 1998: 60,000 + 10,000 images of 1x28x28, 10 digits
load_fmnist = partial(_load_idx, "fmnist")  # Xiao et al. 2017: 60,000 + 10,000 images of 1x28x28, 10 classes


def _reader(name: str) -> Any:
    """torchvision's class for the data set ``name``."""
    from torchvision import datasets

    return getattr(datasets, _READERS[name])


# --- the files --------------------------------------------------------------------------------------------------------


def _cifar_files(name: str) -> PublishedFiles:
    cifar = _reader(name)
    npm = None
    if name == "cifar10":
        npm = ("convnetjs@0.1.4", "package/demo/cifar10")
    return PublishedFiles(
        name=name,
        source=cifar.url.removesuffix(cifar.filename),
        downloads=(cifar.filename,),
        megabytes=_MEGABYTES[name],
        unpack_in="",
        folders=(cifar.base_folder, f"{name}/{cifar.base_folder}"),
        md5=dict([*cifar.train_list, *cifar.test_list, (cifar.meta["filename"], cifar.meta["md5"])]),
        fetch=lambda into: cifar(into, download=True),
        npm=npm,
    )


def _svhn_files() -> PublishedFiles:
    svhn = _reader("svhn")
    address, train, train_md5 = svhn.split_list["train"]
    _, test, test_md5 = svhn.split_list["test"]

    def fetch(into: Path) -> None:
        for split in ("train", "test"):
            svhn(into, split=split, download=True)

    return PublishedFiles(
        name="svhn",
        source=address.removesuffix(train),
        downloads=(train, test),
        megabytes=_MEGABYTES["svhn"],
        unpack_in="",
        folders=("", "svhn"),
        md5={train: train_md5, test: test_md5},
        fetch=fetch,
    )


def _idx_files(name: str) -> PublishedFiles:
    mnist = _reader(name)
    raw = f"{mnist.__name__}/raw"
    debian = None
    if name == "fmnist":
        debian = ("dataset-fashion-mnist", "datasets/fashion-mnist")
    return PublishedFiles(
        name=name,
        source=mnist.mirrors[0],
        downloads=tuple(file for file, _ in mnist.resources),
        megabytes=_MEGABYTES[name],
        unpack_in=raw,
        folders=(raw, f"{name}/{raw}", name, ""),
        md5=_IDX_MD5[name],
        fetch=lambda into: mnist(into, download=True),
        debian=debian,
        compressed=True,
    )


#: Name of a data set to what finds its files.
FILES: Mapping[str, Callable[[], PublishedFiles]] = {
    "cifar10": partial(_cifar_files, "cifar10"),
    "cifar100": partial(_cifar_files, "cifar100"),
    "svhn": _svhn_files,
    "mnist": partial(_idx_files, "mnist"),
    "fmnist": partial(_idx_files, "fmnist"),
}
