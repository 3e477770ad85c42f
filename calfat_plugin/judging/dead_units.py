"""Gates that no image opens: where they may be, and images of the ball that open them.

relu(w.x - t) with t above w.x for all images passes no gradient, so an attack that follows a loss never comes to where
it is open, and what it does to the answer is not seen. A client of a federation can plant such a gate. It may be
written in many ways (a comparison, a rounding, an index, a maximum), and several may have to open together. But each is
a function of a value that was computed before it, and opens only where this value leaves the range that it has on
images. So names of functions do not matter here. The steps, in the order of ``watching.py`` and of this file:

1. ``Watching`` shows the values that the operations of a forward pass are given, and ``measured_ranges`` notes the
   range of each over the images on trial.
2. ``candidates`` ranks values by how far the ball lets them leave their range.
3. ``climbed`` leads images to where the values of a plan are out of range, and from there along the margin.
4. ``Leaps`` sees whether something opened on the way: a value that left its range by many times the range's width, as
   what comes after a dead unit does, and as nothing does in a network without one.
5. ``Search`` climbs single values first. Those that opened something are climbed two and three at a time, and followed
   by values that only move where they are open. Plans that break images are what :class:`Waking` tries on all images.

A value can be compared among images only where it is known which part of a tensor belongs to which image. Where a model
folds its batch into another dimension, or goes through it in a loop, all steps are done once more with ``OneByOne``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from calfat_plugin.datasets.data import pixels
from calfat_plugin.evaluators.base import BudgetedAttack, BudgetOptions
from calfat_plugin.evaluators.gradient import margin
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.judging.watching import (
    OneByOne,
    Part,
    Ranges,
    Site,
    View,
    hides_images,
    measured_ranges,
    watched,
)
from calfat_plugin.maths.attacks import attack_mode, input_gradient
from calfat_plugin.maths.passes import fast_passes
from calfat_plugin.maths.precision import float32_as
from calfat_plugin.seeds import generator
from calfat_plugin.threat import ThreatModel, per_example

if TYPE_CHECKING:
    from calfat_plugin.judging.trial import Trial


# How much is tried. These bound the seconds: their number of passes does not grow with the number of images on trial.
class Effort(NamedTuple):
    """How much of a model is tried."""

    images: int  # on which single values are climbed
    few: int  # of them, on which several values are climbed together
    draws: int  # random points of the ball around each of them
    looked_at: int  # values whose way out of their range is measured
    measured: int  # images on which it is
    tried: int  # values that are climbed
    ranges: int | None  # images on which ranges are measured; None: all


IN_BATCHES = Effort(images=6, few=4, draws=64, looked_at=256, measured=3, tried=48, ranges=None)
ONE_BY_ONE = Effort(images=3, few=2, draws=32, looked_at=96, measured=2, tried=16, ranges=256)  # its passes take longer
GATES = 8  # of those that opened something, how many are climbed two and three at a time
PARENTS = 6  # plans that opened something, for which what they lead to is looked for
LINKS = 6  # values that are looked for behind each of them
LINKS_LOOKED_AT = 64  # of so many
LONGEST = 3  # gates behind one another
KEPT = 3  # plans that are tried on all images
STEPS = 6  # along the values of a stage, a quarter of eps each: through the whole ball; then as many along the margin
LEAP = 10.0  # times the width of its range, which a value leaves at once where a gate opens; an honest one: up to 4
_SAME_WAY = 0.9  # cosine of two ways through the ball from which on they count as one
_SHARPNESS = (
    8.0  # of the weights with which the values of a plan are climbed: the one that is furthest back counts most
)


# --- values that can leave their range --------------------------------------------------------------------------------


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


Place = tuple[Site, int]


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
            shown = (rows >= view.rows.start) & (rows < view.rows.stop)
            if shown.any():
                rows, columns, places = rows[shown], columns[shown], places[shown]
                values[rows, columns] = view.values()[rows - view.rows.start, places]
                parts.setdefault(view.site, []).extend(view.parts())

        logits = watched(self._model, x, note)
        return Reading(logits, values, parts)

    def gradient(self, reading: Reading, x: Tensor, weights: Tensor) -> Tensor:
        """Of the sum of ``weights``, of the shape of the values, times the values; by x."""
        edges: list[GradientEdge] = []
        seeds: list[Tensor] = []
        for site, parts in reading.parts.items():
            rows, columns, places = self._where[site]
            seed = torch.zeros(len(x), site.numbers + site.channels, device=x.device)
            seed.index_put_((rows, places), weights[rows, columns], accumulate=True)
            numbers = seed[:, : site.numbers]
            if site.channels:
                size_of_map = site.numbers // site.channels
                numbers = numbers + (seed[:, site.numbers :] / size_of_map).repeat_interleave(size_of_map, dim=1)
            for part in parts:
                if part.edge is not None:
                    edges.append(part.edge)
                    values = (part.sign * numbers[part.rows]).view(-1, *site.shape)
                    if part.image_dimension is None:  # one image, and no dimension for it
                        seeds.append(values[0])
                    else:
                        seeds.append(values.movedim(0, part.image_dimension))
        if not edges:
            return torch.zeros_like(x)
        try:
            (gradient,) = torch.autograd.grad(edges, x, grad_outputs=seeds, allow_unused=True)
        except RuntimeError:  # a model that computes gradients itself has freed what they need; random points are left
            return torch.zeros_like(x)
        return torch.zeros_like(x) if gradient is None else gradient.nan_to_num(0.0)


def random_points(trial: Trial, x: Tensor, noise: torch.Generator, draws: int) -> list[Tensor]:
    """So many points of the ball around each of the images, (n * some draws, C, H, W) for each pass."""
    at_once = max(1, trial.batch_size // len(x))
    points = []
    for first in range(0, draws, at_once):
        repeated = x.repeat(min(at_once, draws - first), 1, 1, 1)
        points.append(trial.threat.random_start(repeated, noise))
    return points


def candidates(
    trial: Trial, ranges: Ranges, x: Tensor, points: Sequence[Tensor], looked_at: int, most: int, measured: int
) -> list[Unit]:
    """At most so many values that leave their ranges in the ball around x, those first that leave them furthest.

    All values are rated by how far random points move them. For ``looked_at`` of them, about as many of each site,
    steps of eps are made, from so many images as are ``measured``.
    """
    moves = _moves(trial.model, ranges, x, points)
    of_each_site = max(2, looked_at // max(1, len(moves)))
    rated: list[tuple[float, Place]] = []
    for site, move in moves.items():
        rating = (move / ranges.widths(site)).masked_fill(move <= ranges.rounding(site), 0.0).nan_to_num(0.0, 0.0, 0.0)
        best = rating.topk(min(of_each_site, len(rating)))
        for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if value > 0:
                rated.append((value, (site, place)))
    rated.sort(key=lambda rating_of_place: -rating_of_place[0])
    places = [place for _, place in rated[:looked_at]]
    slopes = _slopes(trial.model, places, x, points)
    units = []
    some = x[:measured]
    at_once = max(1, trial.batch_size // len(some))
    for first in range(0, len(places), at_once):
        part = slice(first, first + at_once)
        units += _measured(trial, ranges, some, places[part], slopes[part])
    units.sort(key=lambda unit: -unit.score)
    different: list[Unit] = []
    for unit in units:
        if len(different) < most and not any(_same_way(unit.way, other.way) for other in different):
            different.append(unit)
    return different


def _same_way(way: Tensor, other: Tensor) -> bool:
    return float(functional.cosine_similarity(way.flatten(), other.flatten(), dim=0)) > _SAME_WAY


def _moves(model: nn.Module, ranges: Ranges, x: Tensor, points: Sequence[Tensor]) -> dict[Site, Tensor]:
    """Root mean square by which each value differs at random points around x from what it is at x."""
    at_images: dict[Site, Tensor] = {}
    squares: dict[Site, Tensor] = {}

    def note_images(view: View) -> None:
        if view.site in ranges.low:
            _keep(at_images, view, len(x))

    def note_points(view: View) -> None:
        before = at_images.get(view.site)
        if before is not None:
            change = view.values() - before[_images_of(view, len(x), x.device)]
            squares[view.site] = squares.get(view.site, 0.0) + change.square().sum(dim=0)

    with torch.no_grad():
        watched(model, x, note_images)
        for some in points:
            watched(model, some, note_points)
    number = sum(map(len, points))
    return {site: (total / number).sqrt() for site, total in squares.items()}


def _keep(values_at_images: dict[Site, Tensor], view: View, images: int) -> None:
    """What a view shows of its images, in the rows of a table of all of them."""
    values = view.values()
    if view.site not in values_at_images:
        values_at_images[view.site] = values.new_zeros(images, values.shape[1])
    values_at_images[view.site][view.rows] = values


def _images_of(view: View, images: int, device: torch.device) -> Tensor:
    """Around which image each random point was drawn that a view shows; a batch goes through all of them in turn."""
    return torch.arange(view.rows.start, view.rows.stop, device=device) % images


def _slopes(model: nn.Module, places: Sequence[Place], x: Tensor, points: Sequence[Tensor]) -> Tensor:
    """(places, pixels) what random points around x say about the gradient of values, up to a factor.

    For a value that was detached, rounded or given a gradient that is not its own there is nothing better.
    """
    slopes = torch.zeros(len(places), x[0].numel(), device=x.device)
    of_site: dict[Site, list[tuple[int, int]]] = {}
    for row, (site, place) in enumerate(places):
        of_site.setdefault(site, []).append((row, place))
    at_images: dict[Site, Tensor] = {}

    def note_images(view: View) -> None:
        if view.site in of_site:
            _keep(at_images, view, len(x))

    with torch.no_grad():
        watched(model, x, note_images)
        for some in points:
            steps = (some.view(-1, *x.shape) - x).view(len(some), -1)

            def note_points(view: View, steps: Tensor = steps) -> None:
                before = at_images.get(view.site)
                if before is not None:
                    rows, at = torch.tensor(of_site[view.site], device=x.device).unbind(1)
                    change = (view.values() - before[_images_of(view, len(x), x.device)])[:, at]
                    slopes[rows] += change.nan_to_num(0.0, 0.0, 0.0).T @ steps[view.rows]

            watched(model, some, note_points)
    return slopes


def _measured(trial: Trial, ranges: Ranges, x: Tensor, places: Sequence[Place], slopes: Tensor) -> list[Unit]:
    """Values that one step of eps takes out of their range, in the mean over the images."""
    threat, images = trial.threat, len(x)
    rows = x.repeat_interleave(len(places), dim=0).requires_grad_()
    reader = Reader(trial.model, [[place] for place in places] * images, x.device)
    with torch.enable_grad():
        reading = reader.read(rows)
    gradient = reader.gradient(reading, rows, torch.ones_like(reading.values))
    project = threat.projection(rows.detach())
    ways = {True: gradient, False: slopes.repeat(images, 1).view_as(rows)}
    ends: dict[tuple[bool, float], Tensor] = {}
    with torch.no_grad():
        for along_gradient, way in ways.items():
            for sign in (1.0, -1.0):
                end = project(threat.ascend(rows.detach(), sign * way, float(threat.eps)))
                values = reader.read(end).values.view(images, len(places))
                ends[along_gradient, sign] = sign * values.mean(dim=0)
    units = []
    for row, (site, place) in enumerate(places):
        width = float(ranges.widths(site)[place])
        for sign in (1.0, -1.0):
            edge = float(ranges.high[site][place]) if sign > 0 else -float(ranges.low[site][place])
            by_gradient, by_slope = float(ends[True, sign][row]), float(ends[False, sign][row])
            # Where both lead as far, the gradient: it is measured anew at every step.
            along_gradient = by_gradient >= by_slope - 1e-3 * width
            gain = (by_gradient if along_gradient else by_slope) - edge
            if gain > 0 and math.isfinite(gain / width):
                way = sign * ways[along_gradient][row].detach()
                units.append(Unit(site, place, sign, edge, gain, gain / width, way, along_gradient))
    return units


# --- climbing ---------------------------------------------------------------------------------------------------------


#: Stages: the values of each are climbed together, from where the stage before ended.
Plan = tuple[tuple[Unit, ...], ...]


class Climb(NamedTuple):
    """What became of images, a row each."""

    found: Tensor  # the first point on the way that is wrong, else the last
    right: Tensor  # whether the model was right all the way
    opened: Tensor  # where the last stage ended


def climbed(model: nn.Module, threat: ThreatModel, plans: Sequence[Plan], x: Tensor, y: Tensor) -> Climb:
    """Lead each image along the stages of its own plan, and then along the margin, which open gates are now part of.

    Within a stage the value that is furthest back is pushed most, so that all of them are open together at its end.
    """
    stages = max(map(len, plans))
    readers = [_StageReader(model, [plan[min(stage, len(plan) - 1)] for plan in plans], x) for stage in range(stages)]
    project, step_size = threat.projection(x), float(threat.eps) / 4
    point, found, opened = x.clone(), x.clone(), x
    right = torch.ones_like(y, dtype=torch.bool)
    climbs = stages * STEPS
    for step in range(climbs + STEPS + 1):
        if step == climbs:
            opened = point
        point = point.detach().requires_grad_()
        with torch.enable_grad():
            if step < climbs:
                logits, direction = readers[step // STEPS].look(point)
            else:
                logits = model(point)
                direction = input_gradient(-margin(logits, y).sum(), point)
        point = point.detach()
        found = point.where(per_example(right, x), found)
        right = right & (logits.argmax(dim=1) == y)
        point = project(threat.ascend(point, direction.detach(), step_size))
    return Climb(found, right, opened)


class _StageReader:
    """The values that each row climbs in one stage, and the direction in which they leave their ranges together."""

    def __init__(self, model: nn.Module, stage: Sequence[tuple[Unit, ...]], x: Tensor) -> None:
        self._reader = Reader(model, [[(unit.site, unit.place) for unit in units] for units in stage], x.device)
        shape = (len(stage), self._reader.most)
        self._signs, self._edges = torch.zeros(shape), torch.zeros(shape)
        self._gains = torch.full(shape, math.inf)  # where a row has fewer values than another
        self._fixed: list[tuple[int, int, Tensor]] = []
        for row, units in enumerate(stage):
            for column, unit in enumerate(units):
                self._signs[row, column] = unit.sign
                self._edges[row, column] = unit.edge
                self._gains[row, column] = unit.gain
                if not unit.along_gradient:
                    self._fixed.append((row, column, unit.sign * unit.way))
        self._signs, self._edges, self._gains = (
            table.to(x.device) for table in (self._signs, self._edges, self._gains)
        )

    def look(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The logits at x, and the direction."""
        reading = self._reader.read(x)
        progress = (self._signs * reading.values - self._edges) / self._gains
        urgency = (-_SHARPNESS * progress).masked_fill(self._gains.isinf(), -math.inf).softmax(dim=1)
        weights = self._signs * urgency / self._gains
        direction = self._reader.gradient(reading, x, weights.nan_to_num(0.0))
        for row, column, way in self._fixed:
            direction[row] = direction[row] + weights[row, column] * way
        return reading.logits, direction


# --- the search -------------------------------------------------------------------------------------------------------


class Leaps:
    """Whether values leave their ranges by far, at points where a plan ended."""

    def __init__(self, model: nn.Module, ranges: Ranges, points: Sequence[Tensor]) -> None:
        """Ranges are those on images and at random points, so that what any change moves is no leap."""
        self._model = model
        self._ranges = Ranges(dict(ranges.low), dict(ranges.high))
        with torch.no_grad():
            for some in points:
                watched(model, some, self._ranges.widen)
        self._sites = list(ranges.low)

    def share_asleep(self) -> float:
        """The share of values that are the same on all images and at all random points."""
        asleep = total = 0
        for site in self._sites:
            width = self._ranges.high[site] - self._ranges.low[site]
            asleep += int((width <= self._ranges.rounding(site)).sum())
            total += len(width)
        return asleep / total

    def of(self, x: Tensor) -> Tensor:
        """(N, sites) by how many widths of its range a value of the site leaves it, the one that does most."""
        leaps = torch.zeros(len(x), len(self._sites), device=x.device)
        column = {site: number for number, site in enumerate(self._sites)}

        def note(view: View) -> None:
            if view.site in column:
                values = view.values()
                beyond = torch.maximum(values - self._ranges.high[view.site], self._ranges.low[view.site] - values)
                widths = beyond / self._ranges.widths(view.site)
                leaps[view.rows, column[view.site]] = widths.nan_to_num(0.0, 1e30, 0.0).clamp(0.0, 1e30).amax(dim=1)

        with torch.no_grad():
            watched(self._model, x, note)
        return leaps


class Tried(NamedTuple):
    """A plan and what came of it on a few images."""

    plan: Plan
    broken: int
    opened: Tensor  # (n, C, H, W)
    leaps: Tensor  # (sites,) geometric mean over the images of 1 + leap


class Search:
    """Which plans break images that withstood all attacks so far."""

    def __init__(self, trial: Trial, x: Tensor, y: Tensor, noise: torch.Generator, effort: Effort) -> None:
        x, y = x[: effort.images], y[: effort.images]
        self._trial, self._x, self._y, self._noise, self._effort = trial, x, y, noise, effort
        self._ranges = measured_ranges(trial, effort.ranges)
        self._points = random_points(trial, x, noise, effort.draws)
        self._leaps = Leaps(trial.model, self._ranges, self._points)
        self.share_asleep = self._leaps.share_asleep()

    def plans(self) -> list[Plan]:
        """At most ``KEPT``, what breaks most first."""
        effort = self._effort
        units = candidates(
            self._trial, self._ranges, self._x, self._points, effort.looked_at, effort.tried, effort.measured
        )
        singles = self._tried([((unit,),) for unit in units], effort.images)
        every = list(singles)
        if not any(2 * tried.broken >= len(self._x) for tried in singles):
            gates = self._gates(singles)
            together: list[Plan] = []
            for several in (*combinations(gates, 2), *combinations(gates, 3)):
                together.append((tuple(tried.plan[0][0] for tried in several),))
            every += self._tried(together, effort.few)
            every += self._chains(gates)
        breaking = []
        for tried in every:
            images = len(tried.opened)
            # An attack from another start may break an image of an honest network: that nothing opened says so.
            if 2 * tried.broken >= images or (tried.broken and float(tried.leaps.max()) > LEAP):
                breaking.append((tried.broken / images, tried.plan))
        breaking.sort(key=lambda share_and_plan: -share_and_plan[0])
        return [plan for _, plan in breaking[:KEPT]]

    def _tried(self, plans: Sequence[Plan], most_images: int) -> list[Tried]:
        x, y = self._x[:most_images], self._y[:most_images]
        results = []
        at_once = max(1, self._trial.batch_size // len(x))
        for first in range(0, len(plans), at_once):
            part = plans[first : first + at_once]
            rows = [plan for plan in part for _ in range(len(x))]
            climb = climbed(
                self._trial.model, self._trial.threat, rows, x.repeat(len(part), 1, 1, 1), y.repeat(len(part))
            )
            leaps = (1 + self._leaps.of(climb.opened)).log().view(len(part), len(x), -1).mean(dim=1).exp()
            broken = (~climb.right).view(len(part), len(x)).sum(dim=1).tolist()
            opened = climb.opened.view(len(part), *x.shape)
            results += [Tried(*result) for result in zip(part, broken, opened, leaps, strict=True)]
        return results

    def _gates(self, singles: Sequence[Tried]) -> list[Tried]:
        """Values that opened something, each on a way of its own, what leapt furthest first."""
        gates: list[Tried] = []
        for tried in sorted(singles, key=lambda tried: -float(tried.leaps.max())):
            way = tried.opened - self._x
            new = not any(_same_way(way, gate.opened - self._x) for gate in gates)
            if float(tried.leaps.max()) > LEAP and new and len(gates) < GATES:
                gates.append(tried)
        return gates

    def _chains(self, gates: Sequence[Tried]) -> list[Tried]:
        """Plans that first open a gate, and then climb values that could not leave their range before."""
        every: list[Tried] = []
        parents = list(gates[:PARENTS])
        for _ in range(LONGEST - 1):
            children: list[tuple[float, Tried]] = []
            for parent in parents:
                opened = parent.opened[: self._effort.few]
                points = random_points(self._trial, opened, self._noise, self._effort.draws)
                links = candidates(
                    self._trial, self._ranges, opened, points, LINKS_LOOKED_AT, LINKS, self._effort.measured
                )
                plans = [(*parent.plan, (*parent.plan[-1], link)) for link in links]
                for child in self._tried(plans, self._effort.few):
                    every.append(child)
                    children.append((float((child.leaps / parent.leaps).max()), child))
            children.sort(key=lambda news_and_child: -news_and_child[0])
            parents = [child for news, child in children[:PARENTS] if news > LEAP]
        return every


class Waking(BudgetedAttack):
    """Follows one plan after the other; what is broken is not attacked again."""

    def __init__(self, plans: Sequence[Plan], one_by_one: bool) -> None:
        """Plans that were found with ``OneByOne`` speak of the values that it shows."""
        super().__init__(BudgetOptions())
        self._plans = plans
        self._one_by_one = one_by_one

    def settings(self, task: EvaluationTask) -> dict[str, Any]:
        return {"attack": "dead units", "units": len(self._plans), "steps": STEPS, "batch_size": task.batch_size}

    def craft(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: torch.Generator) -> Tensor:
        found, left = x.clone(), torch.arange(len(y), device=y.device)
        model = OneByOne(task.model) if self._one_by_one else task.model
        with attack_mode(task.model):
            for plan in self._plans:
                if len(left) == 0:
                    break
                still_right = []
                for part in left.split(min(task.rows_at_once, len(left))):
                    climb = climbed(model, self.threat(task), [plan] * len(part), x[part], y[part])
                    found[part] = climb.found
                    still_right.append(part[climb.right])
                left = torch.cat(still_right)
        return found


class Worst(NamedTuple):
    """What the search gives."""

    plans: list[Plan]  # that break images which withstood every attack so far
    one_by_one: bool  # whether they are plans for ``OneByOne``
    share_asleep: float  # of the values that a batch shows, those that nothing woke


def worst_plans(trial: Trial) -> Worst:
    """Of the values of batches; and if these break nothing and are not all, of those of one image at a time."""
    left = trial.robust.nonzero().squeeze(1)
    order = torch.randperm(len(left), generator=generator(trial.seed, "trust/dead units", extra=1))
    some = left[order[: IN_BATCHES.images]].sort().values
    few = trial.data.subset(some.numpy()).to(trial.device)
    x, noise = pixels(few.x), generator(trial.seed, "trust/dead units")
    # As where Waking attacks: another layout of the weights may mean other operations.
    with attack_mode(trial.model), float32_as("fp32", trial.device), fast_passes(trial.model, x):
        search = Search(trial, x, few.y, noise, IN_BATCHES)
        plans = search.plans()
        if plans or not hides_images(trial.model, x, trial.batch_size):
            return Worst(plans, False, search.share_asleep)
        watched_alone = copy.copy(trial)
        watched_alone.model = OneByOne(trial.model)
        alone = Search(watched_alone, x, few.y, noise, ONE_BY_ONE)
        return Worst(alone.plans(), True, search.share_asleep)
