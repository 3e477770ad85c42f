"""The section ``choose`` of a suite: which values each cell tries, and by what the best is told."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from calfat_plugin.errors import did_you_mean, listed
from calfat_plugin.options import describe
from calfat_plugin.recipe.document import Document, KeyPath, dotted
from calfat_plugin.suites.parts import check_selector, grid, mapping_at, overlap, same_or_below, seeds_at, settings_at
from calfat_plugin.suites.schema import Axes, Choose, Grid, Selector, Setting

AT: KeyPath = ("choose",)
MOST_TRIES = 100  # of a cell; a product of grids grows fast
KEYS = ("metric", "by", "seeds", "finalists", "grid", "own", "extend")
LEAST_FACTOR, MOST_FACTOR = 1.1, 100.0  # with two digits, a value times less may be itself
_WAYS = ("last", "best")
_EXAMPLE = "{train_args.learning_rate: [0.02, 0.05, 0.1]}"
_METRIC = "an evaluator such as pgd20, or several such as mean(natural, pgd20)"
_MEAN = re.compile(r"mean\((.*)\)")
_WHAT_IS_MEASURED: tuple[KeyPath, ...] = (
    ("data_args",),
    *(("calfat", key) for key in ("dataset", "partition", "evaluators", "monitor", "evaluation", "reported")),
    *(("calfat", "threat", key) for key in ("norm", "eps")),
)


def parse_choose(document: Document, axes: Axes, settings: Sequence[Setting]) -> Choose | None:
    """Check the structure of ``choose``; recipes and evaluators are looked up by ``plan``.

    Args:
        document: the suite.
        axes: its grid.
        settings: what its section ``set`` sets.

    Returns:
        None where the suite has no such section.

    Raises:
        RecipeError: with file, line, key, what was found and what was wanted.
    """
    if document.get(AT) is None:
        return None
    for key in mapping_at(document, AT, f"{{metric: pgd20, seeds: [100], grid: {_EXAMPLE}}}"):
        if key not in KEYS:
            raise document.error((*AT, key), "unknown key." + (did_you_mean(key, KEYS) or f" Known: {listed(KEYS)}."))
    choose = Choose(
        metric=_metric(document),
        by=_way(document),
        seeds=seeds_at(document, (*AT, "seeds")),
        grid=_grid(document, (*AT, "grid")),
        own=_own(document, axes),
        finalists=_finalists(document),
    )
    choose = replace(choose, extend=_extend(document, choose))
    in_axes = [(f"axes.{axis}", each) for axis in axes for changes in axes[axis].values() for each in changes]
    _refuse_set_elsewhere(document, choose, [("set", each) for each in settings] + in_axes)
    _check_sizes(document, choose, grid(axes))
    return choose


def _metric(document: Document) -> tuple[str, ...]:
    path = (*AT, "metric")
    raw = document.get(path)
    mean = _MEAN.fullmatch(raw.strip()) if isinstance(raw, str) else None
    labels = [label.strip() for label in (mean[1].split(",") if mean else [str(raw)])]
    if not isinstance(raw, str) or not all(labels) or len(set(labels)) < len(labels):
        raise document.error(path, f"got {describe(raw)}, expected {_METRIC}.")
    return tuple(labels)


def _way(document: Document) -> str:
    path = (*AT, "by")
    way = document.get(path) if document.has(path) else _WAYS[0]
    if way not in _WAYS:
        raise document.error(
            path, f"got {describe(way)}, expected last (the last round's value) or best (any round's)."
        )
    return str(way)


def _finalists(document: Document) -> int | None:
    path = (*AT, "finalists")
    if not document.has(path):
        return None
    number = document.get(path)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise document.error(
            path, f"got {describe(number)}, expected how many values reach the seeds after the first, >= 1."
        )
    if len(seeds_at(document, (*AT, "seeds"))) == 1:
        raise document.error(path, "there is one seed only, so there is no final; add seeds, or remove this key.")
    return number


def _grid(document: Document, path: KeyPath) -> Grid:
    """Key to its settings, one a value."""
    found: dict[KeyPath, tuple[Setting, ...]] = {}
    for setting in settings_at(document, path):
        at = (*path, setting.key)
        if any(overlap(setting.path, measured) for measured in _WHAT_IS_MEASURED):
            raise document.error(
                at, "this key changes what is measured, so its values could not be compared; remove it."
            )
        values = setting.value
        if not isinstance(values, list) or not values:
            wanted = "expected a list of the values to try, such as [0.02, 0.05, 0.1]."
            raise document.error(at, f"got {'an empty list' if values == [] else describe(values)}, {wanted}")
        found[setting.path] = tuple(
            Setting(setting.path, value, document.place((*at, index))) for index, value in enumerate(values)
        )
    if not found:
        raise document.error(path, f"there is nothing to try; expected a mapping such as {_EXAMPLE}.")
    return found


def _own(document: Document, axes: Axes) -> dict[Selector, Grid]:
    path = (*AT, "own")
    found = {}
    for text in mapping_at(document, path, "{CalFAT: {calfat.trainer.prior_weight: [0.1, 1]}}"):
        selector = Selector(text)
        if problem := check_selector(selector, axes):
            raise document.error((*path, text), problem)
        found[selector] = _grid(document, (*path, text))
    return found


def _extend(document: Document, choose: Choose) -> dict[KeyPath, float]:
    path = (*AT, "extend")
    found: dict[KeyPath, float] = {}
    tried = [grid[key] for grid in (choose.grid, *choose.own.values()) for key in grid]
    for setting in settings_at(document, path):
        at = (*path, setting.key)
        values = [each for grid in tried for each in grid if each.path == setting.path]
        if not values:
            known = dict.fromkeys(dotted(grid[0].path) for grid in tried)
            raise document.error(at, f"no grid has this key.{did_you_mean(setting.key, known)} Known: {listed(known)}.")
        factor = setting.value
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not LEAST_FACTOR <= factor <= MOST_FACTOR:
            wanted = f"expected a factor, {LEAST_FACTOR:g} <= value <= {MOST_FACTOR:g}"
            raise document.error(at, f"got {describe(factor)}, {wanted}: from an end of the grid to the next value.")
        for each in values:
            if isinstance(each.value, bool) or not isinstance(each.value, int | float) or each.value <= 0:
                what = f"the grid tries {describe(each.value)} ({each.place}); only numbers above 0 have a next one."
                raise document.error(at, f"{what} Remove this key, or that value.")
        found[setting.path] = float(factor)
    return found


def _refuse_set_elsewhere(document: Document, choose: Choose, elsewhere: Iterable[tuple[str, Setting]]) -> None:
    """A value is chosen or given, not both; a part of a given value, such as a trainer's constant, may be chosen."""
    grids = [(("grid",), choose.grid), *((("own", selector.text), grid) for selector, grid in choose.own.items())]
    for (place, given), (where, tried) in itertools.product(elsewhere, grids):
        for key in tried:
            if same_or_below(key, given.path):
                what = f"'{given.key}' is set in {place} ({given.place}), too; remove it in one of the two places."
                raise document.error((*AT, *where, dotted(key)), what)


def _check_sizes(document: Document, choose: Choose, cells: Iterable[tuple[str, ...]]) -> None:
    for labels in cells:
        keys = choose.grid_of(labels)
        for first, second in itertools.combinations(keys, 2):
            if overlap(first, second):
                what = (
                    f"the cell '{'/'.join(labels)}' would try '{dotted(first)}' and '{dotted(second)}', which overlap."
                )
                raise document.error(AT, f"{what} Remove one of the two.")
        tries = math.prod(map(len, keys.values()))
        if tries > MOST_TRIES:
            what = f"the cell '{'/'.join(labels)}' would make {tries} tries, at most {MOST_TRIES} are allowed."
            raise document.error(AT, f"{what} Leave out values or keys.")
