"""Where a run computes, and with how many threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from calfat_plugin.experiment import Experiment

if TYPE_CHECKING:
    import torch


def pick_device(experiment: Experiment, warn: Callable[[str], None]) -> torch.device:
    """Where the recipe wants to compute; the CPU, with a warning, where its GPU is missing.

    Raises:
        RecipeError: there are GPUs, but not the one it names.
    """
    import torch

    wanted = experiment.recipe.device
    if not wanted.using_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        warn("device_args.using_gpu is true, but torch sees no GPU here; training on the CPU.")
        return torch.device("cpu")
    if wanted.gpu_id >= torch.cuda.device_count():
        raise experiment.recipe.document.error(
            ("device_args", "gpu_id"), f"got {wanted.gpu_id}, but torch sees {torch.cuda.device_count()} GPU(s)."
        )
    return torch.device("cuda", wanted.gpu_id)


@contextmanager
def using_threads(experiment: Experiment) -> Iterator[None]:
    """The recipe's number of threads while the run lasts."""
    import torch

    threads, before = experiment.recipe.runtime.threads, torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)
