"""The deeper networks: VGG-8, ResNet-18 and an AlexNet."""

from __future__ import annotations

from torch import Tensor, nn

from calfat_plugin.models.base import ImageClassifier, conv_block, flat_size
from calfat_plugin.models.convolutions import PixelConv2d


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
            pool = nn.MaxPool2d(2) if position < 3 else None
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
