"""The robust rules of docs/methods.md 7.6 on a table of displacements, one row a client, in plain loops."""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Any

Row = list[float]


def robust(rule: str, rows: list[Row], mix: dict[str, Any], center: Row) -> Row:
    """What a rule makes of the rows; ``center``: of the last round, for centered clipping."""
    n, f = len(rows), mix.get("f", 1)
    columns = list(zip(*rows, strict=True))
    if rule == "median":
        return [median(column) for column in columns]
    if rule == "trimmed_mean":
        return [fmean(sorted(column)[f : n - f]) for column in columns]
    if rule == "krum":
        return min(rows, key=lambda row: score(row, rows, f))
    if rule == "multi_krum":
        best = sorted(rows, key=lambda row: score(row, rows, f))[: n - f]
        return [fmean(column) for column in zip(*best, strict=True)]
    if rule == "bulyan":
        left, chosen = list(rows), []
        while len(chosen) < n - 2 * f:
            chosen.append(left.pop(min(range(len(left)), key=lambda i: score(left[i], left, f))))
        return [fmean(nearest(column, n - 4 * f)) for column in zip(*chosen, strict=True)]
    if rule == "geometric_median":
        z = [0.0] * len(columns)
        for _ in range(3):
            pull = [1 / max(1e-6, math.dist(row, z)) for row in rows]
            z = [sum(p * value for p, value in zip(pull, column, strict=True)) / sum(pull) for column in columns]
        return z
    start = center if rule == "centered_clipping" else [0.0] * len(columns)
    far = [math.dist(row, start) for row in rows]
    shrink = [min(1.0, median(far) / d) for d in far]
    clipped = [[k * (v - c) for v, c in zip(row, start, strict=True)] for k, row in zip(shrink, rows, strict=True)]
    return [c + fmean(move) for c, move in zip(start, zip(*clipped, strict=True), strict=True)]


def score(own: Row, rows: list[Row], f: int) -> float:
    """Krum's: the sum of the squared distances to the n - f - 2 nearest others."""
    others = sorted(math.dist(own, row) ** 2 for row in rows)[1:]
    return sum(others[: max(1, len(rows) - f - 2)])


def nearest(column: tuple[float, ...], count: int) -> list[float]:
    """The values nearest to their median."""
    middle = median(column)
    return sorted(column, key=lambda value: abs(value - middle))[:count]
