"""What a run takes of time and of memory: timers of its parts, which exist only with a profile, and peaks of memory.

A run is a sequence of parts (its rounds, the final evaluation). In each part spans nest: ``training`` has ``attack``,
which has ``forward`` and ``backward``. The code names them with :func:`timed`, which does nothing without a profile.
Nothing here touches numbers or random streams, so a profile never changes a result.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Spans = dict[tuple[str, ...], list[float]]  # names from the outermost inwards -> [seconds, inner ones included; calls]

_NOTHING: AbstractContextManager[None] = nullcontext()

MB = 1e6  # bytes
_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_FORGET_PEAK = "5"  # proc(5): the highest resident size becomes the present one


@dataclass
class Part:
    """A round, or the final evaluation."""

    name: str
    started: float
    seconds: float = 0.0  # what no span covers included; 0 while it lasts
    spans: Spans = field(default_factory=dict)


class Profile:
    """Collects the seconds of one process."""

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self.parts: list[Part] = []
        self._wait = wait  # lets a device finish its work, so that this counts where it was ordered
        self._open: tuple[str, ...] = ()

    def begin(self, name: str) -> None:
        """Begin a part, which ends the one before."""
        self.end()
        self.parts.append(Part(name, time.perf_counter()))

    def end(self) -> None:
        """End the part that lasts, if one does."""
        if self.parts and not self.parts[-1].seconds:
            self.parts[-1].seconds = time.perf_counter() - self.parts[-1].started

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the seconds until it is left, and a call unless by an exception; outside of parts, nothing."""
        outer = self._open
        path = (*outer, name)
        self._open = path
        started = time.perf_counter()
        calls = 0
        try:
            yield
            calls = 1
        finally:
            self._wait()
            if self.parts:
                totals = self.parts[-1].spans.setdefault(path, [0.0, 0])
                totals[0] += time.perf_counter() - started
                totals[1] += calls
            self._open = outer

    def as_json(self) -> list[dict[str, Any]]:
        """The parts as ``profile.json`` has them."""
        parts = []
        for part in self.parts:
            spans = []
            for path, (seconds, calls) in part.spans.items():
                spans.append({"path": list(path), "seconds": seconds, "calls": int(calls)})
            parts.append({"name": part.name, "seconds": part.seconds, "spans": spans})
        return parts


_current: ContextVar[Profile | None] = ContextVar("profile", default=None)


@contextmanager
def profiling(profile: Profile | None) -> Iterator[None]:
    """Make ``profile`` the one that :func:`timed` and :func:`begin_part` in this thread fill; None: there is none."""
    token = _current.set(profile)
    try:
        yield
    finally:
        if profile is not None:
            profile.end()
        _current.reset(token)


def timed(name: str) -> AbstractContextManager[None]:
    """A span of the profile that is being made, if one is."""
    profile = _current.get()
    if profile is None:
        return _NOTHING
    return profile.span(name)


def timed_each(name: str, items: Iterator[T]) -> Iterator[T]:
    """The items, with a span around the making of each."""
    while True:
        try:
            with timed(name):
                item = next(items)
        except StopIteration:
            return
        yield item


def begin_part(name: str) -> None:
    """Begin a part of the profile that is being made, if one is."""
    profile = _current.get()
    if profile is not None:
        profile.begin(name)


class PeakMemory:
    """The largest memory in use since :meth:`begin`, in MB (10^6 bytes).

    The kernel's own mark is set back and read, so nothing is sampled and no peak is missed. Where it cannot be set back
    (it is Linux's, and a sandbox may forbid it) there is no number: the mark of the whole life of a process says
    nothing about one round.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = False  # whether the kernel's mark was set back when the round began

    def begin(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            _RESET.write_text(_FORGET_PEAK, encoding="ascii")
            self._known = True
        except OSError:
            self._known = False

    def of_process(self) -> float | None:
        """Resident memory of this process; None where the system does not give it for a while alone."""
        if not self._known:
            return None
        mark = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
        if mark is None:
            return None
        return int(mark[1]) * 1024 / MB

    def of_gpu(self) -> float | None:
        """Memory of torch's tensors on the GPU; None on another device."""
        if self._device.type != "cuda":
            return None
        import torch

        return torch.cuda.max_memory_allocated(self._device) / MB
