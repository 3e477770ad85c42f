"""Gates that no image opens: where they may be, and images of the ball that open them.

relu(w.x - t) with t above w.x for all images passes no gradient, so an attack that follows a loss never comes to where
it is open, and what it does to the answer is not seen. A client of a federation can plant such a gate. It may be
written in many ways (a comparison, a rounding, an index, a maximum), and several may have to open together. But each is
a function of a value that was computed before it, and opens only where this value leaves the range that it has on
images. So names of functions do not matter here. The steps are:

1. ``Watching`` shows the values that the operations of a forward pass are given, and ``measured_ranges`` notes the
   range of each over the images on trial (``watching.py``).
2. ``candidates`` ranks values by how far the ball lets them leave their range (``units.py``).
3. ``climbed`` leads images to where the values of a plan are out of range, and from there along the margin
   (``climbing.py``).
4. ``Leaps`` sees whether something opened on the way: a value that left its range by many times the range's width, as
   what comes after a dead unit does, and as nothing does in a network without one (``climbing.py``).
5. ``Search``, in this file, climbs single values first. Those that opened something are climbed two and three at a
   time, and followed by values that only move where they are open. Plans that break images are what :class:`Waking`
   tries on all images.

A value can be compared among images only where it is known which part of a tensor belongs to which image. Where a model
folds its batch into another dimension, or goes through it in a loop, all steps are done once more with ``OneByOne``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from calfat_plugin.datasets.data import pixels
from calfat_plugin.evaluators.base import BudgetedAttack, BudgetOptions
from calfat_plugin.interfaces import EvaluationTask
from calfat_plugin.judging.climbing import STEPS, Leaps, Plan, climbed
from calfat_plugin.judging.units import Unit, candidates, random_points, same_way
from calfat_plugin.judging.watching import OneByOne, hides_images, measured_ranges
from calfat_plugin.maths.attacks import attack_mode
from calfat_plugin.maths.passes import fast_passes, float32_as
from calfat_plugin.seeds import generator

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
        """At most ``KEPT``, what breaks most first."""
        effort = self._effort
        units = candidates(
            self._task, self._ranges, self._x, self._points, effort.looked_at, effort.tried, effort.measured
        )
        singles = self._tried([((unit,),) for unit in units], effort.images)
        every = list(singles)
        if not any(2 * tried.broken >= len(self._x) for tried in singles):
            gates = self._gates(singles)
            every += self._tried(_together(gates), effort.few)
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
        every: list[Tried] = []
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
                    every.append(child)
                    children.append((float((child.leaps / parent.leaps).max()), child))
            children.sort(key=lambda news_and_child: -news_and_child[0])
            parents = [child for news, child in children[:PARENTS] if news > LEAP]
        return every


def _together(gates: Sequence[Tried]) -> list[Plan]:
    """Plans that climb the values of two and of three gates at once."""
    plans: list[Plan] = []
    for several in (*combinations(gates, 2), *combinations(gates, 3)):
        plans.append((tuple(tried.plan[0][0] for tried in several),))
    return plans


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
