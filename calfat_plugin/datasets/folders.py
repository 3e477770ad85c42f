"""Data sets from class folders: one folder a class, one image file an example."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calfat_plugin.datasets.data import Augmentation, Dataset, ImageData
from calfat_plugin.datasets.entries import class_folders
from calfat_plugin.datasets.files import naming_file
from calfat_plugin.disk import expanded
from calfat_plugin.errors import DataError, OptionError

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

#: WordNet id to name of the 12 classes of ImageNet (ILSVRC 2012) in data set imagenet_subset, in the labels' order.
#: The CalFAT paper does not list its own, so results on these are not comparable with its.
IMAGENET_SUBSET = {
    "n01440764": "tench",
    "n02099601": "golden retriever",
    "n02102040": "English springer",
    "n02123045": "tabby",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}
IMAGENET_AUGMENTATION = Augmentation(crop_padding=8, flip=True)


def load_imagenet_subset(root: Path, *, size: int = 64) -> Dataset:
    """Load our 12 classes of ImageNet (Russakovsky et al. 2015) at ``size`` x ``size``.

    Class folders ``train/<WordNet id>`` and ``val/<WordNet id>`` below ``root`` or ``root/imagenet_subset``; other
    classes may lie beside them. :data:`IMAGENET_SUBSET` names the twelve. Images are resized and cropped as
    :func:`load_image_folder` does. Augmented by a crop with padding 8 and a flip.

    Args:
        root: data root.
        size: height and width in pixels.

    Raises:
        DataError: a class folder is missing or empty, or an image is unreadable.
        OptionError: ``size`` is out of range.
    """
    root = expanded(root)
    places = [root, root / "imagenet_subset"]
    base = max(places, key=lambda place: (place / "train" / next(iter(IMAGENET_SUBSET))).is_dir())
    for split in ("train", "val"):
        for wnid in IMAGENET_SUBSET:
            if not (base / split / wnid).is_dir():
                raise DataError(
                    f"data set imagenet_subset: there is no folder {base / split / wnid} (looked "
                    f"in {places[0]} and {places[1]}). Get ImageNet (ILSVRC 2012) from https://image-net.org "
                    "(it requires an account) and put the class folders "
                    f"{', '.join(IMAGENET_SUBSET)} (some 2 GB) into {root / 'train'} and {root / 'val'}."
                )
    return _load("imagenet_subset", base / "train", base / "val", IMAGENET_SUBSET, size, 3, IMAGENET_AUGMENTATION)


def load_image_folder(
    root: Path,
    *,
    size: int = 64,
    channels: int = 3,
    crop_padding: int = 0,
    flip: bool = False,
    classes: str | None = None,
    only: str | None = None,
) -> Dataset:
    """Load your own images from ``root/train/<class>`` and ``root/test/<class>``.

    The classes are the folders below ``train``, sorted by name, unless ``classes`` names them. Each
    image is resized so that its shorter side is ``size``, smoothing while it shrinks, and cropped to the centre square.

    Args:
        root: folder that holds ``train`` and ``test``.
        size: height and width in pixels, >= 1.
        channels: 3 for colour, 1 for grey.
        crop_padding: training augmentation, see :class:`Augmentation`.
        flip: likewise.
        classes: folder names in the order of the labels, separated by commas.
        only: ``train`` or ``test``: read this split alone, in which classes may be missing, and return it in the place
            of the other one too. Needs ``classes``, for no party sees what folders the others have.

    Raises:
        DataError: folders are missing, a class has no training images, ``test`` has a class that
            ``train`` lacks, or an image is unreadable or has 16 bits a channel.
        OptionError: an option is out of range.
    """
    root = expanded(root)
    if channels not in (1, 3):
        raise OptionError(f"data set image_folder: channels is {channels}; expected 1 or 3.")
    train, test = root / "train", root / "test"
    augment = Augmentation(crop_padding=crop_padding, flip=flip)
    named = class_folders(classes)
    if only is not None:
        return _load_one(root / only, named, size, channels, augment)
    found = {split: _folder_names(split) for split in (train, test)}
    unknown = sorted(set(found[test]) - set(found[train]))
    if unknown:
        raise DataError(
            f"data set image_folder: {test / unknown[0]} is a class without training images; "
            f"classes are the folders below {train}: {', '.join(found[train])}."
        )
    names = {name: name for name in named or found[train]}
    return _load("image_folder", train, test, names, size, channels, augment)


def _load_one(
    folder: Path, classes: tuple[str, ...] | None, size: int, channels: int, augment: Augmentation
) -> Dataset:
    """One party's split, in the place of both."""
    if classes is None:
        raise DataError(
            "data set image_folder: with partition_method: silo, name the class folders in calfat.dataset.classes, "
            "such as classes: cat,dog; otherwise parties could number them differently."
        )
    unknown = sorted(set(_folder_names(folder)) - set(classes))
    if unknown:
        raise DataError(
            f"data set image_folder: {folder / unknown[0]} is not one of calfat.dataset.classes ({', '.join(classes)})."
        )
    split = _read_split("image_folder", folder, classes, size, channels)
    return Dataset("image_folder", split, split, len(classes), classes, augment)


def _folder_names(parent: Path) -> list[str]:
    here = parent.is_dir()
    names = sorted(p.name for p in parent.iterdir() if p.is_dir() and p.name[0] != ".") if here else []
    if not names:
        raise DataError(
            f"data set image_folder: {parent} {'holds no folders' if here else 'is missing'}. "
            f"Expected one folder of images for each class, {parent}/<class>."
        )
    return names


def _load(
    name: str, train: Path, test: Path, classes: Mapping[str, str], size: int, channels: int, augment: Augmentation
) -> Dataset:
    """Read both splits; ``classes``: folder name to class name, in the order of the labels."""
    if size < 1:
        raise OptionError(f"data set {name}: size is {size}; expected 1 pixel or more.")
    for folder in classes:
        if not _images(train / folder):
            raise DataError(
                f"data set {name}: {train / folder} holds no images (files ending in {', '.join(IMAGE_SUFFIXES)})."
            )
    return Dataset(
        name=name,
        train=_read_split(name, train, list(classes), size, channels),
        test=_read_split(name, test, list(classes), size, channels),
        num_classes=len(classes),
        class_names=tuple(classes.values()),
        augment=augment,
    )


def _images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []  # a class without test images
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)


def _read_split(name: str, parent: Path, folders: Sequence[str], size: int, channels: int) -> ImageData:
    import torch

    listed = [(path, y) for y, folder in enumerate(folders) for path in _images(parent / folder)]
    shape = (len(listed), channels, size, size)
    try:
        x = np.empty(shape, dtype=np.uint8)
    except MemoryError:
        raise DataError(
            f"data set {name}: {parent} has {len(listed)} images, which at size {size} take "
            f"{math.prod(shape) / 1e9:,.0f} GB of memory, more than there is. Lower calfat.dataset.size, or use fewer "
            "images."
        ) from None

    def read(position: int) -> None:
        path = listed[position][0]
        with naming_file(name, path):
            x[position] = _read_image(path, size, channels)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # decoding releases the GIL
        list(pool.map(read, range(len(listed))))
    y = np.array([y for _, y in listed], dtype=np.int64)
    return ImageData(torch.from_numpy(x), torch.from_numpy(y))


def _read_image(path: Path, size: int, channels: int) -> npt.NDArray[np.uint8]:
    """Read one image as (channels, size, size)."""
    from PIL import Image

    with Image.open(path) as file:
        # Pillow would cut 16 bits off without a word, those of colours as it opens the file.
        if file.mode[0] in "IF" or any(";16" in str(part) for part in getattr(file, "tile", ())):
            raise DataError(
                f"{path} has more than 8 bits a channel (mode {file.mode}). Convert it to 8 bits "
                "first: how to scale its values is your decision."
            )
        image = file.convert("RGB" if channels == 3 else "L")
    width, height = (max(size, round(side * size / min(image.size))) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    square = np.asarray(image.crop((left, top, left + size, top + size)))
    return square.reshape(size, size, channels).transpose(2, 0, 1)
