"""What ``calfat trust`` sees of the values of a forward pass, how far they can move, and where it leads images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.judging.dead_units import Leaps, StageReader, climbed
from calfat_plugin.judging.units import Reader, Unit, candidates, random_points, slopes_of
from calfat_plugin.judging.watching import OneByOne, Ranges, Site, View, hides_images, measured_ranges, watched
from calfat_plugin.maths.attacks import attack_mode
from calfat_plugin.seeds import generator
from calfat_plugin.threat import ThreatModel
from tests.evaluators.tasks import task_of


class Of(nn.Module):
    """A function of the images as a model."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def seen_of(function: Callable[[Tensor], Tensor], x: Tensor) -> dict[Site, Tensor]:
    seen = {}

    def see(view: View) -> None:
        seen[view.site] = view.values()

    watched(Of(function), x, see)
    return seen


def test_a_value_is_shown_before_it_is_changed_in_place_and_again_after_it() -> None:
    x = torch.tensor([-1.0, 2.0, -3.0]).view(3, 1, 1, 1)
    values = [value.flatten().tolist() for value in seen_of(lambda x: (2 * x).flatten(1).relu_() + 1, x).values()]
    # Numbers and means of maps: a map here is one number. A flattened tensor is another view of the same.
    assert values == [[-1, -1, 2, 2, -3, -3], [-2, -2, 4, 4, -6, -6], [0, 4, 0]]


def test_the_images_may_be_counted_by_another_dimension() -> None:
    x = torch.arange(6.0).view(3, 1, 1, 2)
    seen = seen_of(lambda x: torch.stack([x.flatten(1)[:, 0], -x.flatten(1)[:, 1]]).amax(dim=0) + 0, x)
    assert [[0.0, -1.0], [2.0, -3.0], [4.0, -5.0]] in [value.tolist() for value in seen.values()]


@pytest.mark.parametrize("choose", [torch.gt, torch.maximum, torch.minimum])
def test_of_two_values_that_are_compared_the_difference_is_shown(choose: Any) -> None:
    x = torch.tensor([[3.0, 1.0], [4.0, 6.0], [5.0, 5.5]]).view(3, 1, 1, 2)
    seen = seen_of(lambda x: choose(x.flatten(1)[:, 0] * 1, x.flatten(1)[:, 1] * 1), x)
    assert [value.flatten().tolist() for site, value in seen.items() if site.argument == -1] == [[2, -2, -0.5]]


def loop(x: Tensor) -> Tensor:
    """w.x - 1 of each image, at least 0."""
    return torch.stack([(image.flatten() @ W - 1).relu() for image in x])


def test_one_by_one_values_are_those_of_the_batch_and_so_are_gradients() -> None:
    x = torch.rand(3, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    model = OneByOne(Of(loop))
    shown: dict[Site, list[tuple[slice, Tensor]]] = {}
    logits = watched(model, x, lambda view: shown.setdefault(view.site, []).append((view.rows, view.values())))
    assert torch.equal(logits, loop(x))
    sites = []
    for site, views in shown.items():
        if site.shape == () and torch.allclose(torch.cat([values for _, values in views])[:, 0], x.flatten(1) @ W):
            sites.append(site)
            assert [rows for rows, _ in views] == [slice(0, 1), slice(1, 2), slice(2, 3)]
    (site,) = sites

    reader = Reader(model, [[(site, 0)]] * 3, x.device)
    leaf = x.clone().requires_grad_()
    reading = reader.read(leaf)
    assert torch.allclose(reading.values.flatten(), x.flatten(1) @ W)
    gradient = reader.gradient(reading, leaf, torch.tensor([[1.0], [2.0], [-3.0]]))
    assert torch.allclose(gradient.flatten(1), torch.tensor([[1.0], [2.0], [-3.0]]) * W)


@pytest.mark.parametrize("detached", [False, True])
def test_one_by_one_leaps_and_candidates_are_those_of_the_batch(detached: bool) -> None:
    def switch(x: Tensor) -> Tensor:
        return ((x.detach() if detached else x) @ W - 3).clamp(min=0)

    batched = on_trial(switch)
    looped = replace(batched, model=OneByOne(batched.model))
    x = batched.data.x[:6]
    far = (x.flatten(1) + 0.1 * W.sign()).view_as(x)
    far[1] = x[1]
    for trial in (batched, looped):
        leaps = Leaps(trial.model, measured_ranges(trial), [x]).of(far).amax(dim=1)
        assert float(leaps[1]) == 0 < float(leaps[[0, 2, 3, 4, 5]].min())
    ways = []
    for trial in (batched, looped):
        units, _ = units_of(trial)
        (unit,) = [unit for unit in units if unit.site.shape == () and unit.sign == 1.0][:1]
        ways.append(unit)
    assert torch.allclose(ways[0].way, ways[1].way, rtol=1e-3)
    assert ways[0].gain == pytest.approx(ways[1].gain)


@pytest.mark.parametrize(
    ("function", "hidden"),
    [
        (lambda x: (x.flatten(1) @ W).relu(), False),
        (lambda x: (x.movedim(0, 2) * 2).relu(), False),
        (lambda x: x.flatten(1) - x.flatten(1).mean(dim=0), False),  # of the whole batch: nobody's
        (lambda x: (x.flatten() * 2).view(len(x), -1).relu(), False),  # a view, or what it is a view of, has the images
        (loop, True),
        (lambda x: torch.cat([part * 2 for part in x.split(4)]), True),
        (lambda x: (x.view(1, -1) * 2).relu().view(len(x), -1), True),
    ],
)
def test_a_batch_of_another_size_shows_whether_values_are_hidden(
    function: Callable[[Tensor], Tensor], hidden: bool
) -> None:
    assert hides_images(Of(function), torch.rand(3, 1, 2, 2), 9) is hidden


def test_sites_are_the_same_in_a_pass_with_gradients() -> None:
    x = torch.rand(3, 1, 2, 2)
    model = Of(lambda x: (2 * (2 * x).relu()).sigmoid().exp().flatten(1) @ W)
    sites: list[list[Site]] = [[], []]
    watched(model, x + 0, lambda view: sites[0].append(view.site))
    watched(model, x.clone().requires_grad_(), lambda view: sites[1].append(view.site))
    assert sites[0] == sites[1]
    assert len(sites[0]) == 6


def test_parameters_are_no_values() -> None:
    x = torch.zeros(10, 1, 2, 2)
    linear = nn.Linear(4, 10)  # as many outputs as there are images
    sites = list(seen_of(lambda x: linear(x.flatten(1)), x))
    assert [site.shape for site in sites] == [(1, 2, 2)]


def read(model: nn.Module, site_of: Callable[[Site], bool], place: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The values at a place, and the gradient of their sum."""
    with torch.no_grad():
        sites: list[Site] = []
        watched(model, x, lambda view: sites.append(view.site))
    (site,) = [site for site in sites if site_of(site)]
    reader = Reader(model, [[(site, place)]] * len(x), x.device)
    leaf = x.clone().requires_grad_()
    reading = reader.read(leaf)
    return reading.values.detach().flatten(), reader.gradient(reading, leaf, torch.ones_like(reading.values))


def test_gradients_of_a_number_of_a_map_and_of_a_difference() -> None:
    x = torch.rand(3, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    squares = Of(lambda x: (x * x).relu_().flatten(1))
    of_squares = lambda site: site.operation == 2 and site.shape == (2, 2, 2)  # noqa: E731 after x + 0 and x * x
    values, gradient = read(squares, of_squares, 3, x)
    assert torch.equal(values, x[:, 0, 1, 1] ** 2)
    wanted = torch.zeros_like(x)
    wanted[:, 0, 1, 1] = 2 * x[:, 0, 1, 1]
    assert torch.allclose(gradient, wanted)

    values, gradient = read(squares, of_squares, 8 + 1, x)  # the mean of the second map
    assert torch.allclose(values, (x[:, 1] ** 2).mean(dim=(1, 2)))
    wanted = torch.zeros_like(x)
    wanted[:, 1] = 2 * x[:, 1] / 4
    assert torch.allclose(gradient, wanted)

    compared = Of(lambda x: (3 * x[:, 0, 0] > 5 * x[:, 1, 1]).float())
    values, gradient = read(compared, lambda site: site.argument == -1, 1, x)
    assert torch.allclose(values, 3 * x[:, 0, 0, 1] - 5 * x[:, 1, 1, 1])
    wanted = torch.zeros_like(x)
    wanted[:, 0, 0, 1], wanted[:, 1, 1, 1] = 3, -5
    assert torch.allclose(gradient, wanted)


W = torch.tensor([0.5, -1.0, 2.0, 0.0])


def on_trial(function: Callable[[Tensor], Tensor], images: int = 12) -> EvaluationTask:
    """On images that all are on the line w.x = 1 to 2, as gates use them; label 0, which is right."""
    x = 0.5 + torch.rand(images, 1, 2, 2, generator=torch.Generator().manual_seed(1)) / 100

    def logits(x: Tensor) -> Tensor:
        switched = function(x.flatten(1))
        return torch.stack([3 + 0 * x.flatten(1).sum(dim=1), switched, -switched], dim=1)

    model = Of(logits).eval()
    data = ImageData(x, torch.zeros(images, dtype=torch.int64))
    return task_of(model, data, num_classes=3, threat=ThreatModel(eps=Fraction(1, 10)), batch_size=5)


def units_of(trial: EvaluationTask) -> tuple[list[Unit], Ranges]:
    ranges, x = measured_ranges(trial), trial.data.x[:6]
    points = random_points(trial, x, generator(0, "trust/dead units"), 64)
    with attack_mode(trial.model):
        return candidates(trial, ranges, x, points, 64, 20, 3), ranges


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_unit_is_the_way_out_of_a_values_range(sign: float, detached: bool) -> None:
    def switch(x: Tensor) -> Tensor:
        inside = x.detach() if detached else x
        return (sign * (inside @ W) - 3 - 0 * x.sum(dim=1)).clamp(min=0)  # not even a random point opens it

    trial = on_trial(switch)
    units, ranges = units_of(trial)
    values = sign * (trial.data.x.flatten(1) @ W)
    ways = [unit for unit in units if torch.equal((sign * unit.way.flatten())[W != 0].sign(), W[W != 0].sign())]
    assert ways
    (unit,) = [unit for unit in ways if unit.site.shape == () and unit.sign == 1.0][:1] or ways[:1]
    assert {other.sign for other in units} == {1.0, -1.0}
    for other in units:
        low, high = float(ranges.low[other.site][other.place]), float(ranges.high[other.site][other.place])
        assert other.edge == (high if other.sign > 0 else -low)
    assert unit.gain == pytest.approx(float(values[:3].mean()) + 0.35 - float(values.max()), rel=1e-4)
    assert unit.along_gradient == (not detached)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_random_points_say_of_a_gradient_is_of_each_points_own_image(one_by_one: bool) -> None:
    """Images that are far apart, so that the values or the steps of another image would be off by far."""
    noise = torch.Generator().manual_seed(0)
    x = torch.rand(3, 1, 2, 2, generator=noise)
    model: nn.Module = Of(lambda x: torch.stack([x.flatten(1).detach() @ W, 0 * x[:, 0, 0, 0]], dim=1))
    if one_by_one:
        model = OneByOne(model)
    places: list[tuple[Site, int]] = []
    values = x.flatten(1) @ W

    def find(view: View) -> None:
        if view.site.shape == () and torch.allclose(view.values().flatten(), values[view.rows]) and not places:
            places.append((view.site, 0))

    watched(model, x, find)
    assert places
    # Two passes, of other lengths. A pass goes through the images in turn, so row k is around image k % 3.
    passes = []
    expected = torch.zeros(4)
    for rounds in (4, 2):
        points = x.repeat(rounds, 1, 1, 1) + (torch.rand(3 * rounds, 1, 2, 2, generator=noise) - 0.5) / 5
        passes.append(points)
        for row in range(3 * rounds):
            way = (points[row] - x[row % 3]).flatten()
            expected += (way @ W) * way
    assert torch.allclose(slopes_of(model, places, x, passes), expected[None], atol=1e-5)


def unit_of(trial: EvaluationTask, w: Tensor) -> Unit:
    """The value w.x of a model that computes it, upwards."""
    ranges, values = measured_ranges(trial), trial.data.x.flatten(1) @ w
    high = values.max()
    for site in ranges.high:
        if site.shape == () and torch.equal(ranges.high[site][0], high):
            gain = float(values.mean() + 0.1 * w.abs().sum() - high)
            return Unit(site, 0, 1.0, float(high), gain, 1.0, w.view(1, 2, 2), True)
    raise AssertionError("the value is not shown")


def test_images_are_led_to_where_all_values_of_a_stage_are_out_of_their_ranges() -> None:
    """Two gates, of other pixels, both of which must open."""
    other = torch.tensor([0.0, 0.0, 0.0, 1.0])
    trial = on_trial(lambda x: 9.0 * ((x @ W > 1.02) & (x @ other > 0.55)).float())
    first, second = unit_of(trial, W), unit_of(trial, other)
    x, y = trial.data.x[:6], trial.data.y[:6]
    with attack_mode(trial.model):
        alone = climbed(trial.model, trial.threat, [((first,),)] * 6, x, y)
        together = climbed(trial.model, trial.threat, [((first, second),)] * 6, x, y)
        one_after_the_other = climbed(trial.model, trial.threat, [((second,), (first, second))] * 6, x, y)
    assert (int(alone.right.sum()), int(together.right.sum()), int(one_after_the_other.right.sum())) == (6, 0, 0)
    for climb in (alone, together, one_after_the_other):
        trial.threat.check(climb.x_adv, x, who="a climb")
    moved = alone.opened - x
    assert torch.allclose(moved.flatten(1)[:, :3], torch.tensor([0.1, -0.1, 0.1]), atol=1e-6)


def test_what_is_furthest_back_is_pushed_most() -> None:
    trial = on_trial(lambda x: (x @ W - 2).clamp(min=0) + (x @ torch.tensor([0.0, 0.0, 0.0, 1.5]) - 2).clamp(min=0))
    pair = (unit_of(trial, W), unit_of(trial, torch.tensor([0.0, 0.0, 0.0, 1.5])))
    x = trial.data.x[:1].clone()
    x[..., 1, 1] += 0.1  # the second one is out of its range already
    with attack_mode(trial.model):
        _, direction = StageReader(trial.model, [pair], x).look(x.requires_grad_())
    slopes = direction.flatten().abs()
    assert slopes[3] * pair[1].gain < 0.01 * slopes[2] * pair[0].gain / 2


def test_what_opens_leaps_and_what_only_moves_does_not() -> None:
    trial = on_trial(lambda x: (x @ W - 1.0).clamp(min=0))
    ranges = measured_ranges(trial)
    x = trial.data.x[:6]
    leaps = Leaps(trial.model, ranges, [x])
    assert 0 < leaps.share_asleep() < 1
    far = (x.flatten(1) + 0.1 * W.sign()).view_as(x)
    assert float(leaps.of(far).amax(dim=1).min()) > 1e3
    assert float(leaps.of(x).max()) == 0
    # A random point opens it, too: then it is nothing that only an attack reaches.
    assert float(Leaps(trial.model, ranges, [far]).of(far).max()) == 0
