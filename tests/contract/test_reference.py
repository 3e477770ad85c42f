"""docs/recipes.md and docs/plugins.md say what the parser and the entries say."""

from __future__ import annotations

from pathlib import Path

import pytest

from calfat_plugin.cli.reference import plugin_reference, recipe_reference
from calfat_plugin.registry import Registry

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "made"),
    [
        ("recipes.md", recipe_reference()),
        ("plugins.md", plugin_reference(Registry.load(entry_points=False))),
    ],
)
def test_reference_pages_are_current(page: str, made: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == made, "run: python -m calfat_plugin.cli.reference docs"
