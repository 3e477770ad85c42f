"""Functions that are captured as graphs: which, when, on what memory, and what is logged where it is not possible.

On the CPU, with the stand-in of ``tests/maths/stand_in.py`` for torch's graphs.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.maths import graphs as module
from calfat_plugin.maths.graphs import Graphs, eager, graphs_of
from tests.maths.stand_in import Cuda, Graph, cuda  # noqa: F401 (a fixture)

CPU = torch.device("cpu")
X, Y = torch.arange(4.0), torch.arange(4.0) + 1


@pytest.fixture
def graphs(cuda: Cuda) -> Graphs:  # noqa: F811
    return Graphs(CPU)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="calfat_plugin.maths.graphs")
    return lambda: [record.getMessage() for record in caplog.records]


class Doubled:
    """Counts how often its Python code runs."""

    def __init__(self, model: nn.Linear) -> None:
        self.model, self.calls = model, 0

    def __call__(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        out = self.model.weight.detach().diagonal() * x
        return (out, None) if y is None else (out + y, out)


def linear() -> nn.Linear:
    made = nn.Linear(4, 4)
    with torch.no_grad():
        made.weight.copy_(2 * torch.eye(4))
    return made


def test_the_second_call_is_captured_and_the_next_ones_are_replayed(graphs: Graphs, cuda: Cuda) -> None:  # noqa: F811
    function = Doubled(linear())
    with graphs_of(graphs, function.model) as call:
        for number in range(5):
            x = X + number
            out, none = call("attack", function, x, None)
            assert torch.equal(out, 2 * x)
            assert none is None
            # Once as it is, once captured, and once beside each of the first two replays.
            assert (function.calls, cuda.replays) == ((1, 3, 4, 4, 4)[number], number)
    assert cuda.alive() == 1


def test_what_was_handed_in_and_out_may_change(graphs: Graphs) -> None:
    """Inputs are copied into the graph's own memory, and nobody else's is written."""
    function, handed = Doubled(linear()), list[Tensor]()
    with graphs_of(graphs, function.model) as call:
        for _ in range(3):
            given = X.clone()
            out, _ = call("attack", function, given, None)
            assert torch.equal(given, X)
            handed.append(given.fill_(100))
            assert torch.equal(out, 2 * X)
        assert all(torch.equal(given, torch.full_like(X, 100)) for given in handed)
        first, _ = call("attack", function, X, None)
        second, _ = call("attack", function, X + 1, None)
        assert first is second  # as documented: the next call overwrites


def test_weights_that_change_in_place_are_seen(graphs: Graphs) -> None:
    function = Doubled(linear())
    optimizer = torch.optim.SGD(function.model.parameters(), lr=0.5, momentum=0.9)
    with graphs_of(graphs, function.model) as call:
        for _ in range(4):
            weight = function.model.weight.detach().diagonal().clone()
            assert torch.equal(call("attack", function, X, None)[0], weight * X)
            function.model.weight.grad = torch.ones(4, 4)
            optimizer.step()
    assert function.calls == 4


@pytest.mark.parametrize("what", ["weight", "buffer"])
def test_a_tensor_that_is_replaced_ends_the_graph(
    what: str,
    graphs: Graphs,
    cuda: Cuda,  # noqa: F811
    lines: Callable[[], list[str]],
) -> None:
    function = Doubled(linear())
    function.model.register_buffer("buffer", torch.ones(1))
    with graphs_of(graphs, function.model) as call:
        for number in range(5):
            if number == 3 and what == "weight":
                function.model.weight = nn.Parameter(3 * torch.eye(4))
            elif number == 3:
                function.model.buffer = torch.ones(1)
            factor = 3 if number >= 3 and what == "weight" else 2
            assert torch.equal(call("attack", function, X, None)[0], factor * X)
    assert cuda.replays == 2
    assert lines() == [
        "no CUDA graph of the attack of (4,): a parameter or buffer of the model was replaced, not changed in place"
    ]


class Wrong(Graph):
    """A graph that reads or writes memory that is not its own any more."""

    worst = 1.0

    def replay(self) -> None:
        super().replay()
        with torch.no_grad():
            self.recorder.operations[-1][-1].add_(self.worst)


def test_a_graph_that_gives_other_numbers_ends_capture_with_a_warning(
    cuda: Cuda,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    graphs, first, second = Graphs(CPU), Doubled(linear()), Doubled(linear())
    with graphs_of(graphs, first.model) as call:
        for _ in range(3):
            call("step", first, X, None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Wrong)
        with graphs_of(graphs, second.model) as other:
            for _ in range(4):
                assert torch.equal(other("attack", second, X, None)[0], 2 * X)
        before = cuda.replays
        for name in ("step", "attack", "step", "attack"):  # a graph from before is not trusted any more either
            assert torch.equal(call(name, first, X, None)[0], 2 * X)
    assert (graphs.off, cuda.replays, graphs.captured) == (True, before, 2)
    assert [(record.levelname, record.getMessage()) for record in caplog.records if record.levelno > logging.INFO] == [
        (
            "WARNING",
            "the CUDA graph of the attack of (4,) gives other numbers than single kernels (relative difference 0.2, at "
            "most 1e-06 is allowed): no graph is used in the rest of this run. Please report this, with GPU, driver "
            "and method.",
        )
    ]


def test_a_graph_that_is_wrong_in_a_buffer_alone_is_found(
    cuda: Cuda,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Wrong)
    graphs, model = Graphs(CPU), nn.Linear(4, 4)
    model.register_buffer("seen", torch.zeros(4))

    def counting(x: Tensor) -> tuple[Tensor]:
        out = 2 * x
        assert isinstance(model.seen, Tensor)
        model.seen.add_(x)
        return (out,)

    with graphs_of(graphs, model) as call:
        for number in range(1, 5):
            assert torch.equal(call("step", counting, X)[0], 2 * X)
            assert torch.equal(model.seen, number * X)  # once a call, whatever was compared
    assert graphs.off


@pytest.mark.parametrize(("noise", "off"), [(1e-3, False), (1e-5, True)])
def test_kernels_that_add_up_in_any_order_may_differ_as_much_as_without_a_graph(
    noise: float,
    off: bool,
    cuda: Cuda,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph is 1e-3 off."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Wrong)
    monkeypatch.setattr(Wrong, "worst", 1e-3)
    graphs, model, calls = Graphs(CPU), linear(), iter(range(100))

    def noisy(x: Tensor) -> tuple[Tensor]:
        return (x * 2 + noise * (next(calls) % 2),)

    with graphs_of(graphs, model) as call:
        for _ in range(3):
            call("step", noisy, X)
    assert graphs.off == off


def test_a_comparison_counts_what_is_no_number() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert module._difference([nan, None], [nan.clone(), None]) == 0
    assert module._difference([nan], [torch.ones(2)]) == math.inf
    assert module._difference([torch.tensor([1, 2])], [torch.tensor([1, 4])]) == 0.5
    assert module._difference([torch.empty(0)], [torch.empty(0)]) == 0


def test_shapes_types_layouts_and_names_have_graphs_of_their_own(
    graphs: Graphs,
    cuda: Cuda,  # noqa: F811
) -> None:
    function = Doubled(linear())
    wide = torch.zeros(8)[::2]
    calls: list[tuple[str, Tensor, Tensor | None]] = [
        ("attack", X, None),
        ("attack", X, Y),
        ("attack", X.double(), None),
        ("attack", wide, None),
        ("step", X, None),
    ]
    with graphs_of(graphs, function.model) as call:
        for repeat in range(3):
            for name, x, y in calls:
                out, second = call(name, function, x, y)
                expected = 2 * x if y is None else 2 * x + y
                assert out.dtype == x.dtype
                assert torch.equal(out, expected)
                assert (second is None) == (y is None)
            assert len(cuda.graphs) == (len(calls) if repeat else 0)
    assert function.calls == 4 * len(calls)


def test_a_scope_ends_with_its_graphs_and_the_next_has_its_own(
    graphs: Graphs,
    cuda: Cuda,  # noqa: F811
) -> None:
    """One graph is kept: without any, the pool that the next scope captures into would be gone."""
    for _ in range(2):
        function = Doubled(linear())
        with graphs_of(graphs, function.model) as call:
            for name in ("attack", "step", "attack", "step", "attack"):
                assert torch.equal(call(name, function, X, None)[0], 2 * X)
        del call
        assert cuda.alive() == 1
    assert len(cuda.graphs) == 4


def test_nothing_is_left_with_the_run(cuda: Cuda) -> None:  # noqa: F811
    function = Doubled(linear())
    with graphs_of(Graphs(CPU), function.model) as call:
        for _ in range(3):
            call("attack", function, X, None)
    del call
    assert (cuda.alive(), len(cuda.graphs)) == (0, 1)


def test_graphs_of_many_shapes_are_bounded(
    graphs: Graphs,
    cuda: Cuda,  # noqa: F811
    lines: Callable[[], list[str]],
) -> None:
    function = Doubled(linear())
    with graphs_of(graphs, function.model) as call:
        for _ in range(3):
            for count in range(1, module._MOST + 3):
                assert call("attack", function, torch.ones(count, 4), None)[0].shape == (count, 4)
    assert len(cuda.graphs) == module._MOST
    assert lines() == [
        f"no CUDA graph of the attack of ({module._MOST + more}, 4): there are {module._MOST} graphs of other shapes "
        "already"
        for more in (1, 2)
    ]


def test_what_stands_against_one_owners_function_is_none_of_the_others(
    graphs: Graphs,
    cuda: Cuda,  # noqa: F811
    lines: Callable[[], list[str]],
) -> None:
    function = Doubled(linear())
    with graphs_of(graphs, function.model, "cw20") as call:
        for _ in range(3):
            call("attack", lambda x, y: (x * float(x.sum()), y), X, None)
    with graphs_of(graphs, function.model, "pgd20") as call:
        for _ in range(3):
            call("attack", function, X, None)
    assert cuda.replays == 2
    assert lines() == [
        "no CUDA graph of the cw20 attack of (4,): aten._local_scalar_dense.default waits for a value of the GPU"
    ]


def test_a_shape_that_comes_once_is_not_captured(
    graphs: Graphs,
    cuda: Cuda,  # noqa: F811
    lines: Callable[[], list[str]],
) -> None:
    function = Doubled(linear())
    for _ in range(2):  # rounds
        with graphs_of(graphs, function.model) as call:
            for x in (X, X, torch.ones(2, 4)):
                call("attack", function, x, None)
    assert len(cuda.graphs) == 2
    assert lines() == ["no CUDA graph of the attack of (2, 4): its shape came once"]


def drawn_by_numpy(x: Tensor) -> Tensor:
    return x * np.random.rand()  # what somebody's plugin may do


OBSTACLES: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (lambda x: x * float(x.sum()), "aten._local_scalar_dense.default waits for a value of the GPU"),
    (lambda x: x + bool((x > 0).any()), "aten._local_scalar_dense.default waits for a value of the GPU"),
    (lambda x: x + len(x.nonzero()), "aten.nonzero.default waits for a value of the GPU"),
    (lambda x: x + x[x > 0].sum(), "aten.index.Tensor waits for the GPU to count a mask"),
    (lambda x: x.index_put((x > 0,), torch.zeros(())), "aten.index_put.default waits for the GPU to count a mask"),
    (lambda x: x * torch.tensor([2.0]), "aten.lift_fresh.default copies numbers of the host to the GPU"),
    (lambda x: x + x.to("meta").dim(), "aten._to_copy.default copies between the host and the GPU"),
    (lambda x: nn.functional.dropout(x), "it draws random numbers"),
    (lambda x: x * random.random(), "it draws random numbers"),
    (drawn_by_numpy, "it draws random numbers"),
]


@pytest.mark.parametrize(("function", "reason"), OBSTACLES)
def test_what_no_graph_can_hold_is_called_and_logged_once(
    function: Callable[[Tensor], Tensor],
    reason: str,
    graphs: Graphs,
    cuda: Cuda,  # noqa: F811
    lines: Callable[[], list[str]],
) -> None:
    calls = 0

    def counted(x: Tensor) -> tuple[Tensor]:
        nonlocal calls
        calls += 1
        return (function(x),)

    for _ in range(2):  # rounds
        with graphs_of(graphs, nn.Identity()) as call:
            for _ in range(3):
                call("attack", counted, X)
    assert (calls, len(cuda.graphs)) == (6, 0)
    (line,) = lines()
    assert line.startswith(f"no CUDA graph of the attack of (4,): {reason}")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[torch.arange(2)],
        lambda x: torch.where(x > 0, x, -x),
        lambda x: nn.functional.dropout(x, training=False),
        lambda x: nn.functional.cross_entropy(x[None], torch.arange(1)).reshape(1),
    ],
)
def test_what_a_graph_can_hold_is_captured(function: Callable[[Tensor], Tensor], graphs: Graphs, cuda: Cuda) -> None:  # noqa: F811
    with graphs_of(graphs, nn.Identity()) as call:
        for number in range(3):
            assert torch.equal(call("attack", lambda x: (function(x),), X + number)[0], function(X + number))
    assert cuda.replays == 2


def test_random_numbers_of_a_later_round_are_seen(graphs: Graphs, cuda: Cuda, lines: Callable[[], list[str]]) -> None:  # noqa: F811
    """A method may begin to draw in any round; no graph would ever draw others."""
    rate = [0.0]

    def function(x: Tensor) -> tuple[Tensor]:
        return (nn.functional.dropout(x, training=rate[0] > 0),)

    for rate[0] in (0.0, 0.5):
        with graphs_of(graphs, nn.Identity()) as call:
            for _ in range(3):
                call("attack", function, X)
    assert cuda.replays == 2
    assert lines() == ["no CUDA graph of the attack of (4,): it draws random numbers"]


@pytest.fixture
def waits_later() -> Iterator[Callable[[Tensor], tuple[Tensor]]]:
    """Looks at a value from its second call on, which no look at the first one shows."""
    calls = 0

    def function(x: Tensor) -> tuple[Tensor]:
        nonlocal calls
        calls += 1
        return (2 * x if calls == 1 or float(x.sum()) > -1 else x,)

    return function


def test_a_capture_that_fails_is_the_last_one(
    graphs: Graphs,
    cuda: Cuda,  # noqa: F811
    lines: Callable[[], list[str]],
    waits_later: Any,
) -> None:
    captured = Doubled(linear())
    with graphs_of(graphs, captured.model) as call:
        for _ in range(3):
            call("step", captured, X, None)
        for number in range(4):
            assert torch.equal(call("attack", waits_later, X + number)[0], 2 * (X + number))
            assert torch.equal(call("step", captured, X, None)[0], 2 * X)  # a graph that is there is still used
            assert torch.equal(call("other", captured, X, None)[0], 2 * X)
    assert (len(cuda.graphs), cuda.current) == (1, cuda.default)
    assert lines() == [
        "no CUDA graph of the attack of (4,): its capture failed (RuntimeError: CUDA error: operation not permitted "
        "when stream is capturing); no other is tried in this run"
    ]


def test_no_memory_for_a_graph(
    graphs: Graphs,
    cuda: Cuda,  # noqa: F811
    lines: Callable[[], list[str]],
) -> None:
    calls = 0

    def function(x: Tensor) -> tuple[Tensor]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return (2 * x,)

    with graphs_of(graphs, nn.Identity()) as call:
        for number in range(3):
            assert torch.equal(call("attack", function, X + number)[0], 2 * (X + number))
    assert (calls, cuda.current) == (4, cuda.default)
    assert lines() == [
        "no CUDA graph of the attack of (4,): its capture failed (OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 2.00 GiB.); no other is tried in this run"
    ]


def test_an_error_of_the_function_is_its_own(graphs: Graphs, cuda: Cuda) -> None:  # noqa: F811
    def broken(x: Tensor) -> tuple[Tensor]:
        raise ValueError("no")

    with graphs_of(graphs, nn.Identity()) as call:
        for _ in range(3):
            with pytest.raises(ValueError, match=r"^no$"):
                call("attack", broken, X)
    assert cuda.current is cuda.default


def test_without_a_gpu_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDAGraph", "Stream", "graph_pool_handle", "stream", "current_stream"):
        monkeypatch.delattr(torch.cuda, name)
    assert all(Graphs.wanted(setting, CPU) is None for setting in ("auto", "always", "never"))
    with graphs_of(None, nn.Identity()) as call:
        assert call is eager
        assert eager("attack", lambda x: (x,), X)[0] is X


def test_a_gpu_has_graphs_unless_there_should_be_none(cuda: Cuda) -> None:  # noqa: F811
    card = torch.device("cuda", 1)
    found = {setting: Graphs.wanted(setting, card) for setting in ("auto", "always", "never")}
    assert {name: None if each is None else each.device for name, each in found.items()} == {
        "auto": card,
        "always": card,
        "never": None,
    }
