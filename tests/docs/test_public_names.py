"""Every public name and hook is documented and has its place in the reference; without either, these tests fail."""

from __future__ import annotations

import re

from tests.cli.runner import ROOT
from tests.docs.public_names import PATHS, lacks

PAGES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "reference").glob("*.md")))


def test_every_public_name_is_documented() -> None:
    assert [lack for path in PATHS for lack in lacks(path)] == []


def test_every_public_name_is_in_the_reference_once() -> None:
    shown = re.findall(r"^::: (\S+)$", PAGES, re.MULTILINE)
    assert sorted(shown) == sorted({*PATHS, "calfat_plugin.__version__"})
