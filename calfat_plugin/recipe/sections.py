"""Sections of a document as typed options, with errors that name the place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from calfat_plugin.errors import RecipeError
from calfat_plugin.options import describe, parse_options
from calfat_plugin.recipe.document import Document, KeyPath, dotted

T = TypeVar("T")


def failing_at(document: Document, path: KeyPath) -> Callable[[KeyPath, str], RecipeError]:
    """The ``fail`` argument of ``parse_options`` for options below ``path``."""
    return lambda below, complaint: document.error((*path, *below), complaint)


def section_at(document: Document, path: KeyPath, expected: str = "a section of keys and values") -> Mapping[str, Any]:
    """The section at ``path``; empty where the recipe leaves it out. ``expected`` is for the message."""
    value = document.get(path)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise document.error(path, f"got {describe(value)}, expected {expected}.")
    return value


def options_at(
    document: Document,
    path: KeyPath,
    config: type[T],
    raw: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    also: tuple[str, ...] = (),
) -> T:
    """The options of type ``config`` at ``path``; ``raw``: their values, where they are not just those of the section.

    ``given`` are the values of its further keys, ``also`` further keys that are read elsewhere.
    """
    raw = section_at(document, path) if raw is None else raw
    owner = f"section '{path[-1] if isinstance(path[-1], str) else dotted(path)}'"
    fail, given = failing_at(document, path), given or {}
    return parse_options(config, raw, owner=owner, fail=fail, also=(*given, *also), given=given)
