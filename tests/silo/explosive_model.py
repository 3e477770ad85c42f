"""A model that cannot be trained by rank 1 of an MPI job; nowhere else is anything the matter with it."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI
from torch import Tensor, nn

from calfat_plugin.errors import ModelError


class Explosive(nn.Sequential):
    """One linear layer, and what it raises."""

    def __init__(self, reason: Exception, num_pixels: int, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(num_pixels, num_classes))
        self._reason = reason

    def forward(self, x: Tensor) -> Any:
        if self.training and MPI.COMM_WORLD.Get_rank() == 1:
            raise self._reason
        return super().forward(x)


def bug(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """One that is ours to mend."""
    reason = ZeroDivisionError("rank 1 divides by zero")
    return Explosive(reason, in_channels * image_size[0] * image_size[1], num_classes)


def user(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """One that is the user's to mend."""
    reason = ModelError("this model cannot be trained.")
    return Explosive(reason, in_channels * image_size[0] * image_size[1], num_classes)
