"""Captured CUDA graphs: a function that is called again and again on tensors of the same shapes becomes one launch.

A batch of a small network takes a GPU less time than the host needs to launch its kernels one by one. The kernels that
a function launches are captured as a graph, which is replayed on the same memory: the same kernels in the same order,
and so the same numbers. The function's Python code runs while it is captured, and not when the graph is replayed.

That the numbers are the same is checked: the first two replays of each function and shape in a run are compared with
single kernels, whose results count. A difference ends capture in the run.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

# torch is imported inside functions: recipes are checked without it.

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

log = logging.getLogger(__name__)

_MOST = 8  # graphs of a scope: each keeps its inputs and outputs in memory
_COMPARED = 2  # replays of a function and a shape in a run
_TOLERANCE = 1e-6  # relative, as benchmarks/gpu.py; or three times the difference of two calls without a graph
_COPIES = ("_to_copy", "copy_", "_copy_from", "_copy_from_and_resize")
_BY_INDEX = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")

T = TypeVar("T", bound="tuple[Tensor | None, ...]")
_Key = tuple[object, ...]


class Caller(Protocol):
    """Calls ``function(*inputs)``, or replays what it did.

    Args:
        name: what the function does, for the log; in one scope, one function has it.
        function: deterministic, keeping no state; its results are tensors or None.
        inputs: all that changes from call to call, tensors on one device or None.

    Returns:
        The function's results. The next call, of whatever function, may overwrite them.
    """

    def __call__(self, name: str, function: Callable[..., T], *inputs: Tensor | None) -> T: ...


def eager(name: str, function: Callable[..., T], *inputs: Tensor | None) -> T:
    """The :class:`Caller` that only calls."""
    return function(*inputs)


@contextmanager
def graphs_of(graphs: Graphs | None, model: nn.Module, owner: str = "") -> Iterator[Caller]:
    """A scope in which the tensors of ``model`` stay where they are in memory, and functions are captured for it.

    A graph holds addresses and constants (weights, a class prior, a round's number), so it does not outlive its scope.
    ``owner`` tells functions of one name in several scopes apart.
    """
    if graphs is None:
        yield eager
        return
    scope = _Scope(graphs, model, owner)
    yield scope
    scope.report_single_calls()


class Graphs:
    """What the graphs of a run on one GPU share: a stream, a memory pool, and the reasons why some are not captured.

    The first call of a shape is eager, on the stream that captures: it makes libraries and kernels ready, and shows
    whether a graph can hold the function. The second one is captured. Whatever stands against it is logged once, and
    such calls stay eager. Memory goes back to torch with this object.

    Attributes:
        captured: how many graphs were captured so far.
        off: whether a replay differed from single kernels, so that there are no graphs any more.
    """

    def __init__(self, device: torch.device) -> None:
        """device: a CUDA device."""
        import torch

        self.device, self.captured, self.off = device, 0, False
        self._compared: Counter[_Key] = Counter()
        self._refused: set[_Key] = set()
        self._inspected: set[_Key] = set()
        self._logged: set[tuple[_Key, str]] = set()
        self._failed = False
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._latest: torch.cuda.CUDAGraph | None = None  # a pool exists as long as one of its graphs does

    @classmethod
    def wanted(cls, setting: str, device: torch.device) -> Graphs | None:
        """What ``calfat.runtime.cuda_graphs`` means for a device; None: nothing is captured there."""
        return cls(device) if setting != "never" and device.type == "cuda" else None

    def capturable(self, key: _Key) -> bool:
        """Whether nothing is known that stands against a graph."""
        return not (self.off or self._failed or key in self._refused)

    def refuse(self, key: _Key, reason: str) -> None:
        """Leave such calls eager for the rest of the run."""
        self._refused.add(key)
        self.report(key, reason)

    def compared(self, key: _Key, model: nn.Module, replay: Callable[[], T], call: Callable[[], T]) -> T:
        """The results of a replay; of the first ones those of single kernels, with which they are compared.

        Args:
            key: of the function.
            model: whose buffers the function may change.
            replay: replays the graph.
            call: launches the same kernels by themselves.
        """
        import torch

        if self._compared[key] >= _COMPARED:
            return replay()
        self._compared[key] += 1
        before = _copies(model.buffers())

        def results(function: Callable[[], T]) -> tuple[T, list[Tensor | None]]:
            for buffer, held in zip(model.buffers(), before, strict=True):
                if not torch.equal(buffer, held):  # writing would look like a change of the model
                    buffer.copy_(held)
            found = function()
            return found, _copies((*found, *model.buffers()))

        _, replayed = results(replay)
        outputs, expected = results(call)
        off = _difference(replayed, expected)
        if off > _TOLERANCE:  # or kernels that add up in any order, which differ from call to call
            outputs, again = results(call)
            allowed = max(_TOLERANCE, 3 * _difference(again, expected))
            if not off <= allowed:
                self.off = True
                log.warning(
                    "the CUDA graph of the %s of %s gives other numbers than single kernels (relative difference %.1g, "
                    "at most %.1g is allowed): no graph is used in the rest of this run. Please report this, with GPU, "
                    "driver and method.",
                    key[0],
                    _shape(key),
                    off,
                    allowed,
                )
        return outputs

    def report(self, key: _Key, reason: str) -> None:
        """Log why a call was eager, once a run."""
        if (key, reason) not in self._logged:
            self._logged.add((key, reason))
            log.info("no CUDA graph of the %s of %s: %s", key[0], _shape(key), reason)

    def first(self, key: _Key, function: Callable[..., T], inputs: Iterable[Tensor | None]) -> T:
        """Call, and refuse a graph where the function does what no graph can hold."""
        import torch

        obstacles, before = _Obstacles(self.device), _random_states(self.device)
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if key in self._inspected:
                outputs = function(*inputs)
            else:
                with _each_operation(obstacles.look_at):
                    outputs = function(*inputs)
        current.wait_stream(self._stream)
        self._inspected.add(key)
        if obstacles.found is not None:
            self.refuse(key, obstacles.found)
        elif _random_states(self.device) != before:
            self.refuse(key, "it draws random numbers")
        return outputs

    def capture(
        self, key: _Key, function: Callable[..., T], inputs: Iterable[Tensor | None]
    ) -> tuple[torch.cuda.CUDAGraph, T] | None:
        """The graph and the memory of its results, which have no values yet; None where it failed, which is logged.

        What a failed capture leaves behind in torch is not defined, so there is no other in this run.
        """
        import torch

        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = function(*inputs)
                except BaseException:
                    with suppress(RuntimeError):  # the capture is void already
                        graph.capture_end()
                    raise
                graph.capture_end()
        except Exception as error:  # a driver, a library or a plugin may fail in any way; the eager call says how
            self._failed = True
            first_line = (str(error).strip() or "no message").splitlines()[0]
            self.refuse(
                key, f"its capture failed ({type(error).__name__}: {first_line}); no other is tried in this run"
            )
            return None
        self._latest = graph
        self.captured += 1
        return graph, outputs


class _Scope:
    """The graphs for one model, see :func:`graphs_of`."""

    def __init__(self, graphs: Graphs, model: nn.Module, owner: str) -> None:
        self._graphs, self._model, self._owner = graphs, model, owner
        self._captured: dict[_Key, _Captured[Any]] = {}
        self._calls: dict[_Key, int] = {}

    def __call__(self, name: str, function: Callable[..., T], *inputs: Tensor | None) -> T:
        named = f"{self._owner} {name}".strip()
        key = (named, *(None if each is None else (each.shape, each.stride(), each.dtype) for each in inputs))
        if self._graphs.off or (not self._graphs.capturable(key) and key not in self._captured):
            return function(*inputs)
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] == 1:
            return self._graphs.first(key, function, inputs)
        captured: _Captured[T] | None = self._captured.get(key) or self._capture(key, function, inputs)
        if captured is None:
            return function(*inputs)
        if captured.addresses != _addresses(self._model):
            del self._captured[key]
            self._graphs.refuse(key, "a parameter or buffer of the model was replaced, not changed in place")
            return function(*inputs)
        replay, call = partial(captured.replay, inputs), partial(function, *inputs)
        return self._graphs.compared(key, self._model, replay, call)

    def report_single_calls(self) -> None:
        """Log what was called once, and so never captured."""
        for key, calls in self._calls.items():
            if calls == 1 and self._graphs.capturable(key):
                self._graphs.report(key, "its shape came once")

    def _capture(self, key: _Key, function: Callable[..., T], inputs: tuple[Tensor | None, ...]) -> _Captured[T] | None:
        if len(self._captured) >= _MOST:
            self._graphs.refuse(key, f"there are {_MOST} graphs of other shapes already")
            return None
        own = tuple(None if each is None else each.detach().clone() for each in inputs)
        made = self._graphs.capture(key, function, own)
        if made is None:
            return None
        self._captured[key] = _Captured(*made, own, _addresses(self._model))
        return self._captured[key]


class _Captured(Generic[T]):
    """A graph with the memory that it reads and writes.

    Attributes:
        addresses: of the model's tensors, which it reads where they were when it was captured.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        outputs: T,
        inputs: tuple[Tensor | None, ...],
        addresses: tuple[int, ...],
    ) -> None:
        self._graph, self._outputs, self._inputs, self.addresses = graph, outputs, inputs, addresses

    def replay(self, inputs: Iterable[Tensor | None]) -> T:
        """The results for other inputs of the same shapes, in the memory of the results before."""
        for own, given in zip(self._inputs, inputs, strict=True):
            if own is not None and given is not None:
                own.copy_(given)
        self._graph.replay()
        return self._outputs


class _Obstacles:
    """Finds the first operation that no graph holds: it reads values, or copies between the host and the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.found: str | None = None
        self._device = device

    def look_at(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note what stands against a graph with this operation, if it is the first."""
        reason = self._reason(func, args, result) if self.found is None else None
        if reason is not None:
            self.found = f"{func} {reason}"

    def _reason(self, func: Any, args: tuple[Any, ...], result: Any) -> str | None:
        from torch import Tag, Tensor

        name, tensors = func.overloadpacket.__name__, [each for each in (*args, result) if isinstance(each, Tensor)]
        if not any(each.device.type == self._device.type for each in tensors):
            return None
        if name in _BY_INDEX:
            by_mask = any(isinstance(index, Tensor) and not _counts(index) for index in args[1])
            return "waits for the GPU to count a mask" if by_mask else None
        if name == "lift_fresh":
            return "copies numbers of the host to the GPU"
        if name in _COPIES and len({each.device for each in tensors}) > 1:
            return "copies between the host and the GPU"
        if Tag.data_dependent_output in func.tags or Tag.dynamic_output_shape in func.tags:
            return "waits for a value of the GPU"
        return None


def _each_operation(look_at: Callable[[Any, tuple[Any, ...], Any], None]) -> AbstractContextManager[object]:
    """A context in which ``look_at`` gets every operation of torch with its arguments and its result."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            look_at(func, args, result)
            return result

    return Mode()  # type: ignore[no-untyped-call]


def _counts(index: Tensor) -> bool:
    """Whether an index holds positions, and no mask, whose positions would have to be counted first."""
    import torch

    return index.dtype not in (torch.bool, torch.uint8)


def _random_states(device: torch.device) -> tuple[object, ...]:
    """What the next draw of any global generator depends on."""
    import numpy as np
    import torch

    name, words, *rest = np.random.get_state(legacy=True)
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return (random.getstate(), name, np.asarray(words).tobytes(), *rest, *(state.numpy().tobytes() for state in states))


def _copies(tensors: Iterable[Tensor | None]) -> list[Any]:
    return [None if each is None else each.detach().clone() for each in tensors]


def _difference(found: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> float:
    """The largest difference, as a share of the largest value, over tensors in pairs; equal nans are no difference."""
    import torch

    worst = 0.0
    for first, second in zip(found, expected, strict=True):
        if first is None or second is None or not second.numel() or torch.equal(first, second):
            continue
        first, second = first.double(), second.double()
        same = (first == second) | (first.isnan() & second.isnan())
        off = torch.where(same, 0.0, (first - second).abs()).amax()
        share = float(off / second.abs().nan_to_num().amax().clamp_min(1e-30))
        worst = max(worst, math.inf if math.isnan(share) else share)
    return worst


def _addresses(model: nn.Module) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


def _shape(key: _Key) -> tuple[int, ...]:
    """Of the first input, the images."""
    first: Any = key[1]
    return tuple(first[0])
