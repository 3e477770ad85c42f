"""The keys of a recipe that have a tag, as their declarations in ``schema`` say.

A key is written with dots, such as ``data_args.data_cache_dir``; ``*`` stands for a name that users choose.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from calfat_plugin.options import Tag, fixed_because, tags_of
from calfat_plugin.recipe.keys import OptionsOf, Section, Sections, keys_of
from calfat_plugin.recipe.schema import CalfatSection, HostSections


def declared_keys(config: type, above: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """(key, declaration) of each field of a section's class and of the sections below it; ``above``: its own key."""
    held_by = keys_of(config)
    for field in dataclasses.fields(config):
        key = f"{above}.{field.name}".removeprefix(".")
        yield key, field
        held = held_by.get(field.name)
        if isinstance(held, Section):
            yield from declared_keys(held.config, key)
        elif isinstance(held, Sections):
            yield from declared_keys(held.config, f"{key}.*")
        elif isinstance(held, OptionsOf):
            for config_of_option in held.configs:
                yield from declared_keys(config_of_option, key)


def _all_keys() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    yield from declared_keys(HostSections)
    yield from declared_keys(CalfatSection, "calfat")


@functools.cache
def keys_with(tag: Tag) -> tuple[str, ...]:
    """The keys whose declarations have all of ``tag``, in the order of the declarations."""
    return tuple(dict.fromkeys(key for key, field in _all_keys() if tag in tags_of(field)))


@functools.cache
def reasons_to_keep() -> Mapping[str, str]:
    """Key to the reason why a resumed run may not change it, of those that give one."""
    reasons = {}
    for key, field in _all_keys():
        if fixed_because(field):
            reasons[key] = fixed_because(field)
    return reasons


@functools.cache  # a suite asks for each key of thousands of recipes
def _pattern(keys: tuple[str, ...]) -> re.Pattern[str]:
    """What matches one of these keys, or a key below it."""
    choices = (re.escape(key).replace(r"\*", r"[^.]+") for key in keys)
    return re.compile(rf"(?:{'|'.join(choices)})(?:\..*)?", re.DOTALL)


def is_below(key: str, *above: str) -> bool:
    """Whether a key is one of ``above``, or below one of them."""
    return _pattern(above).fullmatch(key) is not None


def has_tag(key: str, tag: Tag) -> bool:
    """Whether a key, or a section above it, is declared with ``tag``."""
    return is_below(key, *keys_with(tag))


def without(recipe: Mapping[str, Any], tag: Tag, above: str = "") -> dict[str, Any]:
    """A copy of a recipe without the keys that have ``tag``; ``above``: the key of ``recipe``, of a section."""
    rest: dict[str, Any] = {}
    for name, value in recipe.items():
        key = f"{above}.{name}".removeprefix(".")
        if has_tag(key, tag):
            continue
        rest[name] = value
        if isinstance(value, Mapping):
            rest[name] = without(value, tag, key)
    return rest
