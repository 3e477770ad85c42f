"""ImageData, Dataset, pixels, and the embedded digits."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from calfat_plugin.datasets import Augmentation, Dataset, ImageData, pixels
from calfat_plugin.datasets.published import load_digits
from calfat_plugin.errors import DataError, OptionError


def image_data(n: int = 4, label: int = 0, size: int = 2) -> ImageData:
    x = torch.arange(n * 3 * size * size, dtype=torch.uint8).reshape(n, 3, size, size)
    return ImageData(x, torch.full((n,), label))


def test_pixels_scales_bytes_and_passes_floats_on():
    stored = torch.tensor([0, 51, 255], dtype=torch.uint8)
    assert torch.equal(pixels(stored), torch.tensor([0.0, 0.2, 1.0]))
    assert stored.tolist() == [0, 51, 255]
    expected = (torch.arange(256, dtype=torch.float64) / 255).float()
    assert torch.equal(pixels(torch.arange(256).to(torch.uint8)), expected)
    already = torch.tensor([0.25])
    assert pixels(already) is already


def test_a_subset_keeps_the_order_asked_for_and_copies():
    data = ImageData(torch.rand(5, 1, 2, 2), torch.arange(5))
    part = data.subset(np.array([3, 1]))
    assert len(part) == 2
    assert part.y.tolist() == [3, 1]
    assert torch.equal(part.x, data.x[[3, 1]])
    part.x.zero_()
    assert data.x[3].abs().sum() > 0
    assert len(data.subset([])) == 0


@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.float64])
def test_arrays_become_tensors_of_their_own(kind):
    x = (np.arange(24).reshape(2, 3, 2, 2) * (1 if kind == np.uint8 else 1 / 24)).astype(kind)
    x.flags.writeable = False  # as a file that is mapped into memory
    y = np.array([1, 0], dtype=np.int32 if kind == np.uint8 else np.int64)
    data = ImageData(x, y)
    assert (data.x.dtype, data.y.dtype) == (torch.uint8 if kind == np.uint8 else torch.float32, torch.int64)
    assert (data.y.tolist(), data.x.tolist()) == ([1, 0], torch.tensor(x.astype(np.float32)).tolist())
    y[0] = 7
    assert ImageData(x[:, :, ::-1], [0, 1]).x[0, 0, 0, 0] == data.x[0, 0, 1, 0]
    assert data.y[0] == 1


@pytest.mark.parametrize("shape", [(2, 3, 2, 1), (2, 9, 128, 1), (2, 1, 3, 3), (2, 3, 3, 3), (2, 2, 1, 1)])
def test_images_of_few_pixels_a_row_are_no_channels_last(shape):
    assert ImageData(np.zeros(shape, np.uint8), np.zeros(2, int)).x.shape == shape


@pytest.mark.parametrize("name", ["\x1b[2Jzero", "a\nb", "\udcff", 7])
def test_a_class_name_that_cannot_be_printed_is_refused(name, snapshot):
    with snapshot.raises(DataError):
        Dataset("mine", image_data(), image_data(), 2, ("größe 大", name))


def floats(low: float, high: float) -> ImageData:
    return ImageData(
        torch.tensor([low, high], dtype=torch.float32).expand(1, 3, 2, 2).contiguous(),
        torch.zeros(1, dtype=torch.int64),
    )


DATA_ERRORS = [
    lambda: ImageData(torch.zeros(2, 8, 8), torch.zeros(2, dtype=torch.int64)),
    lambda: ImageData(torch.zeros(2, 1, 8, 8), torch.zeros(3, dtype=torch.int64)),
    lambda: ImageData(torch.zeros(2, 1, 8, 8).double(), torch.zeros(2)),
    lambda: ImageData(np.zeros((2, 1, 8, 8), int), np.zeros(2, int)),
    lambda: ImageData(np.zeros((2, 8, 8, 1), np.uint8), np.zeros(2, int)),
    lambda: ImageData(torch.zeros(2, 32, 24, 3), torch.zeros(2).long()),
    lambda: ImageData(np.zeros((2, 1, 8, 8)), np.zeros(2, bool)),
    lambda: Dataset("d", image_data(size=2), image_data(size=3), 1, ("a",)),
    lambda: Dataset("d", image_data(), image_data(), 2, ("a",)),
    lambda: Dataset("d", image_data(), image_data(0), 1, ("a",)),
    lambda: Dataset("d", floats(0, 255), floats(0, 1), 1),
    lambda: Dataset("d", floats(0, 1), floats(-1.5, 2.25), 1),
    lambda: Dataset("d", floats(0, float("nan")), image_data(), 1),
    lambda: Dataset("d", image_data(label=1), image_data(), 1, ("a",)),
    lambda: Augmentation(crop_padding=-1),
    lambda: Dataset("d", image_data(), image_data(), 10**12),
    lambda: Dataset("d", image_data(), image_data(), 1001),
]


@pytest.mark.parametrize("build", DATA_ERRORS)
def test_wrong_data_is_refused(build, snapshot):
    with snapshot.raises((DataError, OptionError)):
        build()


def test_there_may_be_as_many_classes_as_images_or_a_thousand_or_names():
    assert len(Dataset("d", image_data(), image_data(), 1000).class_names) == 1000
    many = ImageData(np.zeros((700, 1, 2, 2), np.uint8), np.arange(700))
    assert Dataset("d", many, many, 1400).class_names[-1] == "1399"
    names = tuple(f"class{number}" for number in range(5000))
    assert Dataset("d", image_data(), image_data(), 5000, names).class_names == names


def test_digits_are_real_whole_and_split_by_class():
    """Every result on digits rests on the same 359 images; the digest was taken when they were chosen."""
    digits = load_digits()
    assert (digits.name, digits.num_classes, digits.in_channels) == ("digits", 10, 1)
    assert digits.image_size == (8, 8)
    assert digits.class_names == tuple("0123456789")
    assert not digits.augment
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    x = torch.cat([digits.train.x, digits.test.x])
    assert x.dtype == torch.float32
    assert (x.min(), x.max()) == (0, 1)
    assert torch.equal(x * 16, (x * 16).round())
    assert torch.bincount(digits.train.y).tolist() == [*(142, 146, 142, 146, 145), *(146, 145, 143, 139, 144)]
    assert torch.bincount(digits.test.y).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    grey_levels = (digits.test.x * 16).to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(grey_levels).hexdigest()[:16] == "71754d7643190cf7"
