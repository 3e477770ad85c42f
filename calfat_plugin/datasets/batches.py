"""Mini-batches of resident images, shuffled, cropped and flipped without a loop over images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from calfat_plugin.datasets.data import NO_AUGMENTATION, Augmentation, ImageData, pixels


@dataclass(frozen=True)
class Examples:
    """Which of a client's examples a mini-batch has, and how they were augmented, to keep something for each."""

    index: Tensor  # (N,) int64 positions in the client's data
    draws: Tensor | None = None  # (N, 3) int64: top and left of the crop in the padded image, and 1 where it is flipped

    def rows(self, which: slice | Tensor) -> Examples:
        """Some of them."""
        if self.draws is None:
            return Examples(self.index[which])
        return Examples(self.index[which], self.draws[which])

    def cut(self, kept: Tensor, height: int, width: int) -> Tensor:
        """Crop and flip, as the images were, what is kept for all n examples, padded: (N, C, height, width), a copy."""
        return kept[self._where(kept, height, width)]

    def put_back(self, kept: Tensor, values: Tensor) -> None:
        """The inverse of ``cut``: write values, (N, C, H, W), to where they were cut out; the border stays."""
        kept[self._where(kept, *values.shape[2:])] = values

    def _where(self, kept: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
        """The index into ``kept`` of the pixels of these examples."""
        index = self.index.to(kept.device)
        if self.draws is None:
            return (index,)
        return _places(index, self.draws.to(kept.device), kept, height, width)


class Batch(NamedTuple):
    """A mini-batch: x, (B, C, H, W) float32 in [0, 1], contiguous; y, (B,) int64; and which examples they are."""

    x: Tensor
    y: Tensor
    examples: Examples


def batches(
    data: ImageData,
    batch_size: int,
    device: torch.device | str,
    *,
    generator: torch.Generator | None = None,
    augment: Augmentation = NO_AUGMENTATION,
    merge_single: bool = False,
) -> Iterator[Batch]:
    """Go through ``data`` once: in order and unchanged, or shuffled and augmented where there is a generator.

    Order and augmentation of the whole pass are drawn in one go, on the generator's own device: a CPU generator gives
    the same batches on every device, and no batch waits for a copy. ``merge_single`` joins a final batch of one example
    to the one before it, if there is one: batch normalisation cannot train on one example.
    """
    n = len(data)
    order = torch.arange(n, device=data.x.device)
    draws = None
    if generator is not None:
        order = torch.randperm(n, generator=generator, device=generator.device).to(data.x.device)
        if augment:
            # (n, 3): top and left of the crop in 0..2*padding, and 1 where to flip
            drawn = []
            for below in (2 * augment.crop_padding + 1, 2 * augment.crop_padding + 1, 1 + augment.flip):
                drawn.append(torch.randint(below, (n,), generator=generator, device=generator.device))
            draws = torch.stack(drawn, dim=1).to(device)
    for start, stop in batch_bounds(n, batch_size, merge_single=merge_single):
        where = order[start:stop]
        examples = Examples(where)
        x = data.x[where].to(device)  # a copy, so that no caller can write into the data
        if draws is not None:
            examples = Examples(where, draws[start:stop])
            padded = torch.nn.functional.pad(x, (augment.crop_padding,) * 4)
            x = padded[_places(torch.arange(len(x), device=x.device), draws[start:stop], padded, *x.shape[2:])]
        yield Batch(pixels(x), data.y[where].to(device), examples)


def batch_bounds(num_examples: int, batch_size: int, *, merge_single: bool = False) -> list[tuple[int, int]]:
    """(start, stop) of each batch that :func:`batches` gives for these arguments."""
    starts = list(range(0, num_examples, batch_size))
    if merge_single and len(starts) > 1 and num_examples - starts[-1] == 1:
        starts.pop()
    return list(pairwise([*starts, num_examples]))


def _places(image: Tensor, draws: Tensor, padded: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
    """Where in ``padded``, (n, C, H, W), the pixels of crops of its images lie, by (B,) images and (B, 3) draws."""
    top, left, flip = draws[:, :, None].unbind(1)  # each (B, 1)
    across = torch.arange(width, device=padded.device)
    rows = top + torch.arange(height, device=padded.device)  # (B, H)
    columns = left + torch.where(flip == 1, width - 1 - across, across)  # (B, W)
    channel = torch.arange(padded.shape[1], device=padded.device)[None, :, None, None]
    return image[:, None, None, None], channel, rows[:, None, :, None], columns[:, None, None, :]
