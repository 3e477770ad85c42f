"""What several sections of a suite file are made of: settings, seeds, and selectors of cells."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from calfat_plugin.errors import did_you_mean
from calfat_plugin.options import describe
from calfat_plugin.recipe.document import Document, KeyPath
from calfat_plugin.recipe.plugin_files import PLUGINS
from calfat_plugin.recipe.sections import section_at
from calfat_plugin.suites.schema import Axes, Selector, Setting

SEED_PATH: KeyPath = ("common_args", "random_seed")
_MAX_SEED = 2**32 - 1


def grid(axes: Axes) -> list[tuple[str, ...]]:
    """The labels of every cell, the last axis running fastest."""
    return list(itertools.product(*axes.values()))


def check_selector(selector: Selector, axes: Axes) -> str:
    """What is wrong with a selector that matches no cell; empty when it matches one."""
    cells = grid(axes)
    if any(selector.matches(labels) for labels in cells):
        return ""
    parts = selector.text.split("/")
    if len(parts) not in (1, len(axes)):
        return f"'{selector.text}' has {len(parts)} parts, but a cell of this suite has the form {'/'.join(axes)}."
    labels = [label for variants in axes.values() for label in variants]
    names = labels if len(parts) == 1 else ["/".join(cell) for cell in cells]
    hint = did_you_mean(selector.text, names) or f" Labels: {', '.join(dict.fromkeys(labels))}."
    return f"'{selector.text}' matches no cell.{hint}"


def mapping_at(document: Document, path: KeyPath, example: str) -> Mapping[str, Any]:
    """The mapping at ``path``; empty where the suite leaves it out. ``example`` is for the message."""
    return section_at(document, path, f"a mapping such as {example}")


def settings_at(document: Document, path: KeyPath) -> tuple[Setting, ...]:
    """Recipe values to change, written as dotted keys."""
    settings = []
    for key, value in mapping_at(document, path, "{train_args.comm_round: 20}").items():
        steps, at = tuple(key.split(".")), (*path, key)
        if len(steps) < 2 or not all(steps):
            what = "this is not a SECTION.KEY of a recipe, such as train_args.comm_round or calfat.trainer."
            raise document.error(at, what)
        if steps == SEED_PATH:
            raise document.error(at, "the suite's 'seeds' set the seeds; remove this key.")
        if same_or_below(PLUGINS, steps) and path != ("set",):
            raise document.error(at, "plugins are loaded once, for all cells; write this key under 'set'.")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            what = f"got {describe(value)}, which is not allowed in a recipe; quote it to make it a text."
            raise document.error(at, what) from None
        settings.append(Setting(steps, value, document.place(at)))
    for first, second in itertools.combinations(settings, 2):
        if overlap(first.path, second.path):
            raise document.error(
                (*path, second.key), f"this key overlaps with '{first.key}' in the same mapping; combine the two."
            )
    return tuple(settings)


def same_or_below(above: KeyPath, path: KeyPath) -> bool:
    """Whether ``path`` is ``above`` itself or a part of its value."""
    return path[: len(above)] == above


def overlap(first: KeyPath, second: KeyPath) -> bool:
    """Whether one of two keys is a part of the other's value, or they are the same."""
    return same_or_below(first, second) or same_or_below(second, first)


def seeds_at(document: Document, path: KeyPath) -> tuple[int, ...]:
    """A list of different seeds."""
    raw = document.get(path)
    if not isinstance(raw, list) or not raw:
        found = "an empty list" if raw == [] else describe(raw)
        raise document.error(path, f"got {found}, expected a list of whole numbers such as [0, 1, 2].")
    seeds: list[int] = []
    for index, seed in enumerate(raw):
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MAX_SEED:
            raise document.error(
                (*path, index), f"got {describe(seed)}, expected a whole number, 0 <= value <= {_MAX_SEED}."
            )
        if seed in seeds:
            raise document.error((*path, index), f"the seed {seed} is listed twice; keep one.")
        seeds.append(seed)
    return tuple(seeds)
