"""Data sets from class folders: one folder a class, one image file an example."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from calfat_plugin.datasets.data import Augmentation, Dataset, ImageData
from calfat_plugin.datasets.entries import check_crop, class_folders
from calfat_plugin.datasets.files import naming_file
from calfat_plugin.disk import expanded
from calfat_plugin.errors import DataError, OptionError
from calfat_plugin.options import yaml_text

if TYPE_CHECKING:
    from PIL import Image

S = TypeVar("S")
T = TypeVar("T")

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
_GREY = ("1", "L", "LA", "La")  # Pillow's modes without colours; a palette has colours
_SHOWN = 3  # sizes that a message lists
_AT_ONCE = 4096  # files that wait for a thread


def load_imagenet_subset(root: Path, *, size: int = 64) -> Dataset:
    """Load our 12 classes of ImageNet (Russakovsky et al. 2015) at ``size`` x ``size``.

    Class folders ``train/<WordNet id>`` and ``val/<WordNet id>`` below ``root`` or ``root/imagenet_subset``; other
    classes may lie beside them. :data:`IMAGENET_SUBSET` names the twelve. Images are resized and cropped as
    :func:`load_image_folder` does. Augmented by a crop with padding 8 and a flip.

    Args:
        root: data root.
        size: height and width in pixels.
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
    size: int | None = None,
    channels: int | None = None,
    crop_padding: int = 0,
    flip: bool = False,
    classes: str | None = None,
    only: str | None = None,
) -> Dataset:
    """Load your own images from ``root/train/<class>`` and ``root/test/<class>``.

    The classes are the folders below ``train``, sorted by name, unless ``classes`` names them. With ``size``, each
    image is resized so that its shorter side has so many pixels, smoothing while it shrinks, and cropped to the centre
    square. A palette is read as its colours, and transparency is dropped.

    Args:
        root: folder that holds ``train`` and ``test``.
        size: height and width in pixels, >= 1; None: the images' own, which must be that of all in both splits.
        channels: 3 for colour, 1 for grey; None: likewise.
        crop_padding: training augmentation, see :class:`Augmentation`.
        flip: likewise.
        classes: folder names in the order of the labels, separated by commas.
        only: ``train`` or ``test``: read this split alone, in which classes may be missing, and return it in the place
            of the other one too. Needs ``classes``, ``size`` and ``channels``, for no party sees what the others have.
    """
    root = expanded(root)
    if channels not in (None, 1, 3):
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
    folder: Path, classes: tuple[str, ...] | None, size: int | None, channels: int | None, augment: Augmentation
) -> Dataset:
    """One party's split, in the place of both."""
    if classes is None:
        raise DataError(
            "data set image_folder: with partition_method: silo, name the class folders in calfat.dataset.classes, "
            "such as classes: cat,dog; otherwise parties could number them differently."
        )
    if size is None or channels is None:
        raise DataError(
            "data set image_folder: with partition_method: silo, write calfat.dataset.size and channels (1 for grey, 3 "
            "for colour), such as size: 64, channels: 3; otherwise parties could have images of other shapes."
        )
    unknown = sorted(set(_folder_names(folder)) - set(classes))
    if unknown:
        raise DataError(
            f"data set image_folder: {folder / unknown[0]} is not one of calfat.dataset.classes ({', '.join(classes)})."
        )
    split = _read_split("image_folder", folder, _listed(folder, classes), size, (channels, size, size))
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
    name: str,
    train: Path,
    test: Path,
    classes: Mapping[str, str],
    size: int | None,
    channels: int | None,
    augment: Augmentation,
) -> Dataset:
    """Read both splits; ``classes``: folder name to class name, in the order of the labels."""
    if size is not None and size < 1:
        raise OptionError(f"data set {name}: size is {size}; expected 1 pixel or more.")
    listed = {split: _listed(split, list(classes)) for split in (train, test)}
    filled = {y for _, y in listed[train]}
    for y, folder in enumerate(classes):
        if y not in filled:
            raise DataError(
                f"data set {name}: {train / folder} holds no images (files ending in {', '.join(IMAGE_SUFFIXES)})."
            )
    if size is None or channels is None:
        shape = _own_shape(name, [path for split in listed.values() for path, _ in split], size, channels)
        check_crop(augment.crop_padding, min(shape[1:]))
    else:
        shape = channels, size, size
    return Dataset(
        name=name,
        train=_read_split(name, train, listed[train], size, shape),
        test=_read_split(name, test, listed[test], size, shape),
        num_classes=len(classes),
        class_names=tuple(classes.values()),
        augment=augment,
    )


def _listed(parent: Path, folders: Sequence[str]) -> list[tuple[Path, int]]:
    """(file, label) of each image, by label and name; a class without test images has no folder."""
    return [
        (path, y)
        for y, folder in enumerate(folders)
        if (parent / folder).is_dir()
        for path in sorted((parent / folder).iterdir())
        if path.suffix.lower() in IMAGE_SUFFIXES
    ]


def _own_shape(name: str, paths: Sequence[Path], size: int | None, channels: int | None) -> tuple[int, int, int]:
    """(channels, height, width) of all images, by their headers; ``size`` and ``channels`` where they are given."""

    def header(path: Path) -> tuple[tuple[int, int], int]:
        with _opened(name, path) as image:
            return (size or image.height, size or image.width), channels or (1 if image.mode in _GREY else 3)

    found: Counter[tuple[tuple[int, int], int]] = Counter()
    first: dict[tuple[tuple[int, int], int], Path] = {}
    for path, shape in zip(paths, _in_threads(header, paths), strict=True):
        found[shape] += 1
        first.setdefault(shape, path)
    ((height, width), depth), _ = found.most_common(1)[0]
    differs: dict[str, int] = {}
    if any(side != (height, width) for side, _ in found):
        differs["size"] = min(64, max(8, min(height, width)))
    if any(other != depth for _, other in found):
        differs["channels"] = 3
    if differs:
        shown = []
        for ((h, w), c), number in found.most_common(_SHOWN):
            kind = [f"{w}x{h}"] * (size is None) + ["grey" if c == 1 else "colour"] * (channels is None)
            shown.append(f"{' '.join(kind)} ({number:,}, such as {first[(h, w), c]})")
        more = f" and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
        legend = " (1 is grey, 3 colour)" if "channels" in differs else ""
        raise DataError(
            f"data set {name}: the images are not alike: {', '.join(shown)}{more}. Write what they are "
            f"made to have, such as calfat.dataset: {yaml_text(differs)}{legend}."
        )
    return depth, height, width


def _read_split(
    name: str, parent: Path, listed: Sequence[tuple[Path, int]], size: int | None, shape: tuple[int, int, int]
) -> ImageData:
    """Read images, resized to ``size`` if there is one, as (channels, height, width) of ``shape``."""
    import torch

    try:
        x = np.empty((len(listed), *shape), dtype=np.uint8)
    except MemoryError:
        raise DataError(
            f"data set {name}: {parent} has {len(listed)} images, which at {shape[2]}x{shape[1]} pixels take "
            f"{len(listed) * math.prod(shape) / 1e9:,.0f} GB of memory, more than there is. Write a smaller "
            "calfat.dataset.size, or use fewer images."
        ) from None

    def read(position: int) -> None:
        x[position] = _read_image(name, listed[position][0], size, shape[0])

    for _ in _in_threads(read, range(len(listed))):
        pass
    y = np.array([y for _, y in listed], dtype=np.int64)
    return ImageData(torch.from_numpy(x), torch.from_numpy(y))


def _in_threads(function: Callable[[T], S], items: Sequence[T]) -> Iterator[S]:
    """What the function gives for each item, in order: reading waits for the disk, and decoding releases the GIL."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(items), _AT_ONCE):
            yield from pool.map(function, items[start : start + _AT_ONCE])


@contextmanager
def _opened(name: str, path: Path) -> Iterator[Image.Image]:
    """An image of which Pillow has read the header; whatever goes wrong inside names the file."""
    from PIL import Image

    with naming_file(name, path), Image.open(path) as image:
        # Pillow would cut 16 bits off without a word, those of colours as it opens the file.
        if image.mode[0] in "IF" or any(";16" in str(part) for part in getattr(image, "tile", ())):
            raise DataError(
                f"{path} has more than 8 bits a channel (mode {image.mode}). Convert it to 8 bits "
                "first: how to scale its values is your decision."
            )
        yield image


def _read_image(name: str, path: Path, size: int | None, channels: int) -> npt.NDArray[np.uint8]:
    """Read one image as (channels, height, width), its own or ``size``."""
    from PIL import Image

    with _opened(name, path) as file:
        image = file.convert("RGB" if channels == 3 else "L")
    if size is not None:
        width, height = (max(size, round(side * size / min(image.size))) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.crop((left, top, left + size, top + size))
    return np.asarray(image).reshape(image.height, image.width, channels).transpose(2, 0, 1)
