"""The arithmetic of training: float32, TensorFloat-32 or bfloat16. Weights, updates and evaluation stay in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "tf32", "bf16"]
CHOICES = (*get_args(Precision), "auto")


def chosen(wanted: str, device: torch.device) -> Precision:
    """What ``wanted`` means on this device: ``auto`` is bf16 where it has units for it (else emulated), or fp32."""
    if wanted == "auto":
        return "bf16" if has_bf16_units(device) else "fp32"
    return cast("Precision", wanted)


def has_bf16_units(device: torch.device) -> bool:
    """Whether the card, or the processor (AVX512_BF16 or AMX_BF16), multiplies bfloat16 by itself."""
    import torch  # here, not above: recipes are checked without torch

    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere
    units = torch.cpu.get_capabilities()
    return device.type == "cpu" and any(units.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


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
