"""Entries of the built-in data sets, with their options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from calfat_plugin.entries import Citation, DatasetEntry, paper
from calfat_plugin.errors import DataError, OptionError
from calfat_plugin.options import Tag, option, tagged


@dataclass(frozen=True)
class DownloadOptions:
    """Of a data set that its publisher offers for download."""

    download: bool = tagged(
        Tag.FREE | Tag.OF_A_PARTY,  # each party fetches its own copy
        option(False, help="download missing files from the publisher to data_args.data_cache_dir"),
    )
    verify: bool = option(True, help="compare files with the published checksums; false reads any file of the format")


@dataclass(frozen=True)
class SubsetOptions:
    """Options of the ImageNet subset."""

    size: int = option(64, low=8, high=4096, help="height and width to which images are resized", unit="pixels")


@dataclass(frozen=True)
class FolderOptions:
    """Options of images in class folders."""

    size: int | None = option(
        None,
        low=8,
        high=4096,
        help="height and width to which images are resized; null: their own, which must be the same for all",
        unit="pixels",
    )
    channels: int | None = option(
        None, low=1, high=3, help="1 for grey images, 3 for colour; null: their own, the same for all"
    )
    crop_padding: int = option(0, low=0, help="random crop of training images after padding", unit="pixels")
    flip: bool = option(False, help="mirror training images left-right at random")
    classes: str | None = option(
        None,
        help="class folders in the order of their labels, separated by commas, the same for all parties of "
        "partition_method: silo; null: the folders below train, sorted",
    )

    def __post_init__(self) -> None:
        if self.channels == 2:
            raise OptionError("got 2 (int), expected 1 or 3.", ("channels",))
        if self.size is not None:
            check_crop(self.crop_padding, self.size)
        class_folders(self.classes)


def check_crop(crop_padding: int, side: int) -> None:
    """Refuse a crop that may show nothing of an image whose shorter side has ``side`` pixels."""
    if crop_padding >= side:
        raise OptionError(f"crop_padding: got {crop_padding}, expected less than size, {side}; crops would be black.")


@dataclass(frozen=True)
class MemoryOptions:
    """Options of images in memory."""

    sha256: str | None = tagged(
        Tag.MAY_CHANGE | Tag.NO_DIGEST,  # partition.json has digests of what is used; settings are told apart by it
        option(None, help="digest of the images and labels; `calfat.run(data=...)` sets it; null: none are given"),
    )


def refuse_to_read_memory(root: Path, sha256: str | None) -> NoReturn:
    """The ``build`` of images in memory where no program passes them."""
    images = "images"
    if sha256 is not None:
        images = f"images of SHA-256 {sha256}"
    raise DataError(
        f"data set memory: the {images} were in the memory of a Python program, and no file has them. Pass them "
        "from Python, as data to calfat.run, or with a loaded model to calfat.evaluate or calfat.trust."
    )


MEMORY = "memory"


def class_folders(classes: str | None) -> tuple[str, ...] | None:
    """The option ``classes`` as folder names, in the order of the labels."""
    if classes is None:
        return None
    names = tuple(name.strip() for name in classes.split(","))
    for name in names:
        if not name.strip(".") or name != Path(name).name:
            raise OptionError(
                f"classes: got '{name}', expected names of folders in train and test, separated by commas: cat,dog."
            )
        if names.count(name) > 1:
            raise OptionError(f"classes: '{name}' is listed twice; a folder is one class.")
    return names


def _published(
    name: str, summary: str, num_classes: int, shape: tuple[int, int, int], paper: Citation, licence: str
) -> DatasetEntry:
    return DatasetEntry(
        name,
        build=f"calfat_plugin.datasets.published:load_{name}",
        config=DownloadOptions,
        summary=summary,
        citation=paper,
        num_classes=num_classes,
        image_shape=shape,
        licence=licence,
    )


_CIFAR = paper("krizhevsky2009learning")
_SVHN = paper("netzer2011reading")
_MNIST = paper("lecun1998gradient")
_FMNIST = paper("xiao2017fashion")
_IMAGENET = paper("russakovsky2015imagenet")
_NOT_STATED = "none is stated by who publishes them"

ENTRIES = (
    DatasetEntry(
        "digits",
        build="calfat_plugin.datasets.published:load_digits",
        summary="scikit-learn's bundled 8x8 handwritten digits: real data, no download",
        num_classes=10,
        image_shape=(1, 8, 8),
        licence="CC BY 4.0 (UCI, Optical Recognition of Handwritten Digits)",
    ),
    _published("cifar10", "50,000 + 10,000 colour images of 10 classes", 10, (3, 32, 32), _CIFAR, _NOT_STATED),
    _published("cifar100", "50,000 + 10,000 colour images of 100 classes", 100, (3, 32, 32), _CIFAR, _NOT_STATED),
    _published(
        "svhn",
        "73,257 + 26,032 house numbers, without the 'extra' split",
        10,
        (3, 32, 32),
        _SVHN,
        "for non-commercial use only",
    ),
    _published("mnist", "60,000 + 10,000 handwritten digits", 10, (1, 28, 28), _MNIST, "CC BY-SA 3.0"),
    _published("fmnist", "60,000 + 10,000 pieces of clothing; Debian has them", 10, (1, 28, 28), _FMNIST, "MIT"),
    DatasetEntry(
        "imagenet_subset",
        build="calfat_plugin.datasets.folders:load_imagenet_subset",
        config=SubsetOptions,
        summary="12 classes of ImageNet from class folders; our own choice of classes, the paper lists none",
        citation=_IMAGENET,
        num_classes=12,
        licence="for non-commercial research and education only (ImageNet's terms of access)",
    ),
    DatasetEntry(
        "image_folder",
        build="calfat_plugin.datasets.folders:load_image_folder",
        config=FolderOptions,
        summary="your own images: `train/CLASS/*.png` and `test/CLASS/*.png`, or another format",
        per_party=True,
    ),
    DatasetEntry(
        MEMORY,
        build=refuse_to_read_memory,
        config=MemoryOptions,
        summary="images that a Python program passes: calfat.run(recipe, data=...)",
    ),
)
