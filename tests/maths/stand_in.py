"""A stand-in for CUDA graphs on the CPU: it records operations with the memory they use, and replays them there.

Like a graph, it runs no Python code again, sees what was written into the memory since, and computes nothing while it
captures: whatever the operations produced is rubbish until the first replay, and whatever they wrote is as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FORBIDDEN = "operation not permitted when stream is capturing"


class Stream:
    """Knows for which stream it waited last; work on it without waiting for the one before would be a race."""

    def __init__(self, device: object = None) -> None:
        self.ahead: Stream | None = None  # whose work this one has not waited for

    def wait_stream(self, other: Stream) -> None:
        if self.ahead is other:
            self.ahead = None


class Pool:
    """Of memory: gone with the last graph that used it, as in torch."""

    def __init__(self) -> None:
        self.graphs: list[weakref.ref[Any]] = []


class Cuda:
    """The parts of ``torch.cuda`` that capture graphs."""

    def __init__(self) -> None:
        self.default = self.current = Stream()
        self.graphs: list[weakref.ref[Graph]] = []
        self.replays, self.capturing = 0, False

    def alive(self) -> int:
        return sum(graph() is not None for graph in self.graphs)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        assert stream.ahead is None, "the stream did not wait for the one before"
        self.capturing = False
        try:
            yield
        finally:
            self.current, stream.ahead = before, before
            if not self.capturing:  # which is no work on the stream
                before.ahead = stream


class _Recorder(TorchDispatchMode):
    """Carries operations out once, to learn the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Any, Any]] = {}  # memory from outside, and what it held
        self.made: dict[int, Any] = {}
        self.void = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_mask = func.overloadpacket.__name__.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in tree_leaves(args)
        )
        if by_mask or torch.Tag.data_dependent_output in func.tags:
            self.void = True
        if self.void:
            raise RuntimeError(f"CUDA error: {FORBIDDEN}\nand more lines")
        for storage in _storages((args, kwargs)):
            if storage.data_ptr() not in self.made:
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, result))
        for storage in _storages(result):
            if storage.data_ptr() not in self.before:
                self.made[storage.data_ptr()] = storage
        return result


def _storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Graph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    cuda: Cuda  # set by the fixture

    def capture_begin(self, pool: Pool, capture_error_mode: str = "global") -> None:
        assert self.cuda.current is not self.cuda.default, "CUDA graphs must be captured on a non-default stream"
        assert capture_error_mode == "thread_local"
        assert not pool.graphs or any(graph() is not None for graph in pool.graphs), "the pool is gone"
        self.pool, self.recorder, self.cuda.capturing = pool, _Recorder(), True
        self.recorder.__enter__()

    def capture_end(self) -> None:
        self.recorder.__exit__(None, None, None)
        if self.recorder.void:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        for storage, held in self.recorder.before.values():
            storage.copy_(held)
        for storage in self.recorder.made.values():
            storage.fill_(255)  # nan, or -1
        self.pool.graphs.append(weakref.ref(self))
        self.cuda.graphs.append(weakref.ref(self))

    def replay(self) -> None:
        assert self.cuda.current is self.cuda.default
        assert self.cuda.default.ahead is None, "the capturing stream was not waited for"
        self.cuda.replays += 1
        with torch.no_grad():
            for func, args, kwargs, result in self.recorder.operations:
                found = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(found), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.detach().copy_(new)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """``torch.cuda`` with streams and graphs that work on the CPU."""
    made = Cuda()
    monkeypatch.setattr(Graph, "cuda", made, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", Pool)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current)
    return made
