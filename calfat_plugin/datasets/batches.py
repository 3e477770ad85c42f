"""Mini-batches of resident images, shuffled, cropped and flipped without a loop over images."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from calfat_plugin.datasets.data import NO_AUGMENTATION, Augmentation, ImageData, pixels


def batches(
    data: ImageData,
    batch_size: int,
    device: torch.device | str,
    *,
    generator: torch.Generator | None = None,
    augment: Augmentation = NO_AUGMENTATION,
    merge_single: bool = False,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Go through ``data`` once: in order and unchanged, or shuffled and augmented where there is a generator.

    Order and augmentation of the whole pass are drawn here, in one go, on the generator's own device: a CPU generator
    gives the same batches on every device, and no batch waits for a copy.

    Args:
        data: images on any device; they are converted batch by batch.
        batch_size: >= 1.
        device: where the batches are wanted.
        generator: source of all draws; ``None`` means in order, and then nothing may be augmented.
        augment: random crop and flip.
        merge_single: join a final batch of one example to the one before it (batch normalisation cannot train on one
            example). Without a batch before it, it stays.

    Returns:
        An iterator of x: (B, C, H, W) float32 in [0, 1], contiguous, y: (B,) int64, and the batch's positions in
        ``data``: (B,) int64 on the device of ``data``.

    Raises:
        ValueError: ``batch_size`` < 1, or augmentation without a generator.
    """
    if augment and generator is None:
        raise ValueError("augmentation needs a generator to draw from")
    n = len(data)
    bounds = _bounds(n, batch_size, merge_single)
    draws = None
    if generator is None:
        order = torch.arange(n, device=data.x.device)
    else:
        order = torch.randperm(n, generator=generator, device=generator.device).to(data.x.device)
        draws = _draws(n, augment, generator).to(device) if augment else None

    def one_pass() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for start, stop in bounds:
            where = order[start:stop]
            x = data.x[where].to(device)  # a copy, so that no caller can write into the data
            if draws is not None:
                x = _augmented(x, draws[start:stop], augment.crop_padding)
            yield pixels(x), data.y[where].to(device), where

    return one_pass()


def num_batches(num_examples: int, batch_size: int, *, merge_single: bool = False) -> int:
    """Count the batches that :func:`batches` gives for these arguments."""
    return len(_bounds(num_examples, batch_size, merge_single))


def _bounds(num_examples: int, batch_size: int, merge_single: bool) -> list[tuple[int, int]]:
    """Cut 0..num_examples into (start, stop) pairs."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected 1 or more")
    starts = list(range(0, num_examples, batch_size))
    if merge_single and len(starts) > 1 and num_examples - starts[-1] == 1:
        starts.pop()
    return list(pairwise([*starts, num_examples]))


def _draws(n: int, augment: Augmentation, generator: torch.Generator) -> Tensor:
    """Draw (n, 3) int64: top and left of the crop in 0..2*padding, and 1 where to flip."""

    def integers(below: int) -> Tensor:
        return torch.randint(below, (n,), generator=generator, device=generator.device)

    offsets = 2 * augment.crop_padding + 1
    return torch.stack((integers(offsets), integers(offsets), integers(1 + augment.flip)), dim=1)


def _augmented(x: Tensor, draws: Tensor, padding: int) -> Tensor:
    """Crop and flip each image of x, (B, C, H, W), by its row of draws, (B, 3); same shape."""
    count, channels, height, width = x.shape
    padded = torch.nn.functional.pad(x, (padding, padding, padding, padding))
    top, left, flip = draws[:, :, None].unbind(1)  # each (B, 1)
    across = torch.arange(width, device=x.device)
    rows = top + torch.arange(height, device=x.device)  # (B, H)
    columns = left + torch.where(flip == 1, width - 1 - across, across)  # (B, W)
    image = torch.arange(count, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[None, :, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
