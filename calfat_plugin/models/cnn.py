"""The plain convolutional networks, without dropout; most can have normalisation."""

from __future__ import annotations

from torch import nn

from calfat_plugin.models.base import ImageClassifier, conv_block, flat_size, norm_layers
from calfat_plugin.models.convolutions import PixelConv2d, UnpaddedConv2d


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
