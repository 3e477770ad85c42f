"""The pages that are made from code say what the code says."""

from __future__ import annotations

import pytest

from reference_pages import pages
from tests.cli.runner import ROOT

PAGES = pages()


@pytest.mark.parametrize("page", PAGES)
def test_reference_pages_are_current(page: str) -> None:
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == PAGES[page], "run: python reference_pages.py docs"
