"""The base of all classifiers: pixels in, one flat feature vector, one last linear layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from calfat_plugin.errors import ModelError
from calfat_plugin.models.dual_norm import DualNorm
from calfat_plugin.models.fix_norm import FixBatchNorm2d

_Window = nn.Conv2d | nn.MaxPool2d


class ImageClassifier(nn.Module):
    """Abstract base: a subclass builds ``body`` and ``classifier`` and passes them to ``__init__``.

    A method may replace ``classifier``, the last linear layer (a cosine classifier, say); forward
    is always ``classifier(features(x))``. Nothing here depends on the memory layout of x.
    """

    def __init__(self, body: nn.Module, classifier: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.classifier: nn.Module = classifier

    def features(self, x: Tensor) -> Tensor:
        """x: (N, C, H, W) float in [0, 1]. Returns the penultimate features, (N, F)."""
        height, width = effective_input(self.body, (x.shape[-2], x.shape[-1]))
        out: Tensor = self.body(x[..., :height, :width])
        return out.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, C, H, W) float in [0, 1]. Returns logits, (N, num_classes)."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


def conv_block(*layers: nn.Module, pool: nn.Module | None = None) -> list[nn.Module]:
    """``layers``, pooling, ReLU.

    Values and gradients are those of ReLU before max-pooling, for a quarter of the work.
    """
    block = list(layers)
    if pool is not None:
        block.append(pool)
    block.append(nn.ReLU(inplace=True))
    return block


def norm_layers(norm: str, channels: int) -> list[nn.Module]:
    """The normalisation of a map: ``none``, ``batch``, ``fixbn``, or ``group`` (Wu and He 2018), in groups of eight."""
    if norm == "batch":
        return [nn.BatchNorm2d(channels)]
    if norm == "fixbn":
        return [FixBatchNorm2d(channels)]
    if norm == "group":
        return [nn.GroupNorm(channels // 8, channels)]
    return []


def flat_size(layers: Sequence[nn.Module], channels: int, image_size: tuple[int, int], model: str) -> int:
    """Length of the flattened last map of ``layers``; only convolutions and max-poolings change the map's size."""
    height = _map_size(image_size[0], layers)
    width = _map_size(image_size[1], layers)
    if height < 1 or width < 1:
        smallest = next(side for side in count(1) if _map_size(side, layers) >= 1)
        raise ModelError(
            f"model {model}: images of {image_size[0]}x{image_size[1]} are too small; "
            f"the smallest that it can take is {smallest}x{smallest}."
        )
    return channels * height * width


def _map_size(side: int, layers: Sequence[nn.Module]) -> int:
    """Side of the last map for an image of ``side`` pixels; 0 or less where a layer has no room."""
    for layer in layers:
        if isinstance(layer, _Window):
            kernel = int(_along(layer.kernel_size, 0))
            stride = int(_along(layer.stride, 0))
            padding = int(_along(layer.padding, 0))
            if side + 2 * padding < kernel:
                return 0
            side = (side + 2 * padding - kernel) // stride + 1
    return side


def effective_input(body: nn.Module, image_size: tuple[int, int]) -> tuple[int, int]:
    """(H, W) of the upper left part of an image that the features depend on; the rest need not be computed.

    A 2x2 pooling of 13 rows ignores the last row, and so all pixels that only this row needs. ``cnn`` ignores the last
    2 rows and columns of a 32x32 image; leaving them out saves a seventh of all operations.

    The result is the whole image unless ``body``, up to its end or a flattening, has only unpadded convolutions,
    max-poolings, and layers that take each pixel by itself. Normalisation in training mode does not: its statistics are
    those of whole maps.
    """
    windows: list[_Window] = []
    for layer in _layers(body):
        if isinstance(layer, nn.Flatten):
            break
        if isinstance(layer, _Window) and _is_plain(layer):
            windows.append(layer)
        elif not _by_pixel(layer):
            return image_size
    return _effective_side(image_size[0], windows, 0), _effective_side(image_size[1], windows, 1)


def _is_plain(layer: _Window) -> bool:
    """Whether a window has no padding and no dilation, and drops the rows that do not fill one."""
    if isinstance(layer, nn.MaxPool2d) and layer.ceil_mode:
        return False
    return all(_along(layer.padding, axis) == 0 and _along(layer.dilation, axis) == 1 for axis in (0, 1))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of a sequence, also of sequences within it, in order; any other module is one layer."""
    if isinstance(module, nn.Sequential):
        for child in module:
            yield from _layers(child)
    else:
        yield module


def _by_pixel(layer: nn.Module) -> bool:
    """Whether no pixel of the layer's map depends on another: ReLU, and normalisation by fixed statistics."""
    if isinstance(layer, _BatchNorm):
        return not layer.training and layer.running_mean is not None
    if isinstance(layer, DualNorm):
        return _by_pixel(layer.clean) and _by_pixel(layer.noise)
    return isinstance(layer, nn.ReLU)


def _effective_side(side: int, windows: list[_Window], axis: int) -> int:
    """How much of a side of an image the last map depends on; all of it if the image is too small for the windows."""
    sizes = [(int(_along(layer.kernel_size, axis)), int(_along(layer.stride, axis))) for layer in windows]
    length = side
    for kernel, stride in sizes:  # forward: the side of the last map
        if length < kernel:
            return side
        length = (length - kernel) // stride + 1
    for kernel, stride in reversed(sizes):  # backward: the pixels that it needs
        length = (length - 1) * stride + kernel
    return length


def _along(value: int | tuple[int, ...] | str, axis: int) -> int | str:
    """One axis of an option of a layer, which may be one number for both axes, or a word."""
    if isinstance(value, int):
        return value
    return value[axis]
