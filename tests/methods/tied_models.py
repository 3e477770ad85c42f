"""A network that has tensors under two names, and the same network with each of them registered once.

Both draw the same initial weights, and the state dict of the second has exactly the first names of the first.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class _OnlyBias(nn.Module):
    """The rest of a layer whose weight is another layer's."""

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.bias = layer.bias


class Tied(nn.Module):
    """Two convolutions with one weight, one normalisation in two places, two linear layers with one weight."""

    def __init__(self, in_channels: int, image_size: tuple[int, int], num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 4, 1)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.again_norm = self.norm
        self.a = nn.Linear(4 * image_size[0] * image_size[1], 4 * image_size[0] * image_size[1])
        self.b = nn.Linear(self.a.in_features, self.a.out_features)
        self.classifier = nn.Linear(self.a.out_features, num_classes)
        self.tie()

    def tie(self) -> None:
        self.again.weight = self.conv.weight
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(self.stem(x))).relu()
        x = self.again_norm(self.again(x)).relu().flatten(1)
        x = self.b(self.a(x).relu()).relu()
        logits: Tensor = self.classifier(x)
        return logits


class Once(Tied):
    """The same function of the same weights, none of which has two names."""

    def tie(self) -> None:
        del self.again_norm
        self.again, self.b = _OnlyBias(self.again), _OnlyBias(self.b)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(self.stem(x))).relu()
        x = functional.conv2d(x, self.conv.weight, self.again.bias, padding=1)
        x = self.norm(x).relu().flatten(1)
        x = functional.linear(self.a(x).relu(), self.a.weight, self.b.bias).relu()
        logits: Tensor = self.classifier(x)
        return logits


class TiedBuffers(Tied):
    """Two normalisations of their own with one running mean."""

    def tie(self) -> None:
        super().tie()
        self.again_norm = nn.BatchNorm2d(4)
        self.again_norm.running_mean = self.norm.running_mean


class Overlapping(Tied):
    """The second linear layer has the first one's weight turned around, as a view of its memory."""

    def tie(self) -> None:
        self.b.weight = nn.Parameter(self.a.weight.data.t())
