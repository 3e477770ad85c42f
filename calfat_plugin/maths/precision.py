"""The arithmetic of training: float32, TensorFloat-32 or bfloat16. Weights, updates and evaluation stay in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "tf32", "bf16"]
CHOICES = (*get_args(Precision), "auto")


def chosen(choice: str, device: torch.device) -> Precision:
    """What one of :data:`CHOICES` means on this device.

    ``auto`` is bf16 where the device has units for it, else fp32: an emulated bf16 is slower.
    """
    if choice != "auto":
        return cast("Precision", choice)
    if has_bf16_units(device):
        return "bf16"
    return "fp32"


def has_bf16_units(device: torch.device) -> bool:
    """Whether the card, or the processor (AVX512_BF16 or AMX_BF16), multiplies bfloat16 by itself."""
    import torch  # here, not above: recipes are checked without torch

    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere
    if device.type != "cpu":
        return False
    units = torch.cpu.get_capabilities()
    return bool(units.get("avx512_bf16", False) or units.get("amx_bf16", False))


def passes_in(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts for forward passes and losses: in bf16, layers compute in it and losses in float32."""
    import torch

    if precision != "bf16":
        return nullcontext
    return lambda: torch.autocast(device.type, torch.bfloat16)


@contextmanager
def float32_as(precision: Precision, device: torch.device) -> Iterator[None]:
    """How a card multiplies float32 while inside: as TensorFloat-32 in ``tf32``, else in full. A CPU has no choice."""
    import torch

    if device.type != "cuda":
        yield
        return
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = precision == "tf32"
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value
