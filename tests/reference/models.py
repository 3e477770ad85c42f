"""A small model with batch normalisation, which the reference federation and the package both train."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import functional_call


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


class Expanded(nn.Module):
    """f(x; w), and once it has a w0: f(x; w0) + df(x; w0)/dw (w - w0), by dual numbers [5.8]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.origin, self.linear = network, copy.deepcopy(network), 0
        for weight in self.origin.parameters():
            weight.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) to (N, num_classes)."""
        if not self.linear:
            found: Tensor = self.network(x)
            return found
        self.origin.eval()
        with dual_level():
            pairs = zip(self.origin.named_parameters(), self.network.parameters(), strict=True)
            dual = {name: make_dual(w0, w - w0) for (name, w0), w in pairs}
            value, slope = unpack_dual(functional_call(self.origin, dual, (x,)))
        logits: Tensor = value + slope
        return logits

    def get_extra_state(self) -> Tensor:
        """In the state dict."""
        return torch.tensor(self.linear)

    def set_extra_state(self, state: Tensor) -> None:
        """From it."""
        self.linear = int(state)
