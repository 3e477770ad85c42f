"""Which examples of a batch a method attacks when it trains on a mixture of clean and adversarial ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from calfat_plugin.seeds import generator

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from calfat_plugin.interfaces import LocalTask

Sampling = Literal["per_batch", "fixed"]
SAMPLING_HELP = (
    "per_batch: a new random share of every mini-batch; fixed: one split of the client's data for all rounds"
)


def mixed_rows(
    index: Tensor, task: LocalTask, batch_noise: Generator, ratio: float, sampling: Sampling
) -> Tensor | None:
    """The rows of a batch that become adversarial: (N,) bool, or None for all of them.

    Args:
        index: (N,) positions of the batch's examples in ``task.data``.
        task: the client's work.
        batch_noise: source of the draw of mode ``per_batch``.
        ratio: share of adversarial examples in [0, 1]; rounded down to whole examples.
        sampling: ``per_batch``, or ``fixed``, whose split depends on seed and client alone.
    """
    if ratio == 1.0:
        return None  # nothing is drawn, so that the attack's noise is that of a method without a mixture
    if sampling == "fixed":
        split = random_share(len(task.data), ratio, generator(task.seed, "adversarial split", client=task.client))
        return split[index.to(split.device)]
    return random_share(len(index), ratio, batch_noise)


def random_share(num_examples: int, ratio: float, generator: Generator) -> Tensor:
    """Choose floor(ratio * num_examples) examples at random: (num_examples,) bool on the generator's device."""
    import torch

    # 0.29 * 100 is 28.999999999999996 in floating point; the slack makes it the 29 that was meant.
    chosen = math.floor(ratio * num_examples + 1e-9)
    order = torch.randperm(num_examples, generator=generator, device=generator.device)
    return order < chosen
