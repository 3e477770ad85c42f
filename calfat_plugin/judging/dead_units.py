"""Gates that no image opens: where they may be, and images of the ball that open them.

relu(w.x - t) with t above w.x for all images passes no gradient, so an attack that follows a loss never comes to where
it is open, and what it does to the answer is not seen. A client of a federation can plant such a gate. It may be
written in many ways (a comparison, a rounding, an index, a maximum), and several may have to open together. But each is
a function of a value that was computed before it, and opens only where this value leaves the range that it has on
images. So names of functions do not matter here. The steps are:

1. ``Watching`` shows the values that the operations of a forward pass are given, and ``measured_ranges`` notes the
   range of each over the images on trial (``watching.py``).
2. ``candidates`` ranks values by how far the ball lets them leave their range (``units.py``).
3. ``climbed`` leads images to where the values of a plan are out of range, and from there along the margin.
4. ``Leaps`` sees whether something opened on the way: a value that left its range by many times the range's width, as
   what comes after a dead unit does, and as nothing does in a network without one.
5. ``Search`` climbs single values first. Those that opened something are climbed two and three at a
   time, and followed by values that only move where they are open. Plans that break images are what :class:`Waking`
   tries on all images.

A value can be compared among images only where it is known which part of a tensor belongs to which image. Where a model
folds its batch into another dimension, or goes through it in a loop, all steps are done once more with ``OneByOne``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from calfat_plugin.datasets.data import pixels
from calfat_plugin.evaluators.base import BudgetedAttack, BudgetOptions
from calfat_plugin.evaluators.gradient import margin
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.judging.units import Reader, Unit, candidates, random_points, same_way
from calfat_plugin.judging.watching import OneByOne, Ranges, View, hides_images, measured_ranges, watched
from calfat_plugin.maths.attacks import attack_mode, input_gradient
from calfat_plugin.maths.passes import fast_passes, float32_as
from calfat_plugin.seeds import generator
from calfat_plugin.threat import ThreatModel, per_example

if TYPE_CHECKING:
    from calfat_plugin.judging.trial import Trial

STEPS = 6  # along the values of a stage, a quarter of eps each: through the whole ball; then as many along the margin
_SHARPNESS = 8.0  # of the weights of a plan's values: the one that is furthest back counts most

#: Stages: the values of each are climbed together, from where the stage before ended.
Plan = tuple[tuple[Unit, ...], ...]


class Climb(NamedTuple):
    """What became of images, a row each."""

    x_adv: Tensor  # the first point on the way that is wrong, else the last
    right: Tensor  # whether the model was right all the way
    opened: Tensor  # where the last stage ended


def climbed(model: nn.Module, threat: ThreatModel, plans: Sequence[Plan], x: Tensor, y: Tensor) -> Climb:
    """Lead each image along the stages of its own plan, and then along the margin, which open gates are now part of.

    Within a stage the value that is furthest back is pushed most, so that all of them are open together at its end.
    """
    readers = []
    for stage in range(max(map(len, plans))):
        stage_of_row = [plan[min(stage, len(plan) - 1)] for plan in plans]
        readers.append(StageReader(model, stage_of_row, x))
    project = threat.projection(x)
    step_size = float(threat.eps) / 4
    point = x.clone()
    x_adv = x.clone()
    opened = x
    right = torch.ones_like(y, dtype=torch.bool)
    along_stages = len(readers) * STEPS
    for step in range(along_stages + STEPS + 1):
        if step == along_stages:
            opened = point
        point = point.detach().requires_grad_()
        with torch.enable_grad():
            if step < along_stages:
                logits, direction = readers[step // STEPS].look(point)
            else:
                logits = model(point)
                direction = input_gradient(-margin(logits, y).sum(), point)
        point = point.detach()
        x_adv = point.where(per_example(right, x), x_adv)
        right = right & (logits.argmax(dim=1) == y)
        point = project(threat.ascend(point, direction.detach(), step_size))
    return Climb(x_adv, right, opened)


class StageReader:
    """The values that each row climbs in one stage, and the direction in which they leave their ranges together."""

    def __init__(self, model: nn.Module, stage: Sequence[tuple[Unit, ...]], x: Tensor) -> None:
        places_of_row = []
        for units in stage:
            places_of_row.append([(unit.site, unit.place) for unit in units])
        self._reader = Reader(model, places_of_row, x.device)
        shape = (len(stage), self._reader.most)
        signs = torch.zeros(shape)
        edges = torch.zeros(shape)
        gains = torch.full(shape, math.inf)  # where a row has fewer values than another
        self._fixed: list[tuple[int, int, Tensor]] = []
        for row, units in enumerate(stage):
            for column, unit in enumerate(units):
                signs[row, column] = unit.sign
                edges[row, column] = unit.edge
                gains[row, column] = unit.gain
                if not unit.along_gradient:
                    self._fixed.append((row, column, unit.sign * unit.way))
        self._signs = signs.to(x.device)
        self._edges = edges.to(x.device)
        self._gains = gains.to(x.device)

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


class Leaps:
    """Whether values leave their ranges by far, at points where a plan ended."""

    def __init__(self, model: nn.Module, ranges: Ranges, points: Sequence[Tensor]) -> None:
        """Ranges are those on images and at random points, so that what any change moves is no leap."""
        self._model = model
        self._ranges = Ranges(dict(ranges.low), dict(ranges.high))
        with torch.no_grad():
            for points_of_pass in points:
                watched(model, points_of_pass, self._ranges.widen)
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


class Effort(NamedTuple):
    """How much is tried.

    These numbers bound the seconds: the number of passes does not grow with the number of images on trial.
    """

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
MOST_PLANS = 3  # that are tried on all images
LEAP = 10.0  # times the width of its range, which a value leaves at once where a gate opens; an honest one: up to 4


class Tried(NamedTuple):
    """A plan and what came of it on a few images."""

    plan: Plan
    broken: int
    opened: Tensor  # (n, C, H, W)
    leaps: Tensor  # (sites,) geometric mean over the images of 1 + leap


class Search:
    """Which plans break images that withstood all attacks so far."""

    def __init__(self, task: EvaluationTask, x: Tensor, y: Tensor, noise: torch.Generator, effort: Effort) -> None:
        """``x`` and ``y`` are some of the images of ``task``, on whose other images ranges are measured, too."""
        self._task = task
        self._x = x[: effort.images]
        self._y = y[: effort.images]
        self._noise = noise
        self._effort = effort
        self._ranges = measured_ranges(task, effort.ranges)
        self._points = random_points(task, self._x, noise, effort.draws)
        self._leaps = Leaps(task.model, self._ranges, self._points)
        self.share_asleep = self._leaps.share_asleep()

    def plans(self) -> list[Plan]:
        """At most ``MOST_PLANS``, what breaks most first."""
        effort = self._effort
        units = candidates(
            self._task, self._ranges, self._x, self._points, effort.looked_at, effort.tried, effort.measured
        )
        plans_of_one = [((unit,),) for unit in units]
        singles = self._tried(plans_of_one, effort.images)
        results = list(singles)
        if not any(2 * tried.broken >= len(self._x) for tried in singles):
            gates = self._gates(singles)
            together: list[Plan] = []
            for several in (*combinations(gates, 2), *combinations(gates, 3)):
                together.append((tuple(gate.plan[0][0] for gate in several),))
            results += self._tried(together, effort.few)
            results += self._chains(gates)
        breaking = []
        for tried in results:
            images = len(tried.opened)
            # An attack from another start may break an image of an honest network: that nothing opened says so.
            if 2 * tried.broken >= images or (tried.broken and float(tried.leaps.max()) > LEAP):
                breaking.append((tried.broken / images, tried.plan))
        breaking.sort(key=lambda share_and_plan: -share_and_plan[0])
        return [plan for _, plan in breaking[:MOST_PLANS]]

    def _tried(self, plans: Sequence[Plan], most_images: int) -> list[Tried]:
        """What comes of each plan, on so many images."""
        x = self._x[:most_images]
        y = self._y[:most_images]
        results = []
        at_once = max(1, self._task.batch_size // len(x))
        for first in range(0, len(plans), at_once):
            part = plans[first : first + at_once]
            plan_of_row = [plan for plan in part for _ in range(len(x))]
            repeated_x = x.repeat(len(part), 1, 1, 1)
            climb = climbed(self._task.model, self._task.threat, plan_of_row, repeated_x, y.repeat(len(part)))
            leaps = (1 + self._leaps.of(climb.opened)).log().view(len(part), len(x), -1).mean(dim=1).exp()
            broken = (~climb.right).view(len(part), len(x)).sum(dim=1).tolist()
            opened = climb.opened.view(len(part), *x.shape)
            for row, plan in enumerate(part):
                results.append(Tried(plan, broken[row], opened[row], leaps[row]))
        return results

    def _gates(self, singles: Sequence[Tried]) -> list[Tried]:
        """Values that opened something, each on a way of its own, what leapt furthest first."""
        gates: list[Tried] = []
        for tried in sorted(singles, key=lambda tried: -float(tried.leaps.max())):
            way = tried.opened - self._x
            new = not any(same_way(way, gate.opened - self._x) for gate in gates)
            if float(tried.leaps.max()) > LEAP and new and len(gates) < GATES:
                gates.append(tried)
        return gates

    def _chains(self, gates: Sequence[Tried]) -> list[Tried]:
        """Plans that first open a gate, and then climb values that could not leave their range before."""
        results: list[Tried] = []
        parents = list(gates[:PARENTS])
        for _ in range(LONGEST - 1):
            children: list[tuple[float, Tried]] = []
            for parent in parents:
                opened = parent.opened[: self._effort.few]
                points = random_points(self._task, opened, self._noise, self._effort.draws)
                links = candidates(
                    self._task, self._ranges, opened, points, LINKS_LOOKED_AT, LINKS, self._effort.measured
                )
                plans = [(*parent.plan, (*parent.plan[-1], link)) for link in links]
                for child in self._tried(plans, self._effort.few):
                    results.append(child)
                    children.append((float((child.leaps / parent.leaps).max()), child))
            children.sort(key=lambda news_and_child: -news_and_child[0])
            parents = [child for news, child in children[:PARENTS] if news > LEAP]
        return results


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
        x_adv = x.clone()
        left = torch.arange(len(y), device=y.device)
        model = task.model
        if self._one_by_one:
            model = OneByOne(model)
        with attack_mode(task.model):
            for plan in self._plans:
                if len(left) == 0:
                    break
                still_right = []
                for part in left.split(min(task.rows_at_once, len(left))):
                    climb = climbed(model, self.threat(task), [plan] * len(part), x[part], y[part])
                    x_adv[part] = climb.x_adv
                    still_right.append(part[climb.right])
                left = torch.cat(still_right)
        return x_adv


class Worst(NamedTuple):
    """What the search gives."""

    plans: list[Plan]  # that break images which withstood every attack so far
    one_by_one: bool  # whether they are plans for ``OneByOne``
    share_asleep: float  # of the values that a batch shows, those that nothing woke

    @property
    def units(self) -> int:
        """How many different values the plans climb."""
        units: set[Unit] = set()
        for plan in self.plans:
            for stage in plan:
                units.update(stage)
        return len(units)


def worst_plans(trial: Trial) -> Worst:
    """Of the values of batches; and if these break nothing and are not all, of those of one image at a time."""
    task = trial.task
    left = trial.robust.nonzero().squeeze(1)
    order = torch.randperm(len(left), generator=generator(task.seed, "trust/dead units", extra=1))
    chosen = left[order[: IN_BATCHES.images]].sort().values
    few = task.data.subset(chosen.numpy()).to(task.device)
    x = pixels(few.x)
    noise = generator(task.seed, "trust/dead units")
    # As where Waking attacks: another layout of the weights may mean other operations.
    with attack_mode(task.model), float32_as("fp32", task.device), fast_passes(task.model, x):
        search = Search(task, x, few.y, noise, IN_BATCHES)
        plans = search.plans()
        if plans or not hides_images(task.model, x, task.batch_size):
            return Worst(plans, False, search.share_asleep)
        one_by_one = replace(task, model=OneByOne(task.model))
        alone = Search(one_by_one, x, few.y, noise, ONE_BY_ONE)
        return Worst(alone.plans(), True, search.share_asleep)
