"""The global random generators of Python, numpy and torch: put back as they were, or at a derived state for a while."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def generators_kept() -> Iterator[None]:
    """Give the global generators back as they were, whatever happens to them inside."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices: list[int] = []
    if torch.cuda.is_available():
        devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def seeded_global_rng(seed: int) -> Iterator[None]:
    """Put the global generators at a derived state for a while, then back to what they were.

    Nothing of ours draws from them. PyTorch's dropout does, and other people's plugins may: without this, what a
    client draws would depend on who trained before it in this process, and a resumed run would end elsewhere.
    """
    with generators_kept():
        set_global_rng(seed)
        yield


def set_global_rng(seed: int) -> None:
    """Put the global generators at a derived state."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    # Not torch.manual_seed: for kinds of devices that are not in use it queues a call with a traceback each time,
    # which takes milliseconds and is never freed.
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
