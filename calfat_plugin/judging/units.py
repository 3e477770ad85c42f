"""Values of a model that can leave their range: how they are read, and which of them the ball lets leave it furthest.

Step 2 of the search for dead units; ``dead_units.py`` says what it is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.judging.watching import Part, Ranges, Site, View, watched

_SAME_WAY = 0.9  # cosine of two ways through the ball from which on they count as one

Place = tuple[Site, int]  #: which value of the site, of numbers and channels


@dataclass(frozen=True, eq=False)
class Unit:
    """A value that can leave its range.

    Attributes:
        place: which value of the site, of numbers and channels.
        sign: it leaves its range upwards (1) or downwards (-1).
        edge: where the range ends: the largest that ``sign`` times the value is on the images.
        gain: how far one step of eps takes it beyond.
        score: ``gain`` in widths of the range.
        way: (C, H, W) the direction of that step, at the first image.
        along_gradient: whether this is its gradient; otherwise it is what random points show.
    """

    site: Site
    place: int
    sign: float
    edge: float
    gain: float
    score: float
    way: Tensor
    along_gradient: bool


class Reading(NamedTuple):
    """A forward pass in which row i was asked for the values of the i-th set of places."""

    logits: Tensor
    values: Tensor  # (N, most places of a set)
    parts: Mapping[Site, list[Part]]


class Reader:
    """Reads other values in each row of a batch, so that many values take one pass together."""

    def __init__(self, model: nn.Module, places: Sequence[Sequence[Place]], device: torch.device) -> None:
        self._model = model
        self.most = max(map(len, places))
        of_site: dict[Site, list[tuple[int, int, int]]] = {}
        for row, places_of_row in enumerate(places):
            for column, (site, place) in enumerate(places_of_row):
                of_site.setdefault(site, []).append((row, column, place))
        self._where = {site: torch.tensor(where, device=device).unbind(1) for site, where in of_site.items()}

    def read(self, x: Tensor) -> Reading:
        """Pass x through the model. What this pass does not compute, as it takes another way, is 0."""
        values = torch.zeros(len(x), self.most, device=x.device)
        parts: dict[Site, list[Part]] = {}

        def note(view: View) -> None:
            if view.site not in self._where:
                return
            rows, columns, places = self._where[view.site]
            in_view = (rows >= view.rows.start) & (rows < view.rows.stop)
            if in_view.any():
                rows, columns, places = rows[in_view], columns[in_view], places[in_view]
                values[rows, columns] = view.values()[rows - view.rows.start, places]
                parts.setdefault(view.site, []).extend(view.parts())

        logits = watched(self._model, x, note)
        return Reading(logits, values, parts)

    def gradient(self, reading: Reading, x: Tensor, weights: Tensor) -> Tensor:
        """Of the sum of ``weights``, of the shape of the values, times the values; by x."""
        edges: list[GradientEdge] = []
        seeds: list[Tensor] = []
        for site, parts in reading.parts.items():
            numbers = self._weights_of_numbers(site, weights)
            for part in parts:
                if part.edge is None:
                    continue
                seed = (part.sign * numbers[part.rows]).view(-1, *site.shape)
                if part.image_dimension is None:  # one image, and no dimension for it
                    seed = seed[0]
                else:
                    seed = seed.movedim(0, part.image_dimension)
                edges.append(part.edge)
                seeds.append(seed)
        if not edges:
            return torch.zeros_like(x)
        try:
            (gradient,) = torch.autograd.grad(edges, x, grad_outputs=seeds, allow_unused=True)
        except RuntimeError:  # a model that computes gradients itself has freed what they need; random points are left
            return torch.zeros_like(x)
        if gradient is None:
            return torch.zeros_like(x)
        return gradient.nan_to_num(0.0)

    def _weights_of_numbers(self, site: Site, weights: Tensor) -> Tensor:
        """(N, numbers of the site): a map's mean has its weight in equal parts on the numbers of the map."""
        rows, columns, places = self._where[site]
        on_site = torch.zeros(len(weights), site.numbers + site.channels, device=weights.device)
        on_site.index_put_((rows, places), weights[rows, columns], accumulate=True)
        numbers = on_site[:, : site.numbers]
        if site.channels:
            size_of_map = site.numbers // site.channels
            means = on_site[:, site.numbers :] / size_of_map
            numbers = numbers + means.repeat_interleave(size_of_map, dim=1)
        return numbers


def random_points(task: EvaluationTask, x: Tensor, noise: torch.Generator, draws: int) -> list[Tensor]:
    """So many points of the ball around each of the images, (n * some draws, C, H, W) for each pass."""
    at_once = max(1, task.batch_size // len(x))
    points = []
    for first in range(0, draws, at_once):
        repeated = x.repeat(min(at_once, draws - first), 1, 1, 1)
        points.append(task.threat.random_start(repeated, noise))
    return points


def candidates(
    task: EvaluationTask,
    ranges: Ranges,
    x: Tensor,
    points: Sequence[Tensor],
    looked_at: int,
    most: int,
    measured: int,
) -> list[Unit]:
    """At most so many values that leave their ranges in the ball around x, those first that leave them furthest.

    Args:
        ranges: of all values, on images.
        x: (n, C, H, W) images.
        points: of :func:`random_points` around them; all values are rated by how far these move them.
        looked_at: so many of the values, about as many of each site, are measured by steps of eps.
        most: so many units.
        measured: the steps are made from so many images.
    """
    places = _moving_furthest(task.model, ranges, x, points, looked_at)
    slopes = slopes_of(task.model, places, x, points)
    units = []
    few = x[:measured]
    at_once = max(1, task.batch_size // len(few))
    for first in range(0, len(places), at_once):
        part = slice(first, first + at_once)
        units += _measured(task, ranges, few, places[part], slopes[part])
    units.sort(key=lambda unit: -unit.score)
    different: list[Unit] = []
    for unit in units:
        if len(different) < most and not any(same_way(unit.way, other.way) for other in different):
            different.append(unit)
    return different


def same_way(way: Tensor, other: Tensor) -> bool:
    """Whether two directions of an image, (C, H, W) or a batch of them, are nearly the same."""
    return float(functional.cosine_similarity(way.flatten(), other.flatten(), dim=0)) > _SAME_WAY


def _moving_furthest(model: nn.Module, ranges: Ranges, x: Tensor, points: Sequence[Tensor], most: int) -> list[Place]:
    """At most so many places, about as many of each site, those first that move by most widths of their range.

    A value moves by the root mean square of its differences between random points around x and x.
    """
    squares: dict[Site, Tensor] = {}

    def add(site: Site, change: Tensor, ways: Tensor) -> None:
        squares[site] = squares.get(site, 0.0) + change.square().sum(dim=0)

    _watch_changes(model, ranges.low, x, points, add)
    num_points = sum(map(len, points))
    of_each_site = max(2, most // max(1, len(squares)))
    rated: list[tuple[float, Place]] = []
    for site, total in squares.items():
        move = (total / num_points).sqrt()
        only_rounding = move <= ranges.rounding(site)
        rating = (move / ranges.widths(site)).masked_fill(only_rounding, 0.0).nan_to_num(0.0, 0.0, 0.0)
        best = rating.topk(min(of_each_site, len(rating)))
        for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if value > 0:
                rated.append((value, (site, place)))
    rated.sort(key=lambda rating_and_place: -rating_and_place[0])
    return [place for _, place in rated[:most]]


def slopes_of(model: nn.Module, places: Sequence[Place], x: Tensor, points: Sequence[Tensor]) -> Tensor:
    """(places, pixels) what random points around x say about the gradient of values, up to a factor.

    It is the sum over all points of the value's change from the image to the point, times the way from the image to the
    point. For a value that was detached, rounded or given a gradient that is not its own there is nothing better.
    """
    slopes = torch.zeros(len(places), x[0].numel(), device=x.device)
    of_site: dict[Site, list[tuple[int, int]]] = {}
    for row, (site, place) in enumerate(places):
        of_site.setdefault(site, []).append((row, place))

    def add(site: Site, change: Tensor, ways: Tensor) -> None:
        rows, columns = torch.tensor(of_site[site], device=x.device).unbind(1)
        slopes[rows] += change[:, columns].nan_to_num(0.0, 0.0, 0.0).T @ ways

    _watch_changes(model, of_site, x, points, add)
    return slopes


def _watch_changes(
    model: nn.Module,
    sites: Container[Site],
    x: Tensor,
    points: Sequence[Tensor],
    see: Callable[[Site, Tensor, Tensor], None],
) -> None:
    """Show how the values of some sites differ between random points and the images that these were drawn around.

    Args:
        sites: those to look at.
        x: (n, C, H, W) images.
        points: of :func:`random_points` around them.
        see: takes a site, (N, values) the differences at N points, and (N, pixels) the ways from the images to these.
    """
    at_images: dict[Site, Tensor] = {}

    def note(view: View) -> None:
        if view.site in sites:
            values = view.values()
            if view.site not in at_images:
                at_images[view.site] = values.new_zeros(len(x), values.shape[1])
            at_images[view.site][view.rows] = values

    with torch.no_grad():
        watched(model, x, note)
        for points_of_pass in points:
            # The points of a pass go through all images in turn.
            ways = (points_of_pass.view(-1, *x.shape) - x).view(len(points_of_pass), -1)

            def compare(view: View, ways: Tensor = ways) -> None:
                if view.site in at_images:
                    image = torch.arange(view.rows.start, view.rows.stop, device=x.device) % len(x)
                    see(view.site, view.values() - at_images[view.site][image], ways[view.rows])

            watched(model, points_of_pass, compare)


def _measured(task: EvaluationTask, ranges: Ranges, x: Tensor, places: Sequence[Place], slopes: Tensor) -> list[Unit]:
    """Values that one step of eps takes out of their range, in the mean over the images."""
    threat = task.threat
    images = len(x)
    rows = x.repeat_interleave(len(places), dim=0).requires_grad_()
    reader = Reader(task.model, [[place] for place in places] * images, x.device)
    with torch.enable_grad():
        reading = reader.read(rows)
    gradient = reader.gradient(reading, rows, torch.ones_like(reading.values))
    project = threat.projection(rows.detach())

    def ends(way: Tensor, sign: float) -> Tensor:
        """(places,) ``sign`` times each value after the step, in the mean."""
        with torch.no_grad():
            points = project(threat.ascend(rows.detach(), sign * way, float(threat.eps)))
            return sign * reader.read(points).values.view(images, len(places)).mean(dim=0)

    along_slopes = slopes.repeat(images, 1).view_as(rows)
    by_gradient = {sign: ends(gradient, sign) for sign in (1.0, -1.0)}
    by_slopes = {sign: ends(along_slopes, sign) for sign in (1.0, -1.0)}
    units = []
    for row, (site, place) in enumerate(places):
        width = float(ranges.widths(site)[place])
        edge_of_sign = {1.0: float(ranges.high[site][place]), -1.0: -float(ranges.low[site][place])}
        for sign, edge in edge_of_sign.items():
            end, way = float(by_gradient[sign][row]), gradient[row]
            # Where both lead as far, the gradient: it is measured anew at every step.
            along_gradient = end >= float(by_slopes[sign][row]) - 1e-3 * width
            if not along_gradient:
                end, way = float(by_slopes[sign][row]), along_slopes[row]
            gain = end - edge
            if gain > 0 and math.isfinite(gain / width):
                direction = sign * way.detach()
                units.append(Unit(site, place, sign, edge, gain, gain / width, direction, along_gradient))
    return units
