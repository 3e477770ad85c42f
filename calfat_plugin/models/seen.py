"""Which part of an image a network sees: what unpadded poolings leave out need not be computed."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from calfat_plugin.models.dual_norm import DualNorm

_Window = nn.Conv2d | nn.MaxPool2d


def seen_size(body: nn.Module, image_size: tuple[int, int]) -> tuple[int, int]:
    """(H, W) of the upper left part of an image that the features depend on.

    A 2x2 pooling leaves the last row of 13 out, and what only that row needs changes nothing. In ``cnn`` the last 2
    rows and columns of a 32x32 image are such, and with them a seventh of all operations.

    Args:
        body: as in :class:`~calfat_plugin.models.base.ImageClassifier`. Unless it has only unpadded convolutions,
            unpadded max-poolings, and layers that take each pixel by itself, up to its end or a flattening, all of the
            image counts: in training mode normalisation, for one, takes its statistics over whole maps.
        image_size: (H, W) in pixels.
    """
    windows: list[_Window] = []
    for layer in _layers(body):
        if isinstance(layer, nn.Flatten):
            break
        if isinstance(layer, _Window) and _unpadded(layer):
            windows.append(layer)
        elif not _by_pixel(layer):
            return image_size
    height, width = (_seen_side(side, windows, axis) for axis, side in enumerate(image_size))
    return height, width


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Of a network in sequence, in order; what is none is one layer."""
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


def _unpadded(layer: _Window) -> bool:
    """Whether all of the layer's windows lie inside its map, without gaps."""
    plain = all(_along(layer.padding, axis) == 0 and _along(layer.dilation, axis) == 1 for axis in (0, 1))
    return plain and not (isinstance(layer, nn.MaxPool2d) and layer.ceil_mode)


def _seen_side(side: int, windows: list[_Window], axis: int) -> int:
    """Of one axis; all of it where it has no room for the windows."""
    sizes = [(int(_along(layer.kernel_size, axis)), int(_along(layer.stride, axis))) for layer in windows]
    seen = side
    for kernel, stride in sizes:
        if seen < kernel:
            return side
        seen = (seen - kernel) // stride + 1
    for kernel, stride in reversed(sizes):
        seen = (seen - 1) * stride + kernel
    return seen


def _along(value: int | tuple[int, ...] | str, axis: int) -> int | str:
    """One axis of an option of a layer, which may be one number for both, or a word."""
    return value if isinstance(value, int) else value[axis]
