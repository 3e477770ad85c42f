"""A model whose training meets the fate that a file of the current folder, ``fate-<n>``, has for it; each file once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from calfat_plugin.errors import ModelError


class Mortal(nn.Sequential):
    """A convolution and a linear layer."""

    def __init__(self, in_channels: int, num_classes: int, image_size: tuple[int, int]) -> None:
        features = 4 * image_size[0] * image_size[1]
        super().__init__(
            nn.Conv2d(in_channels, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(features, num_classes)
        )

    def forward(self, x: Any) -> Any:
        if self.training and torch.is_grad_enabled():  # not where a network is only tried before a run
            for fate in sorted(Path.cwd().glob("fate-*")):
                _meet(fate)
        return super().forward(x)


def _meet(fate: Path) -> None:
    try:
        how = fate.read_text()
        fate.unlink()
    except FileNotFoundError:  # it was for another process
        return
    if how == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "sleep":
        time.sleep(600)
    elif how == "threads":
        Path("threads").write_text(str(torch.get_num_threads()))
    elif how == "user":
        raise ModelError("this model cannot be trained.")
    else:
        raise ZeroDivisionError("a bug")


def build(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    return Mortal(in_channels, num_classes, image_size)
