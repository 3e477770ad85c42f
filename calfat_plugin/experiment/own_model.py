"""A recipe for a model that no run of this package trained: weights of the user's own, or a module in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from calfat_plugin.recipe.document import Document, KeyPath


def recipe_of_own_model(source: str, values: Iterable[tuple[KeyPath, Any, str]]) -> Document:
    """A recipe to evaluate it by, with defaults for all but these values.

    Args:
        source: what errors name where no value has a place.
        values: (key, value, place that errors name) each.
    """
    trainer: tuple[KeyPath, Any, str] = (("calfat", "trainer"), "standard", source)  # it leaves every model as it is
    return Document(source, {}).with_values([trainer, *values])
