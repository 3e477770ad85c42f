"""A small model with batch normalisation, which the reference federation and the package both train."""

from __future__ import annotations

from torch import Tensor, nn


class Tiny(nn.Module):
    """Two normalised convolutions and a linear layer; parameters, running statistics and a batch counter to average."""

    def __init__(self, in_channels: int, image_size: tuple[int, int], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(6 * (image_size[0] // 4) * (image_size[1] // 4), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) to (N, num_classes)."""
        logits: Tensor = self.classifier(self.body(x))
        return logits
