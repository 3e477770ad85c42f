"""What looks wrong in images and labels that could be read, with the numbers that show it."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
import torch

from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.datasets.findings import dataset_findings, image_findings
from calfat_plugin.datasets.published import load_digits
from tests.snapshot import TextSnapshot


def noise(count: int, classes: int = 3, seed: int = 0) -> ImageData:
    x = np.random.default_rng(seed).integers(0, 256, (count, 2, 4, 4)).astype(np.uint8)
    return ImageData(x, np.arange(count) % classes)


def floats(data: ImageData, factor: float) -> ImageData:
    return ImageData(data.x.float() * factor, data.y)


TRAIN, TEST = noise(30), noise(12, seed=1)


def findings(train: ImageData = TRAIN, test: ImageData = TEST, **splits: tuple[str, ...]) -> list[str]:
    return list(dataset_findings(Dataset("mine", train, test, 3), **splits))


def test_good_data_have_none() -> None:
    assert findings() == []
    assert list(dataset_findings(load_digits())) == []
    one_pixel = ImageData(np.full((4, 3, 1, 1), 0.5), np.zeros(4, int))
    assert list(image_findings(one_pixel, "images")) == []


def test_pixels_that_were_divided_twice_are_nearly_black(snapshot: TextSnapshot) -> None:
    twice = floats(TEST, 1 / 255 / 255)
    (text,) = image_findings(twice, "test images")
    snapshot(text)
    assert f"all 12 test images is {float(twice.x.max()):.2g} of [0, 1]" in text
    assert findings(test=twice) == [text]
    both = findings(floats(TRAIN, 1 / 255 / 255), twice)
    assert [re.findall(r"all \d+ \w+ images", text) for text in both] == [
        ["all 30 training images"],
        ["all 12 test images"],
    ]


def test_bytes_of_a_few_levels_are_nearly_black(snapshot: TextSnapshot) -> None:
    """Grey levels of 0 .. 16 are bytes, too."""
    levels = ImageData(TEST.x // 16, TEST.y)
    assert int(levels.x.max()) == 15
    (text,) = image_findings(levels, "images")
    snapshot(text)


@pytest.mark.parametrize("brightest", [26, 255])
def test_dark_images_are_images(brightest: int) -> None:
    x = torch.full((2, 1, 2, 2), brightest, dtype=torch.uint8)
    x[:, :, 0] = 0
    assert list(image_findings(ImageData(x, [0, 1]), "images")) == []
    assert list(image_findings(ImageData(x.float() / 255, [0, 1]), "images")) == []


def test_images_of_one_colour_are_counted_and_the_black_ones_apart(snapshot: TextSnapshot) -> None:
    x = TEST.x.clone()
    x[[3, 5]] = 0
    x[7] = torch.tensor([9, 200], dtype=torch.uint8)[:, None, None]  # another value in each channel
    x[9, 0] = 7  # of one channel alone: it shows something in the other one
    (text,) = findings(test=ImageData(x, TEST.y))
    snapshot(text)
    assert text.startswith("3 of 12 test images are of one colour all over, 2 of them black (the first is number 3, ")
    assert findings(test=ImageData(x.float() / 255, TEST.y)) == [text]


def test_all_black_images_are_not_called_dark_as_well() -> None:
    (text,) = image_findings(ImageData(np.zeros((4, 1, 3, 3)), np.zeros(4, int)), "images")
    assert text.startswith("4 of 4 images are of one colour all over, 4 of them black")


def test_classes_without_test_images_are_named(snapshot: TextSnapshot) -> None:
    (text,) = findings(test=ImageData(TEST.x, torch.zeros_like(TEST.y)))
    snapshot(text)
    names = tuple(f"class{number}" for number in range(9))
    (text,) = dataset_findings(Dataset("mine", noise(30, 9), ImageData(TEST.x, TEST.y + 6), 9, names))
    assert text.startswith("6 of 9 classes have no test image (class0, class1, class2, ...), so ")


def test_test_images_that_are_training_images_are_counted(snapshot: TextSnapshot) -> None:
    """Whatever their labels, and also where one split has bytes and the other floats."""
    shared = torch.cat([TEST.x[:10], TRAIN.x[[8, 21]]])
    (text,) = findings(test=ImageData(shared, TEST.y))
    snapshot(text)
    assert text.startswith("2 of 12 test images (16.67 %) are training images, too")
    assert "number 10 of the test and 8 of the training images" in text
    assert findings(test=ImageData(shared.float() / 255, TEST.y)) == [text]
    assert findings(floats(TRAIN, 1 / 255), ImageData(shared, TEST.y)) == [text]
    in_floats = ImageData(TRAIN.x.float() / 255, TRAIN.y)
    assert findings(in_floats, ImageData(shared.float() / 255, TEST.y)) == [text]


def test_one_other_pixel_makes_another_image() -> None:
    x = TRAIN.x[:12].clone()
    x[:, 1, 3, 3] ^= 1
    assert findings(test=ImageData(x, TEST.y)) == []


def test_two_zeros_are_one_number() -> None:
    x = floats(TRAIN, 1 / 255).x
    x[:, 0, 0, 0] = 0.0
    negative = x.clone()
    negative[:, 0, 0, 0] = -0.0
    (text,) = findings(ImageData(x, TRAIN.y), ImageData(negative, TRAIN.y))
    assert text.startswith("30 of 30 test images (100.00 %)")


def test_a_party_that_reads_one_split_is_told_of_that_alone() -> None:
    """It has this split in the place of the other one, too."""
    black = ImageData(torch.zeros_like(TEST.x), torch.zeros_like(TEST.y))
    (as_training,) = findings(black, black, splits=("train",))
    assert as_training.startswith("12 of 12 training images are of one colour")
    one_colour, no_test_image = findings(black, black, splits=("test",))
    assert one_colour.startswith("12 of 12 test images are of one colour")
    assert no_test_image.startswith("2 of 3 classes have no test image (1, 2)")


def test_sixty_thousand_images_take_about_a_second() -> None:
    """Counted in the CPU's time, with room for a slow processor: a tenth of a second where this was written."""
    x = torch.arange(70_000 * 28 * 28, dtype=torch.int32).to(torch.uint8).reshape(-1, 1, 28, 28).clone()
    x[:, 0, 0, :4] = torch.arange(70_000, dtype=torch.int32).view(torch.uint8).reshape(-1, 4)
    y = torch.arange(70_000) % 10
    dataset = Dataset("large", ImageData(x[:60_000], y[:60_000]), ImageData(x[60_000:], y[60_000:]), 10)
    started = time.process_time()
    assert list(dataset_findings(dataset)) == []
    assert time.process_time() - started < 5
