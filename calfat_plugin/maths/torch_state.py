"""Torch's switches, as they are in a new process, for as long as this package computes.

A notebook or a program may have changed them: mixed precision, no gradients, another default type or device. Numbers
must not depend on that, so every public function that computes, and every function that a host or a worker calls, is
inside :func:`fresh_torch_state`. It does not set the number of threads, which is up to the recipe or the caller, nor
the random generators, which ``federation/side_effects.py`` sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from calfat_plugin.errors import RunError

_DEVICES = ("cpu", "cuda")  # on which this package computes


@contextmanager
def fresh_torch_state() -> Iterator[None]:
    """Compute as in a new process; also a decorator. The caller's state is back on leaving, also after an error.

    Raises:
        RunError: inside ``torch.inference_mode()``, where tensors are made that can never be trained or attacked.
    """
    import torch  # here, not above: functions are decorated where recipes are checked without torch

    if torch.is_inference_mode_enabled():
        raise RunError(
            "this is inside torch.inference_mode(), whose tensors can neither be trained nor attacked. Call it outside "
            "of that block; torch.no_grad() is no problem."
        )
    with ExitStack() as state:
        state.enter_context(torch.enable_grad())
        state.enter_context(_without_autocast())
        state.enter_context(_default_dtype(torch.float32))
        state.enter_context(_without_deterministic_algorithms())
        state.enter_context(_switches_of_backends())
        if torch.get_default_device().type != "cpu":  # not always: it makes each call of torch slower
            state.enter_context(torch.device("cpu"))
        yield


@contextmanager
def _without_autocast() -> Iterator[None]:
    import torch

    enabled = {device: torch.is_autocast_enabled(device) for device in _DEVICES}
    cache_enabled = torch.is_autocast_cache_enabled()
    torch.autocast_increment_nesting()
    depth = torch.autocast_decrement_nesting()
    try:
        for device in _DEVICES:
            torch.set_autocast_enabled(device, False)
        torch.set_autocast_cache_enabled(True)
        # Torch forgets its copies of weights in another type when the outermost autocast ends. Inside the caller's
        # block, the one of `precision: bf16` would not be the outermost, and would go on with weights of earlier steps.
        for _ in range(depth):
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        yield
    finally:
        for _ in range(depth):
            torch.autocast_increment_nesting()
        torch.set_autocast_cache_enabled(cache_enabled)
        for device, value in enabled.items():
            torch.set_autocast_enabled(device, value)


@contextmanager
def _default_dtype(dtype: Any) -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _without_deterministic_algorithms() -> Iterator[None]:
    """They compute in another order, and some layers have none: our bits come from seeds and fixed orders."""
    import torch

    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(False)
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextmanager
def _switches_of_backends() -> Iterator[None]:
    """Which libraries multiply, and how precisely: ``calfat.runtime.precision`` decides on that."""
    import torch

    backends: Any = torch.backends  # whose types leave some of these out
    switches: list[tuple[Any, str, Any]] = [
        (backends.cudnn, "enabled", True),
        (backends.cudnn, "benchmark", False),
        (backends.cudnn, "deterministic", False),
        (backends.mkldnn, "enabled", True),
        (backends.mkldnn, "deterministic", False),
        (backends.cuda.matmul, "allow_fp16_accumulation", False),
        (backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", True),
        (backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", True),
    ]
    if hasattr(backends, "fp32_precision"):  # from torch 2.9 on; the outer ones first, which set those within
        switches += [
            (backends, "fp32_precision", "none"),
            (backends.mkldnn, "fp32_precision", "none"),
            (backends.mkldnn.matmul, "fp32_precision", "none"),
            (backends.mkldnn.conv, "fp32_precision", "none"),
            (backends.mkldnn.rnn, "fp32_precision", "none"),
            (backends.cuda.matmul, "fp32_precision", "none"),
            (backends.cudnn, "fp32_precision", "none"),
            (backends.cudnn.conv, "fp32_precision", "tf32"),
            (backends.cudnn.rnn, "fp32_precision", "tf32"),
        ]
    else:
        switches += [(backends.cuda.matmul, "allow_tf32", False), (backends.cudnn, "allow_tf32", True)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in switches]
    try:
        matmul_precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the caller has set it by fp32_precision, of which torch has no word
        matmul_precision = None
    try:
        if matmul_precision is not None:
            torch.set_float32_matmul_precision("highest")
        for owner, name, value in switches:
            setattr(owner, name, value)
        yield
    finally:
        if matmul_precision is not None:
            torch.set_float32_matmul_precision(matmul_precision)
        for owner, name, value in before:
            setattr(owner, name, value)
