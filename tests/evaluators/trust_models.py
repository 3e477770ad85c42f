"""Models made to be judged: each is the digits network, or breaks an attack in a way of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from calfat_plugin.models.cnn import CNNSmall


class Honest(nn.Module):
    """The network as it is; ``net`` has its weights."""

    def __init__(self, **shapes: Any) -> None:
        super().__init__()
        self.net = CNNSmall(**shapes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits


class Scaled(Honest):
    """Logits a thousand times as large: the softmax saturates, and the cross-entropy has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return 1000 * super().forward(x)


class Quantised(Honest):
    """Eight grey levels, by a rounding whose derivative is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * 8).round() / 8)


class Randomised(Honest):
    """Noise on the pixels, another each time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


class RandomisedAndFlat(Randomised):
    """The same with tiny logits."""

    def forward(self, x: Tensor) -> Tensor:
        return 1e-6 * super().forward(x)


class Probabilities(Honest):
    """A softmax at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(dim=1)


class Overflowing(Honest):
    """Finite weights, infinite logits."""

    def forward(self, x: Tensor) -> Tensor:
        return 1e38 * (1e38 * super().forward(x))


class NeverInEvaluationMode(Honest):
    """Stays in training mode, whatever it is told."""

    def train(self, mode: bool = True) -> NeverInEvaluationMode:
        super().train(True)
        return self


class FiveClasses(Honest):
    """Knows half of the classes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :5]


class ForColour(Honest):
    """Takes images of three colours."""

    def __init__(self, **shapes: Any) -> None:
        super().__init__(**{**shapes, "in_channels": 3})
