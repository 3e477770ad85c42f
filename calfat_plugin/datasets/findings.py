"""What looks wrong in images and labels that could be read: texts for people, with the numbers that show it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from calfat_plugin.datasets.data import Dataset, ImageData

if TYPE_CHECKING:
    from torch import Tensor

BOTH_SPLITS = ("train", "test")
# Photographs, drawings and scans all have pixels brighter than this. Bytes divided by 255 twice have none above 0.004,
# and the sixteen grey levels of digits, given as bytes, none above 0.063.
_DARK = 0.1
_NAMED = 3  # classes that a message lists
_AT_ONCE = 256  # images that are hashed together, so that a copy of them stays small


def dataset_findings(dataset: Dataset, splits: Collection[str] = BOTH_SPLITS) -> Iterator[str]:
    """What looks wrong in a data set.

    Args:
        dataset: as it is used, which may be a part of what is on disk.
        splits: which of them are what they are called: a party of a silo reads one, and has it in both places.
    """
    if "train" in splits:
        yield from image_findings(dataset.train, "training images")
    if "test" in splits:
        yield from image_findings(dataset.test, "test images")
        counts = dataset.test.y.bincount(minlength=dataset.num_classes).tolist()
        missing = [name for name, count in zip(dataset.class_names, counts, strict=True) if count == 0]
        if missing:
            yield (
                f"{len(missing)} of {dataset.num_classes} classes have no test image ({some_of(missing)}), so no "
                "accuracy says anything about them. Add test images of them, unless that is meant."
            )
    if "train" in splits and "test" in splits:
        yield from _in_both_splits(dataset)


def image_findings(data: ImageData, which: str) -> Iterator[str]:
    """What looks wrong in images by themselves; ``which``: what a message calls them."""
    maps = data.x.flatten(2)  # (N, C, H * W)
    highest, lowest = maps.amax(dim=2), maps.amin(dim=2)
    brightest, of_bytes = float(highest.max()), ""
    if not data.x.is_floating_point():
        of_bytes = f", {brightest:g} of 255"
        brightest = brightest / 255
    if 0 < brightest < _DARK:
        yield (
            f"the brightest pixel of all {len(data)} {which} is {brightest:.2g} of [0, 1]{of_bytes}: they are nearly "
            "black, and eps changes far more of them than it says. Were they divided by 255 twice? Give bytes as "
            "uint8, or divide them by their largest value once."
        )
    if maps.shape[2] == 1:  # an image of one pixel is of one colour
        return
    is_plain = (highest == lowest).all(dim=1)  # (N,)
    plain = is_plain.nonzero().flatten().tolist()
    if plain:
        black = int((is_plain & (highest.amax(dim=1) == 0)).sum())
        yield (
            f"{len(plain)} of {len(data)} {which} are of one colour all over, {black} of them black (the first is "
            f"number {plain[0]}, counted from 0), so they show nothing of their class. Look how they are read, or "
            "leave them out."
        )


def some_of(names: Sequence[str]) -> str:
    """The first of many names, for a message."""
    if len(names) > _NAMED:
        names = [*names[:_NAMED], "..."]
    return ", ".join(names)


def _in_both_splits(dataset: Dataset) -> Iterator[str]:
    """Test images that are training images: equal in every pixel, whatever their labels."""
    train, test = dataset.train, dataset.test
    as_bytes = train.x.dtype != test.x.dtype  # x / 255 and x * (1 / 255) differ in their last bits
    place_in_train: dict[bytes, int] = {}
    for place, digest in enumerate(_digests(train.x, as_bytes)):
        place_in_train.setdefault(digest, place)
    shared = []
    for place, digest in enumerate(_digests(test.x, as_bytes)):
        if digest in place_in_train:
            shared.append((place, place_in_train[digest]))
    if shared:
        in_test, in_train = shared[0]
        share = 100 * len(shared) / len(test)
        yield (
            f"{len(shared)} of {len(test)} test images ({share:.2f} %) are training images, too, equal in every pixel "
            f"(the first is number {in_test} of the test and {in_train} of the training images, counted from 0), so "
            "accuracies are in part those of images that were trained on. Take them out of one of the two."
        )


def _digests(x: Tensor, as_bytes: bool) -> Iterator[bytes]:
    """SHA-256 of the pixels of each image: processors compute it in hardware, faster than any other digest here."""
    import torch

    for images in x.split(_AT_ONCE):
        is_float = images.is_floating_point()
        if is_float and as_bytes:
            images = (images * 255).round().to(torch.uint8)
        elif is_float:
            images = images + 0.0  # -0.0 becomes 0.0, which has other bits
        for image in images.cpu().contiguous().flatten(1).numpy():
            yield hashlib.sha256(image).digest()
