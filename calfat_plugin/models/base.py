"""What networks are made of: the base of all classifiers, and convolutions that are fast where they are attacked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn.modules.batchnorm import _BatchNorm

from calfat_plugin.errors import ModelError
from calfat_plugin.models.norms import DualNorm, FixBatchNorm2d

_Window = nn.Conv2d | nn.MaxPool2d
_COLUMNS = 16  # of a vector: a product whose result has a broken one at the end of each row takes half as long again
_PADDED_WIDTHS = frozenset({8, 12, 14, 15, 20, 24})


class ImageClassifier(nn.Module):
    """Abstract base: a subclass builds ``body`` and ``classifier`` and passes them to ``__init__``.

    A method may replace ``classifier``, the last linear layer (a cosine classifier, say); forward
    is always ``classifier(features(x))``. Nothing here depends on the memory layout of x.

    Attributes:
        gives_features: True: what goes into ``classifier`` is what ``TrainBatch`` calls features.
    """

    gives_features: ClassVar[bool] = True

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
        if isinstance(layer, _Window) and _drops_rows_only(layer):
            windows.append(layer)
        elif not _by_pixel(layer):
            return image_size
    return _effective_side(image_size[0], windows, 0), _effective_side(image_size[1], windows, 1)


def _drops_rows_only(layer: _Window) -> bool:
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
    sizes = []
    for window in windows:
        sizes.append((int(_along(window.kernel_size, axis)), int(_along(window.stride, axis))))
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


# --- convolutions that are attacked -----------------------------------------------------------------------------------


class AttackedConv2d(nn.Conv2d, ABC):
    """A convolution with its own way to the gradient of its input, where that alone is wanted: in attacks on a CPU."""

    def __init__(
        self, inward: int, outward: int, kernel_size: int, stride: int = 1, padding: int = 0, bias: bool = True
    ) -> None:
        super().__init__(inward, outward, kernel_size, stride, padding, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) to (N, out_channels, H', W')."""
        frozen = not any(parameter.requires_grad for parameter in self.parameters(recurse=False))
        frozen = frozen and unpack_dual(self.weight).tangent is None  # _Attacked has no derivative along the weights
        if frozen and x.requires_grad and torch.is_grad_enabled() and x.device.type == "cpu" and self.pays(x):
            out: Tensor = _Attacked.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
            return out
        return super().forward(x)

    def pays(self, x: Tensor) -> bool:
        """Whether :meth:`input_gradient` is faster than torch for this input."""
        return x.dim() == 4

    @abstractmethod
    def input_gradient(self, grad: Tensor, weight: Tensor, size: tuple[int, int]) -> Tensor:
        """The gradient of an input of ``size`` (H, W), from that of the output; both as ``nn.Conv2d`` takes them."""


class PixelConv2d(AttackedConv2d):
    """A model's first convolution, of 1 or 3 channels.

    CPU kernels work on blocks of 16 channels, of which a gradient with respect to 1 or 3 leaves most empty. Here it is
    a product with all of the kernel's columns (27 for three channels of 3x3) and a fold of those into the image.
    """

    def input_gradient(self, grad: Tensor, weight: Tensor, size: tuple[int, int]) -> Tensor:
        kernel = weight.flatten(1).t()
        columns = len(kernel)
        padded = F.pad(kernel, (0, 0, 0, -columns % _COLUMNS))[:, :, None, None]
        product = F.conv2d(grad, padded.to(grad.dtype))[:, :columns]  # a 1x1 convolution is the fastest product here
        product = product.to(weight.dtype).contiguous().flatten(2)
        padding = tuple(map(int, self.padding))  # numbers, not a word: see __init__
        return F.fold(product, size, weight.shape[2:], stride=self.stride, padding=padding)


class UnpaddedConv2d(AttackedConv2d):
    """A convolution without padding, of stride 1.

    The gradient of its input is a convolution padded by kernel - 1. For some widths oneDNN's AVX2 kernels take a
    quarter longer for padding that they have to imagine than for columns of zeros; the bits are the same.
    """

    def pays(self, x: Tensor) -> bool:
        return super().pays(x) and x.shape[3] in _PADDED_WIDTHS and torch.backends.cpu.get_cpu_capability() == "AVX2"

    def input_gradient(self, grad: Tensor, weight: Tensor, size: tuple[int, int]) -> Tensor:
        edge = weight.shape[3] - 1
        return F.conv_transpose2d(F.pad(grad, (edge, edge)), weight.to(grad.dtype), padding=(0, edge))


class _Attacked(torch.autograd.Function):
    """conv2d whose only gradient is that of its input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, conv: AttackedConv2d) -> Tensor:
        return F.conv2d(x, weight, bias, conv.stride, conv.padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.conv = inputs
        ctx.save_for_backward(weight)
        ctx.size, ctx.dtype = x.shape[2:], x.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return ctx.conv.input_gradient(grad, weight, ctx.size).to(ctx.dtype), None, None, None
