"""The documentation site: built without a warning, complete, and loading nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reference_python import PAGES, anchor_of
from tests.cli.runner import ROOT
from tests.docs.site import Page, build

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as a reader gets it."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    """Path in the site to what is on the page."""
    return {str(path.relative_to(site)): Page(path) for path in site.rglob("*.html")}


def test_every_page_of_the_docs_is_there(pages: dict[str, Page]) -> None:
    """But for what a package index shows."""
    docs = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(pages) - {"404.html"} == docs - {"package.html"}


def test_pages_load_nothing_from_elsewhere(site: Path, pages: dict[str, Page]) -> None:
    outside = re.compile(r"(?:\w+:)?//")
    assert [(name, address) for name, page in pages.items() for address in page.loaded if outside.match(address)] == []
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import\s*)['\"]?(?:\w+:)?//", styles) == []
    assert all(page.loaded for page in pages.values())


def test_every_public_name_has_its_place_and_signature(site: Path) -> None:
    """At the anchor that a forge gives it, too."""
    for name, page in PAGES.items():
        text = (site / "reference" / f"{name}.html").read_text(encoding="utf-8")
        anchors = [anchor_of(path) for paths in page.names.values() for path in paths]
        assert [anchor for anchor in anchors if f'id="{anchor}"' not in text] == []
