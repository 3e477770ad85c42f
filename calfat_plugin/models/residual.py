"""A small residual network for adversarial training on CPUs, with the usual normalisations and activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from calfat_plugin.errors import ModelError
from calfat_plugin.models.base import ImageClassifier, norm_layers
from calfat_plugin.models.convolutions import PixelConv2d

_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU}


class PreActResNet(ImageClassifier):
    """A residual network with the activation before each convolution (He et al. 2016, "Identity Mappings", figure 4e).

    Three stages of ``blocks`` blocks with ``width``, 2 ``width`` and 4 ``width`` channels; each later stage halves the
    map. With the defaults it takes 27 million multiplications for an image of 3x32x32, about as many as ``cnn``.

    Args:
        width: channels of the first stage, a multiple of 8.
        blocks: residual blocks in a stage, of two convolutions each.
        first_stride: stride of the first convolution; with 2 the maps of all stages have half the side, so that twice
            the width costs the same.
        norm: ``none``, ``batch``, ``fixbn`` or ``group``.
        activation: ``relu`` or ``silu``.

    Raises:
        ModelError: ``width`` is no multiple of 8.
    """

    def __init__(
        self,
        in_channels: int = 3,
        image_size: tuple[int, int] = (32, 32),
        num_classes: int = 10,
        *,
        width: int = 32,
        blocks: int = 2,
        first_stride: int = 2,
        norm: str = "batch",
        activation: str = "relu",
    ) -> None:
        if width % 8:
            raise ModelError(f"model preact_resnet: width {width} is no multiple of 8, the channels of a group.")
        layers: list[nn.Module] = [PixelConv2d(in_channels, width, 3, stride=first_stride, padding=1)]
        channels = width
        for stage, outward in enumerate((width, 2 * width, 4 * width)):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(PreActBlock(channels, outward, stride, norm, activation))
                channels = outward
        layers += [*norm_layers(norm, channels), _ACTIVATIONS[activation](), nn.AdaptiveAvgPool2d(1)]
        super().__init__(nn.Sequential(*layers), nn.Linear(channels, num_classes))


class PreActBlock(nn.Module):
    """Normalisation, activation, convolution, twice, beside a shortcut.

    Where the shape changes, the shortcut is a mean over 2x2 pixels and a 1x1 convolution, which loses no pixel; a 1x1
    convolution of stride 2 would drop three of four. Without normalisation the second convolution begins at zero, so
    that a deep network begins as its shortcuts (Zhang et al. 2019, Fixup).
    """

    def __init__(self, inward: int, outward: int, stride: int, norm: str, activation: str) -> None:
        super().__init__()
        activate = _ACTIVATIONS[activation]
        self.enter = nn.Sequential(*norm_layers(norm, inward), activate())
        second = nn.Conv2d(outward, outward, 3, padding=1)
        if norm == "none":
            nn.init.zeros_(second.weight)
        self.residual = nn.Sequential(
            nn.Conv2d(inward, outward, 3, stride=stride, padding=1),
            *norm_layers(norm, outward),
            activate(),
            second,
        )
        self.shortcut: nn.Module | None = None
        if stride != 1 or inward != outward:
            pooling = nn.AvgPool2d(stride, ceil_mode=True) if stride > 1 else nn.Identity()
            self.shortcut = nn.Sequential(pooling, nn.Conv2d(inward, outward, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(N, inward, H, W) to (N, outward, ceil(H / stride), ceil(W / stride))."""
        entered = self.enter(x)
        beside = x if self.shortcut is None else self.shortcut(entered)
        out: Tensor = self.residual(entered) + beside
        return out
