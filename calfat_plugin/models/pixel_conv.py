"""A model's first convolution: few input channels, whose gradient CPU kernels compute at a fraction of their rate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PixelConv2d(nn.Conv2d):
    """A convolution of pixels: ``nn.Conv2d`` in all but the time that the gradient of its input takes on a CPU.

    CPU kernels work on blocks of 16 channels, of which a gradient with respect to 1 or 3 channels leaves most empty.
    Where only that gradient is wanted, as in an attack, it is a product with all of the kernel's columns (27 for three
    channels of 3x3) and a fold of those into the image.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) to (N, out_channels, H', W')."""
        frozen = not any(parameter.requires_grad for parameter in self.parameters(recurse=False))
        if frozen and x.requires_grad and torch.is_grad_enabled() and x.device.type == "cpu" and x.dim() == 4:
            inputs = (x, self.weight, self.bias, self.stride, self.padding)
            out: Tensor = _Folded.apply(*inputs)  # type: ignore[no-untyped-call]
            return out
        return super().forward(x)


class _Folded(torch.autograd.Function):
    """conv2d whose only gradient is that of its input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any) -> Tensor:
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(weight)
        ctx.size, ctx.dtype = x.shape[2:], x.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        kernel = weight.flatten(1).t()[:, :, None, None].to(grad.dtype)  # a 1x1 convolution is the fastest product here
        columns = F.conv2d(grad, kernel).to(ctx.dtype).contiguous().flatten(2)
        image = F.fold(columns, ctx.size, weight.shape[2:], stride=ctx.stride, padding=ctx.padding)
        return image, None, None, None, None
