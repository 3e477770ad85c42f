"""Loads an exported model for `mlflow models serve`. A copy of this file goes with the model; it needs torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


class ServedModel:
    """What MLflow asks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def predict(self, pixels: Any, params: Any = None) -> Any:
        """Logits (N, classes) of pixels (N, C, H, W) in [0, 1]."""
        images = torch.from_numpy(np.ascontiguousarray(pixels, dtype=np.float32))
        with torch.no_grad():
            return self._module(images).numpy()


def _load_pyfunc(folder: str) -> ServedModel:
    """MLflow calls it with the folder of the exported files."""
    return ServedModel(torch.export.load(Path(folder) / "model.pt2").module())
