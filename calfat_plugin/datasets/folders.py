"""Data sets from class folders: one folder for each class, and in each folder one image file for each example."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from calfat_plugin.datasets.data import Augmentation, Dataset, ImageData
from calfat_plugin.datasets.entries import check_crop, class_folders
from calfat_plugin.datasets.files import naming_file
from calfat_plugin.disk import expanded
from calfat_plugin.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

Item = TypeVar("Item")
Result = TypeVar("Result")

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

#: The 12 classes of ImageNet (ILSVRC 2012) in data set imagenet_subset, in the order of the labels: WordNet id to name.
#: The CalFAT paper uses 12 classes too and does not list them. These are our choice, so results on them are not
#: comparable with the paper's results.
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

#: The formats that Pillow may recognise in a file; Pillow looks at the content of the file, not at the name's ending.
#: Other formats are left out because Pillow may reduce their values to 8 bits, or read one of several images, without
#: an error.
_FORMATS = ("BMP", "DIB", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
#: The values of the EXIF tag Orientation for which an upright image has height and width exchanged.
_SIDEWAYS_ORIENTATIONS = (5, 6, 7, 8)
#: Pillow's modes of images without colours. Mode P is not among them, because a palette may have colours.
_GREY_MODES = ("1", "L", "LA", "La")
_LARGEST_8_BIT_VALUE = 255
#: Files that Windows puts into folders. Hidden files, whose names begin with a dot, are ignored as well.
_SYSTEM_FILES = ("thumbs.db", "desktop.ini")

_MOST_THREADS = 8
#: How many images are handed to the threads at a time, so that a large data set does not fill the memory with waiting
#: tasks.
_TASKS_AT_ONCE = 4096


class _ImageFile(NamedTuple):
    """The file of one example, and the label of the class whose folder holds the file."""

    path: Path
    label: int


# --- the two data sets ------------------------------------------------------------------------------------------------


def load_imagenet_subset(root: Path, *, size: int = 64) -> Dataset:
    """Load our 12 classes of ImageNet (Russakovsky et al. 2015).

    The class folders are ``train/<WordNet id>`` and ``val/<WordNet id>``, in ``root`` or in ``root/imagenet_subset``.
    Folders of other classes may lie beside them. Images are resized and cropped as in :func:`load_image_folder`.
    """
    root = expanded(root)
    subfolder = root / "imagenet_subset"
    first_class = next(iter(IMAGENET_SUBSET))
    is_in_root = (root / "train" / first_class).is_dir()
    is_in_subfolder = (subfolder / "train" / first_class).is_dir()
    base = root
    if is_in_subfolder and not is_in_root:
        base = subfolder

    for split in ("train", "val"):
        for wordnet_id in IMAGENET_SUBSET:
            folder = base / split / wordnet_id
            if not folder.is_dir():
                raise DataError(
                    f"data set imagenet_subset: there is no folder {folder} (looked in {root} and {subfolder}). Put "
                    f"those of ImageNet (ILSVRC 2012, https://image-net.org) into {root / 'train'} and {root / 'val'}."
                )
    return _load_splits(
        "imagenet_subset",
        base / "train",
        base / "val",
        class_names=IMAGENET_SUBSET,
        size=size,
        channels=3,
        augment=IMAGENET_AUGMENTATION,
    )


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
    """Load a user's own images from ``root/train/<class>`` and ``root/test/<class>``.

    ``FolderOptions`` describes the options. With ``size``, each image is resized until its shorter side has ``size``
    pixels, and then cropped to the square in the centre. Resizing smooths an image that becomes smaller. An image with
    a palette is read as the colours of the palette. Transparency is dropped.

    Args:
        only: ``train`` or ``test``: read this split alone. The data set then has this split as training images and as
            test images. Classes may be missing in the split. Needs ``classes``, ``size`` and ``channels``, because no
            party of a cross-silo run sees the images of the other parties.
    """
    root = expanded(root)
    augment = Augmentation(crop_padding, flip)
    listed_classes = class_folders(classes)
    if only is not None:
        return _load_one_split(root / only, listed_classes, size, channels, augment)

    train_folder = root / "train"
    test_folder = root / "test"
    folders_in_train = _class_folders_in(train_folder)
    for name in _class_folders_in(test_folder):
        if name not in folders_in_train:
            raise DataError(
                f"data set image_folder: {test_folder / name} is a class without training images; classes are the "
                f"folders below {train_folder}: {', '.join(folders_in_train)}."
            )
    folder_names: Sequence[str] = folders_in_train
    if listed_classes is not None:
        folder_names = listed_classes
    return _load_splits(
        "image_folder",
        train_folder,
        test_folder,
        class_names={name: name for name in folder_names},
        size=size,
        channels=channels,
        augment=augment,
    )


# --- loading ----------------------------------------------------------------------------------------------------------


def _load_splits(
    dataset_name: str,
    train_folder: Path,
    test_folder: Path,
    *,
    class_names: Mapping[str, str],
    size: int | None,
    channels: int | None,
    augment: Augmentation,
) -> Dataset:
    """Load the training images and the test images of a data set.

    Args:
        class_names: name of a class folder to the name of the class, in the order of the labels.
        size: height and width to which images are resized; None: all images must have the same size.
        channels: 1 for grey, 3 for colour; None: all images must have the same number.
    """
    train_files = _image_files(dataset_name, train_folder, class_names)
    test_files = _image_files(dataset_name, test_folder, class_names)
    labels_in_train = {file.label for file in train_files}
    for label, folder_name in enumerate(class_names):
        if label not in labels_in_train:
            raise DataError(
                f"data set {dataset_name}: {train_folder / folder_name} holds no images (files ending in "
                f"{', '.join(IMAGE_SUFFIXES)})."
            )
    if size is not None and channels is not None:
        shape = (channels, size, size)
    else:
        paths = [file.path for file in [*train_files, *test_files]]
        shape = _common_shape(dataset_name, paths, size, channels)
        _, height, width = shape
        check_crop(augment.crop_padding, min(height, width))
    train = _read_split(dataset_name, train_folder, train_files, size, shape)
    test = _read_split(dataset_name, test_folder, test_files, size, shape)
    return Dataset(dataset_name, train, test, len(class_names), tuple(class_names.values()), augment)


def _load_one_split(
    folder: Path, classes: tuple[str, ...] | None, size: int | None, channels: int | None, augment: Augmentation
) -> Dataset:
    """Load the images that one party of a cross-silo run has; see ``only`` of :func:`load_image_folder`."""
    if classes is None or size is None or channels is None:
        raise DataError(
            "data set image_folder: with partition_method: silo, write calfat.dataset.classes, size and channels (1 "
            "for grey, 3 for colour); otherwise parties could number classes differently, or have other shapes."
        )
    for name in _class_folders_in(folder):
        if name not in classes:
            raise DataError(f"data set image_folder: {folder / name} is not one of calfat.dataset.classes.")
    files = _image_files("image_folder", folder, classes)
    split = _read_split("image_folder", folder, files, size, (channels, size, size))
    return Dataset("image_folder", split, split, len(classes), classes, augment)


# --- finding the files ------------------------------------------------------------------------------------------------


def _class_folders_in(split_folder: Path) -> list[str]:
    """Return the names of the class folders in ``train`` or ``test``, sorted."""
    if not split_folder.is_dir():
        raise _no_class_folders(split_folder, f"{split_folder} is missing")
    paths = sorted(split_folder.iterdir())
    for path in paths:
        if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
            raise _no_class_folders(split_folder, f"{path} is in no class folder")
    names = [path.name for path in paths if path.is_dir() and not path.name.startswith(".")]
    if not names:
        raise _no_class_folders(split_folder, f"{split_folder} holds no folders")
    return names


def _no_class_folders(split_folder: Path, problem: str) -> DataError:
    return DataError(
        f"data set image_folder: {problem}. Expected one folder of images for each class, {split_folder}/<class>."
    )


def _image_files(dataset_name: str, split_folder: Path, class_folder_names: Iterable[str]) -> list[_ImageFile]:
    """Return the image files of a split, sorted by label and then by name.

    A missing class folder counts as a class without images: test images may lack a class.
    """
    files = []
    for label, folder_name in enumerate(class_folder_names):
        class_folder = split_folder / folder_name
        if not class_folder.is_dir():
            continue
        for path in sorted(class_folder.iterdir()):
            if path.suffix.lower() in IMAGE_SUFFIXES:
                files.append(_ImageFile(path, label))
                continue
            is_ignored = path.name.startswith(".") or path.name.lower() in _SYSTEM_FILES
            if is_ignored:
                continue
            problem = f"does not end in {', '.join(IMAGE_SUFFIXES)}"
            if path.is_dir():
                problem = "is a folder"
            raise DataError(
                f"data set {dataset_name}: {path} {problem}; expected nothing but images in {class_folder}. Move them "
                "there, convert what is in another format, and put everything else elsewhere."
            )
    return files


# --- the shape of the images ------------------------------------------------------------------------------------------


def _common_shape(
    dataset_name: str, paths: Sequence[Path], size: int | None, channels: int | None
) -> tuple[int, int, int]:
    """Return the (channels, height, width) that all images have; only the headers of the files are read.

    A given ``size`` or ``channels`` replaces the image's own value. If images still differ, a DataError names examples.
    """

    def shape_of(path: Path) -> tuple[int, int, int]:
        with _opened(dataset_name, path) as image:
            num_channels = channels
            if num_channels is None:
                num_channels = 1 if image.mode in _GREY_MODES else 3
            if size is not None:
                return num_channels, size, size
            height, width = _upright_size(image)
            return num_channels, height, width

    example_of_shape: dict[tuple[int, int, int], Path] = {}
    for path, shape in zip(paths, _in_threads(shape_of, paths), strict=True):
        example_of_shape.setdefault(shape, path)
    if len(example_of_shape) > 1:
        examples = [f"{path} has {shape}" for shape, path in example_of_shape.items()]
        raise DataError(
            f"data set {dataset_name}: images differ in (channels, height, width): {', '.join(examples[:3])}. Write "
            "what they are made to have, as calfat.dataset.size and calfat.dataset.channels (1 is grey, 3 colour)."
        )
    return next(iter(example_of_shape))


def _upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the (height, width) of an opened image after the rotation that its EXIF data ask for."""
    from PIL import ExifTags

    height, width = image.height, image.width
    # Pillow gives the upright size of a TIFF file already, and a rotation does not change the size of a square. The
    # EXIF data are not read in these two cases, because Pillow reads a whole PNG file to find them.
    if image.format == "TIFF" or height == width:
        return height, width
    orientation = image.getexif().get(ExifTags.Base.Orientation)
    if orientation in _SIDEWAYS_ORIENTATIONS:
        return width, height
    return height, width


# --- reading the images -----------------------------------------------------------------------------------------------


def _read_split(
    dataset_name: str, split_folder: Path, files: Sequence[_ImageFile], size: int | None, shape: tuple[int, int, int]
) -> ImageData:
    """Read the images of a split, each as a (channels, height, width) array of ``shape``.

    Args:
        size: height and width to which images are resized; None: they have the height and width of ``shape``.
    """
    import torch

    try:
        x = np.empty((len(files), *shape), dtype=np.uint8)
    except MemoryError:
        _, height, width = shape
        gigabytes = len(files) * math.prod(shape) / 1e9
        raise DataError(
            f"data set {dataset_name}: {split_folder} has {len(files)} images, which at {width}x{height} pixels take "
            f"{gigabytes:,.0f} GB of memory, more than there is. Write a smaller "
            "calfat.dataset.size, or use fewer images."
        ) from None

    def read(index: int) -> None:
        x[index] = _read_image(dataset_name, files[index].path, size, num_channels=shape[0])

    for _ in _in_threads(read, range(len(files))):
        pass  # the loop waits for the threads; ``read`` writes into ``x`` and returns nothing
    y = torch.tensor([file.label for file in files], dtype=torch.int64)
    return ImageData(torch.from_numpy(x), y)


def _read_image(dataset_name: str, path: Path, size: int | None, num_channels: int) -> npt.NDArray[np.uint8]:
    """Read an image as a (channels, height, width) array; resize it and crop it to a square if ``size`` is given."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    mode = "RGB" if num_channels == 3 else "L"
    with _opened(dataset_name, path) as opened_image:
        # People saw the image upright when they gave it a label.
        ImageOps.exif_transpose(opened_image, in_place=True)
        image = opened_image.convert(mode)
    if size is not None:
        shorter_side = min(image.size)
        width = max(size, round(image.width * size / shorter_side))
        height = max(size, round(image.height * size / shorter_side))
        left = (width - size) // 2
        top = (height - size) // 2
        image = image.resize((width, height), Resampling.BILINEAR)
        image = image.crop((left, top, left + size, top + size))
    rows = np.asarray(image).reshape(image.height, image.width, num_channels)  # a grey image has no axis of channels
    return rows.transpose(2, 0, 1)


def _in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Call ``function`` for each item in several threads, and yield the results in the order of the items.

    Threads help although Python runs one of them at a time (GIL): reading a file waits for the disk, and Pillow
    releases the GIL while it decodes an image.
    """
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        for start in range(0, len(items), _TASKS_AT_ONCE):
            yield from pool.map(function, items[start : start + _TASKS_AT_ONCE])


@contextmanager
def _opened(dataset_name: str, path: Path) -> Iterator[Image.Image]:
    """Open an image file; Pillow reads the header at once, and the pixels when they are used.

    An error in the body of the ``with`` statement becomes a DataError that names the file.
    """
    from PIL import Image

    with naming_file(dataset_name, path), Image.open(path, formats=_FORMATS) as image:
        _refuse_more_than_8_bits(path, image)
        # The pages of a TIFF and the frames of an animation would be examples that nobody reads. A camera's JPEG may
        # hold further images too, such as a preview (format MPO); there, the photograph alone is read.
        num_images = getattr(image, "n_frames", 1)
        if num_images > 1 and image.format != "MPO":
            raise DataError(
                f"{path} holds {num_images} images (pages of a {image.format}, or frames of an animation), and an "
                "example is one. Save each that is an example as a file of its own."
            )
        yield image


def _refuse_more_than_8_bits(path: Path, image: Image.Image) -> None:
    """Refuse an image with more than 8 bits a channel, because Pillow would reduce its values without an error.

    A colour image has the mode RGB whatever the number of bits in the file. The tiles of the image show the number of
    bits: a tile says how Pillow will decode a part of the file.
    """
    tiles = getattr(image, "tile", ())
    # The modes I, I;16 ... are integers of more than 8 bits, and F are floats.
    is_deep = image.mode[0] in "IF" or any(";16" in str(tile) for tile in tiles)
    range_of_values = ""
    if image.format == "PPM" and image.mode == "RGB":
        # The tile of a colour PPM has no ";16". If Pillow will scale the values to 8 bits, the tile's arguments are
        # (raw mode, largest value in the file). If Pillow takes the values as they are, the arguments are a text.
        for tile in tiles:
            arguments = tile[3]
            if isinstance(arguments, tuple) and arguments[1] > _LARGEST_8_BIT_VALUE:
                is_deep = True
                range_of_values = f", values up to {arguments[1]}"
    if is_deep:
        raise DataError(
            f"{path} has more than 8 bits a channel (mode {image.mode}{range_of_values}). Convert it to 8 bits "
            "first: how to scale its values is your decision."
        )
