"""Every public name and hook is documented and has its place in the reference; without either, these tests fail."""

from __future__ import annotations

import re

from reference_python import PAGES, python_pages
from tests.cli.runner import ROOT
from tests.docs.public_names import PATHS, lacks


def test_every_public_name_is_documented() -> None:
    assert [lack for path in PATHS for lack in lacks(path)] == []


def test_every_public_name_is_in_the_reference_once() -> None:
    """And what all entries have, which plugins do not import."""
    shown = [f"calfat_plugin.{path}" for page in PAGES.values() for paths in page.names.values() for path in paths]
    assert sorted(shown) == sorted({*PATHS, "calfat_plugin.__version__", "calfat_plugin.entries.Entry"})


def test_a_name_is_shown_as_its_source_says() -> None:
    """Signature, text, arguments, attributes, methods and base classes; only values of options, not their help."""
    pages = python_pages()
    data = pages["reference/inputs.md"]
    assert (
        "\n## class `Augmentation`\n\n```python\nAugmentation(crop_padding: int = 0, flip: bool = False)\n```\n" in data
    )
    assert "\n- `flip` (`bool`): mirror left-right with probability 1/2.\n" in data
    assert (
        "\n### `ImageData.subset()`\n\n```python\nsubset(indices: npt.ArrayLike) -> ImageData\n```\n\nReturn a copy"
        in data
    )
    assert "\n- `in_channels` (`int`): Colour channels C of an image.\n" in data
    measured = pages["reference/evaluation.md"]
    assert (
        "\n## class `BudgetedAttack`\n\nDerived from [`AttackEvaluator`](evaluation.md#class-attackevaluator).\n"
        in measured
    )
    assert "\n    norm: Norm = 'linf',\n    eps: Fraction = Fraction(8, 255),\n" in measured
    assert "\nReturns: Shape of x, inside the budget.\n" in measured
    tests = pages["reference/testing.md"]
    signature = ("    name: str,", "    *,", "    registry: Registry | None = None,", "    num_examples: int = 120,")
    assert "\n".join((*signature, "    **options: Any,", ") -> None")) in tests
    assert "\n- `num_examples`: how many there are to split, of six classes.\n" in tests
    assert "\n- `RecipeError, PluginError`: as ``load`` and ``plugin_files``.\n" in pages["reference/hooks.md"]


def test_pages_read_without_a_build() -> None:
    """In a clone and on a forge nothing puts in what a directive stands for, or follows a role."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert "\n:::" not in text, page
        assert re.findall(r":(?:class|func|meth|data|attr|mod|exc):`", text) == [], page
