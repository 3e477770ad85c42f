"""Entries of the built-in models, with their options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from calfat_plugin.entries import ModelEntry
from calfat_plugin.options import NoOptions, option

_NETWORKS = "calfat_plugin.models.networks"  # not imported here: recipes are checked without torch


@dataclass(frozen=True)
class PaddingOptions:
    """Options of McMahan's network."""

    padding: int = option(
        0, low=0, high=64, help="padding of its 5x5 convolutions; 2 is McMahan's MNIST network", unit="pixels"
    )


def _norm_option(default: str) -> Any:
    return option(
        default,
        choices=("none", "batch", "fixbn", "group"),
        help="normalisation: batch; fixbn, which is batch with fixed statistics in the second half of the rounds; or "
        "groups of eight channels",
    )


@dataclass(frozen=True)
class NormOptions:
    """Options of the plain networks, which normalise after every convolution."""

    norm: str = _norm_option("none")


@dataclass(frozen=True)
class ResidualOptions:
    """Options of the small residual network."""

    width: int = option(32, low=8, high=1024, help="channels of the first stage, a multiple of 8; later ones double it")
    blocks: int = option(2, low=1, high=64, help="residual blocks in each of three stages, of two convolutions each")
    first_stride: int = option(
        2, low=1, high=2, help="stride of the first convolution; 2 quarters the multiplications of every layer after it"
    )
    norm: str = _norm_option("batch")
    activation: str = option("relu", choices=("relu", "silu"), help="activation before every convolution but the first")


@dataclass(frozen=True)
class BatchNormOptions:
    """Options of VGG-8."""

    batch_norm: bool = option(True, help="batch normalisation after every convolution")


@dataclass(frozen=True)
class DropoutOptions:
    """Options of the AlexNet."""

    dropout: float = option(0.5, low=0, high=1, help="dropout before the hidden layers; always off in attacks")


def _model(name: str, network: str, summary: str, min_size: int, config: type = NoOptions) -> ModelEntry:
    build = f"{_NETWORKS}:{network}"
    return ModelEntry(name, build=build, config=config, summary=summary, min_size=lambda options: min_size)


def _min_size_of_mcmahan(options: PaddingOptions) -> int:
    """Twice a 5x5 convolution and a halving, which leave one pixel at least."""
    side = 1
    for _ in range(2):
        side = max(1, 2 * side + 4 - 2 * options.padding)
    return side


ENTRIES = (
    _model("cnn", "CNN", "three 3x3 convolutions of 128 channels, of the CalFAT release; from 18x18", 18, NormOptions),
    _model("cnn_small", "CNNSmall", "small padded 3x3 convolutions for images such as digits", 4, NormOptions),
    _model("cnn_strided", "CNNStrided", "3x3 convolutions of stride 2, cheap, for 28x28 images", 1, NormOptions),
    ModelEntry(
        "cnn_mcmahan",
        build=f"{_NETWORKS}:CNNMcMahan",
        config=PaddingOptions,
        summary="two 5x5 convolutions and a hidden layer of 512",
        min_size=_min_size_of_mcmahan,
    ),
    _model(
        "preact_resnet",
        "PreActResNet",
        "small residual network, about as many multiplications as cnn",
        1,
        ResidualOptions,
    ),
    _model("vgg8", "VGG8", "five 3x3 convolutions, 64 to 512 channels", 8, BatchNormOptions),
    _model("resnet18", "ResNet18", "ResNet-18 for 32x32 images", 1),
    _model("alexnet64", "AlexNet64", "torchvision's AlexNet on 64x64 images", 63, DropoutOptions),
)
