"""Layout and micro-batches: chosen by size, put back exactly, and without a trace in what a model computes."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.maths import passes
from calfat_plugin.maths.passes import fast_passes, micro_batches, passed

X = torch.rand(6, 2, 8, 8, generator=torch.Generator().manual_seed(0))


def small_net(flatten: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 2), flatten or nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(20, 3)).eval()


class View(nn.Module):
    """What ``torch`` refuses to do to a map whose channels are last."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def strides(model: nn.Module) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("channels", [1, 2])
def test_convolutions_compute_with_their_channels_last_and_are_put_back(channels: int) -> None:
    model = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.Conv2d(4, 4, 3))
    x = X[:, :channels]
    before, parameters, values = strides(model), list(model.parameters()), [p.clone() for p in model.parameters()]

    def failing() -> None:
        with fast_passes(model, x):
            assert model[0](x).stride()[1] == model(x).stride()[1] == 1
            raise RuntimeError("of a test")

    with pytest.raises(RuntimeError, match=r"^of a test$"):
        failing()
    assert strides(model) == before
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(parameters, values, strict=True))


def test_weights_that_were_channels_last_before_stay_so() -> None:
    model = small_net().to(memory_format=torch.channels_last)
    before = strides(model)
    with fast_passes(model, X):
        assert strides(model) == before
    assert strides(model) == before


def test_a_model_that_cannot_be_passed_in_that_layout_keeps_its_own() -> None:
    model = small_net(View())
    usual, before = model(X), strides(model)
    with fast_passes(model, X):
        assert strides(model) == before
        assert torch.equal(model(X), usual)
    with threads(1), fast_passes(model, X) as rows:  # its maps are still measured
        assert rows == passes._CACHE_BYTES // (4 * 6 * 6 * 4)


def test_a_model_that_fails_on_these_images_fails_where_it_counts() -> None:
    with fast_passes(small_net(), X[:, :1]) as rows:
        assert rows > 10**9
        with pytest.raises(RuntimeError, match="channels"):
            small_net()(X[:, :1])


def test_what_is_changed_inside_stays_changed() -> None:
    model = small_net()
    with fast_passes(model, X):
        with torch.no_grad():
            model[0].weight.add_(1)
        model.load_state_dict({**model.state_dict(), "3.weight": torch.ones(5, 4, 2, 2)})
    assert torch.equal(model[0].weight, small_net()[0].weight + 1)
    assert torch.equal(model[3].weight, torch.ones(5, 4, 2, 2))


def test_the_trial_leaves_streams_modes_and_statistics_alone() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    model = nn.Sequential(Noisy(), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)).train()
    model[2].eval()
    before, stream = [module.training for module in model.modules()], torch.get_rng_state()
    with fast_passes(model, X):
        assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), stream)
    assert torch.equal(model[2].running_mean, torch.zeros(4))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("count", "maps", "expected"), [(1, 8, 8), (2, 8, 16), (1, 0, 1)])
def test_micro_batches_keep_the_largest_map_in_the_cache_of_each_thread(
    count: int, maps: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "_CACHE_BYTES", maps * 4 * 6 * 6 * 4 + 100)  # so many maps of 4 channels of 6x6 floats
    with threads(count), fast_passes(small_net(), X) as rows:
        assert rows == expected


@pytest.mark.parametrize(
    ("count", "rows", "sizes"),
    [(128, 36, [32] * 4), (100, 36, [33, 33, 34]), (5, 5, [5]), (5, 10**9, [5]), (3, 1, [1, 1, 1]), (0, 4, [])],
)
def test_micro_batches_are_few_and_even(count: int, rows: int, sizes: list[int]) -> None:
    parts = micro_batches(count, rows)
    assert [part.stop - part.start for part in parts] == sizes
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(count))


def test_passed_in_parts_is_the_model_with_its_gradient() -> None:
    model, sizes = small_net(), []
    model.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    x = X.clone().requires_grad_()
    logits = passed(model, x, 4)
    assert sizes == [3, 3]
    torch.testing.assert_close(logits, model(X))
    (gradient,) = torch.autograd.grad(logits.logsumexp(1).sum(), x)
    (whole,) = torch.autograd.grad(model(x).logsumexp(1).sum(), x)
    torch.testing.assert_close(gradient, whole)


PASSES = """
import resource, torch
from torch import nn
from calfat_plugin.maths.passes import fast_passes
model, x = nn.Sequential(*(nn.Conv2d(16, 16, 1) for _ in range(6))), torch.rand(16, 16, 128, 128)
with fast_passes(model, x):
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(x).sum().backward()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep freed memory")
def test_a_pass_takes_the_memory_of_the_last_one() -> None:
    """Without a page fault for every 4 KB: the maps of this model are 16 MB each.

    In a process of its own: where an allocation of too much has failed before, as in other tests, glibc takes the
    thread's memory from another arena, which gives it back.
    """
    faults = subprocess.run([sys.executable, "-c", PASSES], check=True, capture_output=True, text=True).stdout
    assert min(map(int, faults.split())) < 2000  # one map has 4096 pages
