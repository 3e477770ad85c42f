"""How images are led to where dead units are awake, and how to see that something woke.

Steps 3 and 4 of the search for dead units; ``dead_units.py`` says what it is for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from calfat_plugin.evaluators.gradient import margin
from calfat_plugin.judging.units import Reader, Unit
from calfat_plugin.judging.watching import Ranges, View, watched
from calfat_plugin.maths.attacks import input_gradient
from calfat_plugin.threat import ThreatModel, per_example

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
        readers.append(StageReader(model, [plan[min(stage, len(plan) - 1)] for plan in plans], x))
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
        self._reader = Reader(model, [[(unit.site, unit.place) for unit in units] for units in stage], x.device)
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
