"""The plugin of docs/hooks.md, word for word: it keeps its contract, and its recipe is good."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from calfat_plugin.errors import RecipeError
from calfat_plugin.experiment import assemble
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.testing import builtin_registry, check_trainer
from tests.contract.test_hooks import PAGE


def quoted(file: str) -> str:
    """A file as the page shows it."""
    found = re.search(rf"^`{re.escape(file)}`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/hooks.md does not show {file}"
    return found[1]


def test_it_keeps_its_contract_and_its_recipe_is_good() -> None:
    plugin = ModuleType("half_fat")
    exec(compile(quoted("half_fat.py"), "half_fat.py", "exec", dont_inherit=True), vars(plugin))
    registry = builtin_registry(plugin)
    check_trainer("half-fat", registry=registry)
    document = parse_document(quoted("half_fat.yaml"), "half_fat.yaml")
    assert assemble(document, registry).warnings == ()
    with pytest.raises(RecipeError, match=r"^--set .*: calfat\.trainer\.share: got 2 \(int\), expected"):
        assemble(document.with_overrides(["calfat.trainer.share=2"]), registry)
    assert 'half-fat = "half_fat"' in quoted("pyproject.toml")
