from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calfat_plugin.datasets import Augmentation, ImageData
from calfat_plugin.datasets.batches import batch_bounds, batches


def numbered(n: int, size: int = 3) -> ImageData:
    """Image i is i everywhere, and so is its label: whatever is shuffled can be recognised."""
    y = torch.arange(n)
    return ImageData(y.to(torch.uint8).reshape(n, 1, 1, 1).expand(n, 2, size, size).clone(), y)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_pass(data: ImageData, seed: int = 0, **options) -> list[tuple[torch.Tensor, torch.Tensor]]:
    options = {"batch_size": 4, "device": "cpu", **options}
    found = list(batches(data, generator=generator(seed), **options))
    assert all(torch.equal(data.y[examples.index].cpu(), y.cpu()) for _, y, examples in found)
    return [(x, y) for x, y, _ in found]


@given(n=st.integers(0, 30), batch_size=st.integers(1, 9), merge_single=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_pass_gives_every_example_once_in_batches_of_the_size(n, batch_size, merge_single):
    found = one_pass(numbered(n), batch_size=batch_size, merge_single=merge_single)
    lengths = [len(y) for _, y in found]
    seen = [label for _, y in found for label in y.tolist()]
    assert sorted(seen) == list(range(n))
    assert all(length == batch_size for length in lengths[:-1])
    if merge_single and len(lengths) > 1 and batch_size > 1:
        assert lengths[-1] > 1
    assert len(found) == len(batch_bounds(n, batch_size, merge_single=merge_single))


@pytest.mark.parametrize(
    ("n", "options", "expected"),
    [
        (9, {}, [4, 4, 1]),
        (9, {"merge_single": True}, [4, 5]),
        (10, {"merge_single": True}, [4, 4, 2]),
        (8, {"merge_single": True}, [4, 4]),
        (1, {"merge_single": True}, [1]),
        (0, {}, []),
    ],
)
def test_batch_sizes(n, options, expected):
    assert [len(y) for _, y in one_pass(numbered(n), **options)] == expected


def test_labels_stay_with_their_images_and_pixels_are_scaled():
    for x, y in one_pass(numbered(9)):
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        assert torch.equal(x, (y.float() / 255).reshape(-1, 1, 1, 1).expand_as(x))


def test_the_generator_alone_decides_the_order():
    torch.manual_seed(1)
    first = [y.tolist() for _, y in one_pass(numbered(20), seed=5)]
    torch.manual_seed(2)
    assert [y.tolist() for _, y in one_pass(numbered(20), seed=5)] == first
    assert [y.tolist() for _, y in one_pass(numbered(20), seed=6)] != first
    assert torch.cat([y for _, y, _ in batches(numbered(9), 4, "cpu")]).tolist() == list(range(9))  # without one


@pytest.mark.parametrize("stored", [numbered(9), ImageData(torch.rand(9, 2, 3, 3), torch.arange(9))])
def test_passes_leave_the_data_and_the_global_generator_alone(stored):
    data = stored
    before = data.x.clone(), torch.get_rng_state()
    for x, _ in one_pass(data, augment=Augmentation(1, True)):
        x.zero_()
    for x, _, _ in batches(data, 4, "cpu"):
        x.zero_()
    assert torch.equal(data.x, before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def crops_and_flips(image: torch.Tensor, padding: int, flip: bool) -> list[torch.Tensor]:
    """Everything that the augmentation may make of one image, by slicing."""
    _, height, width = image.shape
    padded = torch.nn.functional.pad(image, (padding,) * 4)
    crops = [
        padded[:, top : top + height, left : left + width]
        for top in range(2 * padding + 1)
        for left in range(2 * padding + 1)
    ]
    return crops + ([crop.flip(2) for crop in crops] if flip else [])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("padding", "flip"), [(1, True), (2, False), (0, True)])
def test_augmentation_gives_every_crop_and_flip_and_nothing_else(padding, flip, dtype):
    image = torch.arange(1, 25).reshape(2, 3, 4)
    image = (image / 32).float() if dtype == torch.float32 else image.to(torch.uint8)
    data = ImageData(image.expand(400, 2, 3, 4).clone(), torch.arange(400))
    allowed = [
        tuple((made if dtype == torch.float32 else made.float() / 255).flatten().tolist())
        for made in crops_and_flips(image, padding, flip)
    ]
    seen = [
        tuple(x.flatten().tolist())
        for batch, _ in one_pass(data, batch_size=64, augment=Augmentation(padding, flip))
        for x in batch
    ]
    assert set(seen) == set(allowed)
    most = max(seen.count(made) for made in set(allowed))
    assert most < 4 * 400 / len(allowed)  # no place is strongly preferred
