"""The plain convolutional networks, without dropout; most can have normalisation."""

from __future__ import annotations

from torch import nn

from calfat_plugin.models.base import ImageClassifier, conv_block, flat_size, norm_layers
from calfat_plugin.models.convolutions import PixelConv2d, UnpaddedConv2d


class CNN(ImageClassifier):
    """The network of the CalFAT release: three 3x3 convolutions of 128 channels, unpadded.

    319,242 parameters for 3x32x32 and 10 classes, 320,010 with normalisation. Smallest image: 18x18.
    """

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
    """Three padded 3x3 convolutions (32, 32, 64) for small images such as the 8x8 digits.

    30,634 parameters for 1x8x8 and 10 classes, 30,890 with normalisation. Smallest image: 4x4.
    """

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
    """Three padded 3x3 convolutions (16, 32, 64) of stride 2: cheap enough to train robustly on a CPU.

    Some 0.56 million multiplications for a 1x28x28 image, a thirtieth of ``cnn``'s. 33,546 parameters for 10 classes,
    33,770 with normalisation. Takes any image size.
    """

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
