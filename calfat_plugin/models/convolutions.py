"""Convolutions that give an attack the gradient of their input in less time on a CPU; else they are ``nn.Conv2d``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

_COLUMNS = 16  # of a vector: a product whose result has a broken one at the end of each row takes half as long again
_PADDED_WIDTHS = frozenset({8, 12, 14, 15, 20, 24})


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
