"""Timers of a run's parts, which exist only while a profile is made.

A run is a sequence of parts (its rounds, the final evaluation). In each part spans nest: ``training`` has ``attack``,
which has ``forward`` and ``backward``. The code names them with :func:`timed`, which does nothing without a profile.
Nothing here touches numbers or random streams, so a profile never changes a result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
Spans = dict[tuple[str, ...], list[float]]  # names from the outermost inwards -> [seconds, inner ones included; calls]

_NOTHING: AbstractContextManager[None] = nullcontext()


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
