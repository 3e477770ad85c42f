"""Make imports work that their environment breaks: of torchvision beside another torch.

PyPI offers torchvision only as a CUDA build for Linux. Beside a CPU-only torch its compiled operators cannot load, yet
its Python side registers fake kernels for two of them (``nms`` and ``qnms``) and fails because nobody defined their
schemas. Defining those schemas is enough for data sets, transforms and models, which is all that we and the host use.

What torch and the hosts import is much: :func:`quick_imports` takes a quarter off its time.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: object | None = None  # torch drops the schemas when the library object is collected


def make_torchvision_importable() -> None:
    """Define torchvision's missing operator schemas if, and only if, its compiled operators cannot load.

    Call it before the first import of torchvision or fedml.
    """
    global _library
    if _library is not None or "torchvision" in sys.modules or _compiled_operators_load():
        return
    import torch

    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        _library.define(schema)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Look for no garbage meanwhile: there is little, and each look goes through all that was imported so far."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _compiled_operators_load() -> bool:
    # Asked of the path itself: import hooks, such as wandb's, answer find_spec without saying where the package lies.
    spec = importlib.machinery.PathFinder.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # nothing to fix: the import itself will say that torchvision is missing
    extension = next(Path(spec.origin).parent.glob("_C*.so"), None)
    if extension is None:
        return True  # a platform without the extension, where torchvision copes by itself
    import torch  # noqa: F401  (its shared libraries must be loaded before the extension)

    try:
        ctypes.CDLL(str(extension))
    except OSError:
        return False
    return True


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
