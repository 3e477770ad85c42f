"""Data sets: images and labels whole in memory, the augmentation of training, and fixed choices of examples."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.errors import DataError, OptionError
from calfat_plugin.seeds import derive_seed

if TYPE_CHECKING:  # naming the types is all that is needed here: tensors bring their own methods
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """Random changes to training images.

    Attributes:
        crop_padding: black pixels added to each side before cropping back at a random place; 0 means no crop.
        flip: mirror left-right with probability 1/2.
    """

    crop_padding: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        if self.crop_padding < 0:
            raise OptionError(f"augmentation: crop_padding is {self.crop_padding}; expected 0 or more.")

    def __bool__(self) -> bool:
        """Whether it changes anything."""
        return self.crop_padding > 0 or self.flip


NO_AUGMENTATION = Augmentation()
#: Classes that a data set without names for them may have, however few its images: as many as ImageNet has.
MOST_EMPTY_CLASSES = 1000


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images and their labels, resident on one device.

    Both may be given as arrays, which are copied, or as tensors of another width: floats become float32, whole labels
    int64, on the device of the images.

    Attributes:
        x: (N, C, H, W), uint8 in 0..255, or float32 in [0, 1].
        y: (N,) int64 class ids.

    Raises:
        DataError: shapes or types are other than these, or the channels come last.
    """

    x: Tensor
    y: Tensor

    if TYPE_CHECKING:

        def __init__(self, x: Tensor | npt.ArrayLike, y: Tensor | npt.ArrayLike) -> None: ...

    def __post_init__(self) -> None:
        import numpy as np  # here, not above: recipes are checked without both
        import torch

        def as_tensor(values: Tensor | npt.ArrayLike) -> Tensor:
            if isinstance(values, torch.Tensor):
                return values
            return torch.tensor(np.ascontiguousarray(values))

        try:
            x, y = as_tensor(self.x), as_tensor(self.y)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"x and y must be tensors or arrays of numbers: {error}.") from None
        are_images = x.ndim == 4 and (x.is_floating_point() or x.dtype == torch.uint8)
        are_integers = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
        if not are_images or y.shape != x.shape[:1] or not are_integers:
            raise DataError(
                f"images are {tuple(x.shape)} {x.dtype} and labels {tuple(y.shape)} {y.dtype}; expected (N, C, H, W) "
                "uint8 or floats, and (N,) whole numbers."
            )
        _, height, width, last = x.shape
        if min(height, width) > last and (last == 3 or (last == 1 and height == width)):
            raise DataError(
                f"images are {tuple(x.shape)}, with the channels last; expected (N, C, H, W): x.transpose(0, 3, 1, 2) "
                "of an array, x.permute(0, 3, 1, 2) of a tensor."
            )
        if x.requires_grad:
            x = x.detach()
        if x.is_floating_point():
            x = x.float()
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", y.to(x.device, torch.int64))

    def __len__(self) -> int:
        return self.x.shape[0]

    def subset(self, indices: npt.ArrayLike) -> ImageData:
        """Return a copy of the examples at ``indices``, (n,) integers, in that order."""
        where = self.y.new_tensor(indices)
        return ImageData(self.x.index_select(0, where), self.y.index_select(0, where))

    def to(self, device: torch.device | str) -> ImageData:
        """Return the same data on ``device`` (itself, where it is there already)."""
        return ImageData(self.x.to(device), self.y.to(device))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named data set with its standard split, whole.

    Attributes:
        name: as recipes spell it.
        train: training images.
        test: the full test split.
        num_classes: C; labels are 0..C-1.
        class_names: C names, in the order of the labels; left out: the labels themselves.
        augment: what training images go through.
        validation: what no client trains on, for choices during training; None where the recipe asks for none.

    Raises:
        DataError: splits differ in shape, a pixel is outside [0, 1], a label is not below ``num_classes``, a class
            name cannot be printed, or classes without names are more than 1,000 and more than images.
    """

    name: str
    train: ImageData
    test: ImageData
    num_classes: int
    class_names: tuple[str, ...] = ()
    augment: Augmentation = NO_AUGMENTATION
    validation: ImageData | None = None

    def __post_init__(self) -> None:
        who = f"data set {self.name}"
        if not self.class_names:
            images = len(self.train) + len(self.test)
            most = max(images, MOST_EMPTY_CLASSES)
            if self.num_classes > most:  # before a list of them, or a model with an output for each, fills the memory
                raise DataError(
                    f"{who}: {self.num_classes:,} classes for {images:,} images; expected at most {most:,} where "
                    "classes have no names. Labels are numbers from 0 without gaps: numpy.unique(y, "
                    "return_inverse=True)[1] makes them so."
                )
            object.__setattr__(self, "class_names", tuple(map(str, range(self.num_classes))))
        shape, test_shape = tuple(self.train.x.shape[1:]), tuple(self.test.x.shape[1:])
        if shape != test_shape:
            raise DataError(
                f"{who}: training images are {shape}, test images {test_shape}; expected one shape (C, H, W)."
            )
        if len(self.class_names) != self.num_classes:
            raise DataError(f"{who}: {len(self.class_names)} class names for {self.num_classes} classes.")
        for name in self.class_names:
            if not isinstance(name, str) or not name.isprintable():
                raise DataError(f"{who}: got the class name {name!r}, expected a text of printable characters.")
        for split, data in (("training", self.train), ("test", self.test)):
            if len(data) == 0:
                raise DataError(f"{who}: no {split} images.")
            check_pixels(data, f"{who}: {split} ")
            low, high, last = int(data.y.min()), int(data.y.max()), self.num_classes - 1
            if low < 0 or high > last:
                raise DataError(f"{who}: {split} labels run from {low} to {high}; expected 0 to {last}.")

    @property
    def monitored(self) -> ImageData:
        """What the global model is evaluated on during a run: the validation split, or the test split without one."""
        if self.validation is None:
            return self.test
        return self.validation

    @property
    def in_channels(self) -> int:
        """Colour channels C of an image."""
        return self.train.x.shape[1]

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of an image in pixels."""
        return self.train.x.shape[2], self.train.x.shape[3]


def check_pixels(data: ImageData, whose: str = "") -> None:
    """Refuse images of 0..255 in floating point, normalised ones, and nan; ``whose``: what the message begins with."""
    if not data.x.is_floating_point():
        return
    low, high = (float(end) for end in data.x.aminmax())
    if low != low:  # nan, as soon as one pixel is
        broken = data.x.isnan().flatten(1).any(dim=1).nonzero().flatten().tolist()
        images = f"{len(broken)} of {len(data)} images (the first is number {broken[0]}, counted from 0)"
        raise DataError(f"{whose}pixels of {images} are nan; expected [0, 1].")
    if not (low >= 0 and high <= 1):
        raise DataError(
            f"{whose}pixels run from {low:g} to {high:g}; expected [0, 1]: divide bytes by 255 or give them as "
            "uint8, and leave normalisation to the model."
        )


def pixels(x_batch: Tensor) -> Tensor:
    """Stored images as models and attacks see them, float32 in [0, 1]: uint8 by 255, floating point as it is."""
    if x_batch.is_floating_point():
        return x_batch
    return x_batch.float().div_(255)


# --- fixed choices, which keep the share of each class ----------------------------------------------------------------


def stratified(labels: npt.ArrayLike, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Choose ``count`` of N examples, (count,) ascending positions; of each class the same share, to within one."""
    import numpy as np  # here, not above: recipes are checked without numpy

    array = np.asarray(labels)
    ids, totals = np.unique(array, return_counts=True)
    counts, remainders = divmod(totals * count, max(1, int(totals.sum())))  # of each class, rounded down
    # What is left goes to the classes with the largest remainders.
    left = count - int(counts.sum())
    counts[(-remainders).argsort(kind="stable")[:left]] += 1
    rng = np.random.RandomState(seed % 2**32)  # its streams never change with numpy's version
    chosen = [np.empty(0, np.int64)]
    for label, count_of_class in zip(ids, counts, strict=True):
        members = np.flatnonzero(array == label)
        chosen.append(rng.permutation(members)[:count_of_class])
    return np.sort(np.concatenate(chosen).astype(np.int64))


def at_most(data: ImageData, limit: int | None, seed: int, purpose: str) -> ImageData:
    """``data``, or a stratified choice of ``limit`` examples where there are more."""
    if limit is None or limit >= len(data):
        return data
    return data.subset(stratified(data.y.numpy(), limit, derive_seed(seed, purpose)))


def without_validation(data: ImageData, share: float, seed: int) -> tuple[ImageData, ImageData | None]:
    """(the rest, the validation split): a stratified ``share``, at least one example; None for a share of 0."""
    if not share:
        return data, None
    import numpy as np

    count = max(1, round(share * len(data)))
    held = stratified(data.y.numpy(), count, derive_seed(seed, "validation"))
    rest = np.setdiff1d(np.arange(len(data)), held)
    return data.subset(rest), data.subset(held)


def prepared(
    dataset: Dataset,
    *,
    max_train: int | None,
    max_test: int | None,
    validation_share: float,
    validate_on_test: bool,
    seed: int,
) -> Dataset:
    """The data set that a run uses: at most so many examples, the validation split (a share, 0 .. 0.5) among them."""
    train = at_most(dataset.train, max_train, seed, "train examples")
    test = at_most(dataset.test, max_test, seed, "test examples")
    if validate_on_test:
        test, validation = without_validation(test, validation_share, seed)
    else:
        train, validation = without_validation(train, validation_share, seed)
    return dataclasses.replace(dataset, train=train, test=test, validation=validation)
