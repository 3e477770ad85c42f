"""The built-in networks; and a network that is linear in its weights (Fed-LAT)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

from calfat_plugin.errors import ModelError
from calfat_plugin.models.base import ImageClassifier, PixelConv2d, UnpaddedConv2d, conv_block, flat_size, norm_layers

_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU}


# --- plain convolutional networks -------------------------------------------------------------------------------------


class CNN(ImageClassifier):
    """The network of the CalFAT release: three unpadded 3x3 convolutions of 128 channels; from 18x18 pixels."""

    def __init__(
        self, in_channels: int = 3, image_size: tuple[int, int] = (32, 32), num_classes: int = 10, *, norm: str = "none"
    ) -> None:
        layers = [
            *conv_block(PixelConv2d(in_channels, 128, 3), *norm_layers(norm, 128), pool=nn.MaxPool2d(2)),
            *conv_block(UnpaddedConv2d(128, 128, 3), *norm_layers(norm, 128), pool=nn.MaxPool2d(2)),
            *conv_block(UnpaddedConv2d(128, 128, 3), *norm_layers(norm, 128)),
        ]
        size = flat_size(layers, 128, image_size, "cnn")
        super().__init__(nn.Sequential(*layers), nn.Linear(size, num_classes))


class CNNMcMahan(ImageClassifier):
    """Two 5x5 convolutions and a hidden layer of 512, after McMahan et al. 2017, section 3.

    Their MNIST network pads by 2 (1,663,370 parameters for 1x28x28); for 3x32x32 without padding
    there are 878,538. Smallest image without padding: 16x16.
    """

    def __init__(
        self, in_channels: int = 3, image_size: tuple[int, int] = (32, 32), num_classes: int = 10, *, padding: int = 0
    ) -> None:
        convs = [
            *conv_block(PixelConv2d(in_channels, 32, 5, padding=padding), pool=nn.MaxPool2d(2)),
            *conv_block(nn.Conv2d(32, 64, 5, padding=padding), pool=nn.MaxPool2d(2)),
        ]
        size = flat_size(convs, 64, image_size, "cnn_mcmahan")
        body = nn.Sequential(*convs, nn.Flatten(), nn.Linear(size, 512), nn.ReLU(inplace=True))
        super().__init__(body, nn.Linear(512, num_classes))


class CNNSmall(ImageClassifier):
    """Three padded 3x3 convolutions (32, 32, 64) for small images such as the 8x8 digits; from 4x4 pixels."""

    def __init__(
        self, in_channels: int = 1, image_size: tuple[int, int] = (8, 8), num_classes: int = 10, *, norm: str = "none"
    ) -> None:
        layers = [
            *conv_block(PixelConv2d(in_channels, 32, 3, padding=1), *norm_layers(norm, 32)),
            *conv_block(nn.Conv2d(32, 32, 3, padding=1), *norm_layers(norm, 32), pool=nn.MaxPool2d(2)),
            *conv_block(nn.Conv2d(32, 64, 3, padding=1), *norm_layers(norm, 64), pool=nn.MaxPool2d(2)),
        ]
        size = flat_size(layers, 64, image_size, "cnn_small")
        super().__init__(nn.Sequential(*layers), nn.Linear(size, num_classes))


class CNNStrided(ImageClassifier):
    """Three padded 3x3 convolutions (16, 32, 64) of stride 2, a thirtieth of the multiplications of ``cnn``."""

    def __init__(
        self, in_channels: int = 1, image_size: tuple[int, int] = (28, 28), num_classes: int = 10, *, norm: str = "none"
    ) -> None:
        layers = [
            *conv_block(PixelConv2d(in_channels, 16, 3, stride=2, padding=1), *norm_layers(norm, 16)),
            *conv_block(nn.Conv2d(16, 32, 3, stride=2, padding=1), *norm_layers(norm, 32)),
            *conv_block(nn.Conv2d(32, 64, 3, stride=2, padding=1), *norm_layers(norm, 64)),
        ]
        size = flat_size(layers, 64, image_size, "cnn_strided")
        super().__init__(nn.Sequential(*layers), nn.Linear(size, num_classes))


# --- residual networks ------------------------------------------------------------------------------------------------


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
                stride = 1
                if stage > 0 and block == 0:
                    stride = 2
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
            pooling: nn.Module = nn.Identity()
            if stride > 1:
                pooling = nn.AvgPool2d(stride, ceil_mode=True)
            self.shortcut = nn.Sequential(pooling, nn.Conv2d(inward, outward, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(N, inward, H, W) to (N, outward, ceil(H / stride), ceil(W / stride))."""
        entered = self.enter(x)
        shortcut = x
        if self.shortcut is not None:
            shortcut = self.shortcut(entered)
        out: Tensor = self.residual(entered) + shortcut
        return out


# --- the larger networks of papers ------------------------------------------------------------------------------------


class VGG8(ImageClassifier):
    """VGG-8 of Tian et al. 2020, as CalFAT defines none: five padded 3x3 convolutions, 64 to 512, then the mean."""

    def __init__(
        self,
        in_channels: int = 3,
        image_size: tuple[int, int] = (32, 32),
        num_classes: int = 10,
        *,
        batch_norm: bool = True,
    ) -> None:
        layers: list[nn.Module] = []
        widths = (64, 128, 256, 512, 512)
        for position, (inward, outward) in enumerate(zip((in_channels, *widths), widths, strict=False)):
            if position == 0:
                convolution: list[nn.Module] = [PixelConv2d(inward, outward, 3, padding=1)]
            else:
                convolution = [nn.Conv2d(inward, outward, 3, padding=1)]
            if batch_norm:
                convolution.append(nn.BatchNorm2d(outward))
            pool = None
            if position < 3:
                pool = nn.MaxPool2d(2)
            layers += conv_block(*convolution, pool=pool)
        flat_size(layers, widths[-1], image_size, "vgg8")  # for its error: the mean takes any size
        body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        super().__init__(body, nn.Linear(widths[-1], num_classes))


class ResNet18(ImageClassifier):
    """ResNet-18 (He et al. 2016) for CIFAR: a 3x3 stem without pooling, then 2 basic blocks at 64, 128, 256, 512."""

    def __init__(self, in_channels: int = 3, image_size: tuple[int, int] = (32, 32), num_classes: int = 10) -> None:
        layers: list[nn.Module] = [
            PixelConv2d(in_channels, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
        ]
        channels = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers += [BasicBlock(channels, width, stride), BasicBlock(width, width, 1)]
            channels = width
        body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        super().__init__(body, nn.Linear(channels, num_classes))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where shapes differ."""

    def __init__(self, inward: int, outward: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inward, outward, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outward),
            nn.ReLU(inplace=True),
            nn.Conv2d(outward, outward, 3, padding=1, bias=False),
            nn.BatchNorm2d(outward),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inward != outward:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inward, outward, 1, stride=stride, bias=False), nn.BatchNorm2d(outward)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(N, inward, H, W) to (N, outward, ceil(H / stride), ceil(W / stride))."""
        out: Tensor = self.residual(x) + self.shortcut(x)
        return out.relu_()


class AlexNet64(ImageClassifier):
    """torchvision's AlexNet (Krizhevsky 2014) on 64x64 images, whose last map of 1x1 its pooling to 6x6 repeats."""

    def __init__(
        self,
        in_channels: int = 3,
        image_size: tuple[int, int] = (64, 64),
        num_classes: int = 10,
        *,
        dropout: float = 0.5,
    ) -> None:
        convs = [
            *conv_block(PixelConv2d(in_channels, 64, 11, 4, 2), pool=nn.MaxPool2d(3, 2)),
            *conv_block(nn.Conv2d(64, 192, 5, padding=2), pool=nn.MaxPool2d(3, 2)),
            *conv_block(nn.Conv2d(192, 384, 3, padding=1)),
            *conv_block(nn.Conv2d(384, 256, 3, padding=1)),
            *conv_block(nn.Conv2d(256, 256, 3, padding=1), pool=nn.MaxPool2d(3, 2)),
        ]
        flat_size(convs, 256, image_size, "alexnet64")  # for its error: the pooling takes any size
        body = nn.Sequential(
            *convs,
            nn.AdaptiveAvgPool2d(6),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
        )
        super().__init__(body, nn.Linear(4096, num_classes))


# --- a network that is linear in its weights --------------------------------------------------------------------------


class Linearised(nn.Module):
    """f(x; w0) + J_w f(x; w0) (w - w0) once :meth:`linearise` was called; the network itself, f(x; w), before.

    The state dict has all that this depends on: w as ``network.*``, w0 as ``origin.*``, and which of the two it is. The
    network at w0 is always in evaluation mode: its statistics are those at w0, and it drops nothing out.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.origin = deepcopy(network).requires_grad_(False).eval()
        self.linear = False

    @property
    def passes(self) -> int:
        """What a pass costs in passes of the network: a jvp takes w0 x, w0 x' and (w - w0) x in each layer."""
        if self.linear:
            return 3
        return 1

    def linearise(self) -> None:
        """Take the present weights for w0: the logits are at first those of the network in evaluation mode."""
        self.origin.load_state_dict(self.network.state_dict())
        self.linear = True

    def train(self, mode: bool = True) -> Linearised:
        super().train(mode)
        self.origin.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) pixels to (N, num_classes) logits, differentiable in x and w, not in w0."""
        if not self.linear:
            logits: Tensor = self.network(x)
            return logits
        origin = _parameters(self.origin)
        change = {name: weight - origin[name] for name, weight in _parameters(self.network).items()}

        def logits_at(weights: dict[str, Tensor]) -> Tensor:
            # With tie_weights torch would leave the weights of this call in a layer that is in two places.
            logits: Tensor = functional_call(self.origin, weights, (x,), tie_weights=False)
            return logits

        with torch.autocast(x.device.type, enabled=False):  # it gives group normalisation's derivative another type
            both = jvp(logits_at, (origin,), (change,))
        expansion: Tensor = both[0] + both[1]  # the logits at the origin, and their slope
        return expansion

    def get_extra_state(self) -> Tensor:
        """``linear`` as a tensor, which checkpoints and messages hold and aggregators average."""
        return torch.tensor(int(self.linear))

    def set_extra_state(self, state: Tensor) -> None:
        self.linear = bool(state)


def _parameters(network: nn.Module) -> dict[str, Tensor]:
    """All parameters of all layers; a parameter of two layers has both names."""
    parameters: dict[str, Tensor] = {}
    for layer, module in network.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full_name = f"{layer}.{name}".removeprefix(".")  # the network itself has an empty name
            parameters[full_name] = parameter
    return parameters
