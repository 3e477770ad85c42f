"""Fast passes through a model: the memory layout of its weights, how many examples go through it at once, memory that
is used again, and the arithmetic: float32, TensorFloat-32 or bfloat16.

Layout and cut change a result in its last bits at most. They follow from the recipe, the model, the shape of the
images, the device and the number of threads alone, never from a measurement of time: the same run makes the same
choices everywhere. But where this processor crashes in the fast layout, the other is taken (``layouts``). The
arithmetic is the recipe's, and only of passes in training: weights, updates and evaluation stay in float32.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from calfat_plugin.layouts import CHANNELS_LAST, layout_of
from calfat_plugin.maths.attacks import attack_mode

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS = (*get_args(Precision), "auto")  #: of ``calfat.runtime.precision``

_CACHE_BYTES = 16 * 2**20  # of the largest map of a micro-batch and a thread: larger ones go to memory and back
_KEPT_BYTES = 2**30  # of freed memory at most; larger buffers go back to the system
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  #: of mallopt: <malloc.h>
PROBED = 2  #: examples that suffice for the trial pass; the layout of a single one would be ambiguous


# --- layout, micro-batches and memory ---------------------------------------------------------------------------------


@contextmanager
def fast_passes(model: nn.Module, x: Tensor) -> Iterator[int]:
    """Keep the weights of convolutions channels last while inside; every tensor is laid out as before on leaving.

    Convolutions then compute in that layout, whatever the layout of their input, and poolings are several times faster
    in it. The weights stay as they are where the recipe, or a trial of this processor, says contiguous. A model that
    fails in it (``Tensor.view`` on a map) keeps its own: the first ``PROBED`` images are tried.
    Parameters stay the same objects, so that an optimiser may be made inside or outside.

    Yields how many examples to pass through at once where each passes many times: on a CPU as many as keep the
    largest map in the cache; on a GPU any number is right, so it is as large as can be.
    """
    import torch  # here, not above: recipes are checked without torch

    keep_freed_memory()
    moved: list[nn.Parameter] = []
    if layout_of(model, x[:PROBED]) == CHANNELS_LAST:
        for weight in model.parameters():
            # A weight that was made in inference mode has no version counter, which its new memory would need.
            if weight.dim() == 4 and weight.is_contiguous() and not weight.is_inference():
                moved.append(weight)
    try:
        for weight in moved:
            _, channels, height, width = weight.shape
            # Written out: where one input channel leaves the strides open, torch would read them as channels first.
            strides = (channels * height * width, 1, channels * width, channels)
            weight.data = weight.data.new_empty_strided(weight.shape, strides).copy_(weight.data)
        largest = _largest_map(model, x[:PROBED])
        if largest is None:
            _restore(moved)
            largest = _largest_map(model, x[:PROBED])
        rows = sys.maxsize
        if largest and x.device.type == "cpu":
            rows = max(1, torch.get_num_threads() * _CACHE_BYTES // largest)
        yield rows
    finally:
        _restore(moved)


def micro_batches(count: int, rows: int) -> list[slice]:
    """Cut 0 .. count into the fewest slices of at most ``rows`` each, as even as can be; none where count is 0."""
    if count == 0:
        return []
    parts = math.ceil(count / rows)
    slices = []
    for part in range(parts):
        slices.append(slice(count * part // parts, count * (part + 1) // parts))
    return slices


def passed(model: nn.Module, x: Tensor, rows: int) -> Tensor:
    """The logits of x, (N, C), from passes of at most ``rows`` examples each; differentiable as in one pass."""
    import torch

    logits: list[Tensor] = [model(x[part]) for part in micro_batches(len(x), rows)]
    if len(logits) == 1:
        return logits[0]
    return torch.cat(logits)


@cache
def keep_freed_memory() -> None:
    """Let the C library keep what is freed for the next pass, which else pays a page fault for every 4 KB."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc has it; other C libraries have no such setting
        mallopt(TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(MMAP_THRESHOLD, _KEPT_BYTES)


def _restore(weights: list[nn.Parameter]) -> None:
    for weight in weights:
        weight.data = weight.data.new_empty(weight.shape).copy_(weight.data)


def _largest_map(model: nn.Module, x: Tensor) -> int | None:
    """Bytes an example of the largest output of a module; None: the pass failed, in whatever way."""
    import torch

    sizes = [0]

    def note(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            sizes.append(output.nbytes // len(x))

    hooks = []
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks: its maps do not count
            hooks.append(module.register_forward_hook(note))
    devices = []
    if x.device.type == "cuda":
        devices = [x.device]
    try:
        with attack_mode(model), torch.no_grad(), torch.random.fork_rng(devices=devices):
            model(x.clone())  # a network that changes its input must not reach the caller's
    except Exception:  # somebody else's model may fail in any way; the pass that counts says how
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return max(sizes)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def chosen_precision(choice: str, device: torch.device) -> Precision:
    """What one of :data:`PRECISIONS` means on this device.

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
