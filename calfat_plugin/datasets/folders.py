"""Data sets from class folders: one folder a class, one image file an example."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from calfat_plugin.datasets.data import Augmentation, Dataset, ImageData
from calfat_plugin.datasets.entries import check_crop, class_folders
from calfat_plugin.datasets.files import naming_file
from calfat_plugin.disk import expanded
from calfat_plugin.errors import DataError

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
#: What Pillow may take a file for, whatever its ending: of other formats it drops what lies beyond 8 bits or one image.
_FORMATS = ("BMP", "DIB", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_TURNED = (5, 6, 7, 8)  # orientations of EXIF that exchange height and width
_GREY = ("1", "L", "LA", "La")  # Pillow's modes without colours; a palette has colours
_LARGEST_BYTE = 255
_OF_SYSTEMS = ("thumbs.db", "desktop.ini")  # what file managers leave in folders, beside hidden files


def load_imagenet_subset(root: Path, *, size: int = 64) -> Dataset:
    """Our 12 classes of ImageNet (Russakovsky et al. 2015), resized and cropped as :func:`load_image_folder` does.

    Class folders ``train/<WordNet id>`` and ``val/<WordNet id>`` below ``root`` or ``root/imagenet_subset``; others may
    lie beside them.
    """
    root = expanded(root)
    places = [root, root / "imagenet_subset"]
    base = max(places, key=lambda place: (place / "train" / next(iter(IMAGENET_SUBSET))).is_dir())
    for folder in (base / split / wnid for split in ("train", "val") for wnid in IMAGENET_SUBSET):
        if not folder.is_dir():
            raise DataError(
                f"data set imagenet_subset: there is no folder {folder} (looked in {places[0]} and {places[1]}). Put "
                f"those of ImageNet (ILSVRC 2012, https://image-net.org) into {root / 'train'} and {root / 'val'}."
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
    """Your own images from ``root/train/<class>`` and ``root/test/<class>``, by the options of ``FolderOptions``.

    With ``size``, each image is resized so that its shorter side has so many pixels, smoothing while it shrinks, and
    cropped to the centre square. A palette is read as its colours, and transparency is dropped.

    Args:
        only: ``train`` or ``test``: read this split alone, in which classes may be missing, and return it in the place
            of the other one too. Needs ``classes``, ``size`` and ``channels``, for no party sees what the others have.
    """
    root, augment, named = expanded(root), Augmentation(crop_padding, flip), class_folders(classes)
    if only is None:
        train, test = root / "train", root / "test"
        trained = _folder_names(train)
        for name in _folder_names(test):
            if name not in trained:
                raise DataError(
                    f"data set image_folder: {test / name} is a class without training images; classes are the folders "
                    f"below {train}: {', '.join(trained)}."
                )
        class_of_folder = {name: name for name in named or trained}
        return _load("image_folder", train, test, class_of_folder, size, channels, augment)
    if named is None or size is None or channels is None:
        raise DataError(
            "data set image_folder: with partition_method: silo, write calfat.dataset.classes, size and channels (1 "
            "for grey, 3 for colour); otherwise parties could number classes differently, or have other shapes."
        )
    for name in _folder_names(root / only):
        if name not in named:
            raise DataError(f"data set image_folder: {root / only / name} is not one of calfat.dataset.classes.")
    listed = _listed("image_folder", root / only, named)
    split = _read_split("image_folder", root / only, listed, size, (channels, size, size))
    return Dataset("image_folder", split, split, len(named), named, augment)


def _folder_names(parent: Path) -> list[str]:
    """The class folders below ``train`` or ``test``, sorted."""
    if not parent.is_dir():
        raise _no_class_folders(parent, f"{parent} is missing")
    entries = sorted(parent.iterdir())
    for path in entries:
        if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
            raise _no_class_folders(parent, f"{path} is in no class folder")
    names = [path.name for path in entries if path.is_dir() and path.name[0] != "."]
    if not names:
        raise _no_class_folders(parent, f"{parent} holds no folders")
    return names


def _no_class_folders(parent: Path, problem: str) -> DataError:
    return DataError(
        f"data set image_folder: {problem}. Expected one folder of images for each class, {parent}/<class>."
    )


def _load(
    name: str,
    train: Path,
    test: Path,
    classes: Mapping[str, str],
    size: int | None,
    channels: int | None,
    augment: Augmentation,
) -> Dataset:
    """Both splits; ``classes``: folder name to class name, in the order of the labels."""
    training, tested = _listed(name, train, classes), _listed(name, test, classes)
    filled = {y for _, y in training}
    for y, folder in enumerate(classes):
        if y not in filled:
            raise DataError(
                f"data set {name}: {train / folder} holds no images (files ending in {', '.join(IMAGE_SUFFIXES)})."
            )
    if size is None or channels is None:
        shape = _own_shape(name, [path for path, _ in (*training, *tested)], size, channels)
        check_crop(augment.crop_padding, min(shape[1:]))
    else:
        shape = channels, size, size
    train_split = _read_split(name, train, training, size, shape)
    test_split = _read_split(name, test, tested, size, shape)
    return Dataset(name, train_split, test_split, len(classes), tuple(classes.values()), augment)


def _listed(name: str, parent: Path, folders: Iterable[str]) -> list[tuple[Path, int]]:
    """(file, label) of each image, by label and name; a class without test images has no folder."""
    images = []
    for y, folder in enumerate(folders):
        if not (parent / folder).is_dir():
            continue
        for path in sorted((parent / folder).iterdir()):
            if path.suffix.lower() in IMAGE_SUFFIXES:
                images.append((path, y))
            elif path.name[0] != "." and path.name.lower() not in _OF_SYSTEMS:
                problem = f"does not end in {', '.join(IMAGE_SUFFIXES)}"
                if path.is_dir():
                    problem = "is a folder"
                raise DataError(
                    f"data set {name}: {path} {problem}; expected nothing but images in {parent / folder}. Move them "
                    "there, convert what is in another format, and put everything else elsewhere."
                )
    return images


def _own_shape(name: str, paths: Sequence[Path], size: int | None, channels: int | None) -> tuple[int, int, int]:
    """(channels, height, width) of all images, by their headers; ``size`` and ``channels`` where they are given."""
    from PIL import ExifTags

    def header(path: Path) -> tuple[int, int, int]:
        with _opened(name, path) as image:
            channels_of_mode = 1 if image.mode in _GREY else 3
            height, width = image.height, image.width
            # Pillow has turned a TIFF already. For the EXIF of a PNG it reads the whole file, so only where it matters.
            may_be_turned = height != width and size is None and image.format != "TIFF"
            if may_be_turned and image.getexif().get(ExifTags.Base.Orientation) in _TURNED:
                height, width = width, height
            return channels or channels_of_mode, size or height, size or width

    shapes = list(_in_threads(header, paths))
    if len(set(shapes)) > 1:
        examples = [f"{paths[shapes.index(shape)]} has {shape}" for shape in dict.fromkeys(shapes)]
        raise DataError(
            f"data set {name}: images differ in (channels, height, width): {', '.join(examples[:3])}. Write what they "
            "are made to have, as calfat.dataset.size and calfat.dataset.channels (1 is grey, 3 colour)."
        )
    return shapes[0]


def _read_split(
    name: str, parent: Path, listed: Sequence[tuple[Path, int]], size: int | None, shape: tuple[int, int, int]
) -> ImageData:
    """Images, resized to ``size`` if there is one, as (channels, height, width) of ``shape``."""
    import torch
    from PIL import ImageOps
    from PIL.Image import Resampling

    try:
        x = np.empty((len(listed), *shape), dtype=np.uint8)
    except MemoryError:
        raise DataError(
            f"data set {name}: {parent} has {len(listed)} images, which at {shape[2]}x{shape[1]} pixels take "
            f"{len(listed) * math.prod(shape) / 1e9:,.0f} GB of memory, more than there is. Write a smaller "
            "calfat.dataset.size, or use fewer images."
        ) from None

    def read(position: int) -> None:
        with _opened(name, listed[position][0]) as file:
            ImageOps.exif_transpose(file, in_place=True)  # as whoever labelled it saw it
            image = file.convert("RGB" if shape[0] == 3 else "L")
        if size is not None:
            width, height = (max(size, round(side * size / min(image.size))) for side in image.size)
            left, top = (width - size) // 2, (height - size) // 2
            image = image.resize((width, height), Resampling.BILINEAR).crop((left, top, left + size, top + size))
        x[position] = np.asarray(image).reshape(image.height, image.width, shape[0]).transpose(2, 0, 1)

    for _ in _in_threads(read, range(len(listed))):
        pass
    return ImageData(torch.from_numpy(x), torch.tensor([y for _, y in listed], dtype=torch.int64))


def _in_threads(function: Callable[[T], S], items: Sequence[T]) -> Iterator[S]:
    """What the function gives for each item, in order: reading waits for the disk, and decoding releases the GIL."""
    at_once = 4096  # items that wait for a thread
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(items), at_once):
            yield from pool.map(function, items[start : start + at_once])


@contextmanager
def _opened(name: str, path: Path) -> Iterator[Image.Image]:
    """An image of which Pillow has read the header; whatever goes wrong inside names the file."""
    from PIL import Image

    with naming_file(name, path), Image.open(path, formats=_FORMATS) as image:
        _refuse_more_than_8_bits(path, image)
        # Pages of a TIFF and frames of an animation. What cameras put behind the photograph of a JPEG (MPO) is left.
        num_images = getattr(image, "n_frames", 1)
        if num_images > 1 and image.format != "MPO":
            raise DataError(
                f"{path} holds {num_images} images (pages of a {image.format}, or frames of an animation), and an "
                "example is one. Save each that is an example as a file of its own."
            )
        yield image


def _refuse_more_than_8_bits(path: Path, image: Image.Image) -> None:
    """Pillow would cut what is beyond 8 bits off without a word, of colours as it opens the file."""
    tiles = getattr(image, "tile", ())
    is_deep = image.mode[0] in "IF" or any(";16" in str(tile) for tile in tiles)
    largest = ""
    if image.format == "PPM" and image.mode == "RGB":
        # Of colours Pillow keeps the largest value alone, in (mode, maxval); bytes as they are have no such pair.
        for tile in tiles:
            arguments = tile[3]
            if isinstance(arguments, tuple) and arguments[1] > _LARGEST_BYTE:
                is_deep, largest = True, f", values up to {arguments[1]}"
    if is_deep:
        raise DataError(
            f"{path} has more than 8 bits a channel (mode {image.mode}{largest}). Convert it to 8 bits "
            "first: how to scale its values is your decision."
        )
