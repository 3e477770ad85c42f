"""Experiments of recipes that a test writes out."""

from __future__ import annotations

from typing import Any

from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.testing import builtin_registry


def assembled(recipe: str, *overrides: str, plugins: tuple[Any, ...] = (), name: str = "r.yaml") -> Experiment:
    """The recipe's text with ``--set`` values, of the built-in plugins and these."""
    return assemble(parse_document(recipe, name).with_overrides(overrides), builtin_registry(*plugins))
