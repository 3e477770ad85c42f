"""The environment of a process: imports that it breaks or slows down, cores, and how another process ended.

PyPI offers torchvision only as a CUDA build for Linux. Beside a CPU-only torch its compiled operators cannot load, yet
its Python side registers fake kernels for two of them (``nms`` and ``qnms``) and fails because nobody defined their
schemas. Defining those schemas is enough for data sets, transforms and models, which is all that we and the host use.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_PACKAGE = "torchvision"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: object | None = None  # torch drops the schemas when the library object is collected

#: Signals by which a process dies of its own fault; others are sent to it.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)


def make_torchvision_importable() -> None:
    """Let the first import of torchvision define the missing schemas before it, wherever that import is.

    Importing this package calls it, and therefore it is called before any file of a user is imported. It imports
    nothing by itself.
    """
    if _PACKAGE in sys.modules or any(isinstance(finder, _FindsTorchvision) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _FindsTorchvision())


class _FindsTorchvision:
    """A finder of Python's import system for torchvision alone. To find it imports nothing yet."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _PACKAGE:
            return None
        spec = _spec_of_torchvision()
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None  # the other finders do the rest, or say that it is missing
        spec.loader = _LoadsTorchvision(spec.loader.name, spec.loader.path)
        return spec


class _LoadsTorchvision(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        _define_missing_operators()
        super().exec_module(module)


def _define_missing_operators() -> None:
    """Define the schemas if, and only if, torchvision's compiled operators cannot load."""
    global _library
    if _library is not None or _compiled_operators_load():
        return
    import torch

    _library = torch.library.Library(_PACKAGE, "DEF")
    for schema in _SCHEMAS:
        _library.define(schema)


def _compiled_operators_load() -> bool:
    spec = _spec_of_torchvision()
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


def _spec_of_torchvision() -> ModuleSpec | None:
    """Where Python's own finder sees torchvision; import hooks such as wandb's do not say where the package is."""
    return importlib.machinery.PathFinder.find_spec(_PACKAGE)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection, which takes a quarter off the time that torch and the hosts need.

    There is little garbage meanwhile, and each collection goes through all that was imported so far.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ending(code: int) -> str:
    """How a process with this exit code ended: ``SIGSEGV`` for -11, ``exit code 3`` for 3."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def likely_cause(code: int) -> str:
    """What the cause of an exit code may be, in a sentence; empty where the code does not tell."""
    if -code == signal.SIGKILL:
        return "Whoever sends SIGKILL is most likely the system, because memory has run out."
    if -code in CRASHES:
        return (
            f"{ending(code)} is no want of memory: native code of torch or of a plugin has crashed. Try --set "
            "calfat.runtime.layout=contiguous, or another version of torch."
        )
    return ""
