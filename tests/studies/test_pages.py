"""What pages of the studies link to, and what the documentation names of them, is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from studies import pages

STUDIES = pages.ROOT / "studies"


@pytest.mark.parametrize(
    "page", [*STUDIES.rglob("*.md"), pages.ROOT / "README.md"], ids=lambda page: str(page.relative_to(pages.ROOT))
)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    """And the files of the repository that its commands name are there."""
    text = page.read_text(encoding="utf-8")
    linked = [page.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
    named = [pages.ROOT / file for file in re.findall(r"\bstudies/[\w/]+\.(?:py|yaml)\b", text)]
    assert [str(file) for file in (*linked, *named) if not file.exists()] == []


def test_what_the_documentation_names_is_there() -> None:
    texts = [page.read_text(encoding="utf-8") for page in (pages.ROOT / "docs").rglob("*.md")]
    named = {name for text in texts for name in re.findall(r"`(studies/[\w/.]*)`", text)}
    assert {"studies/short/results.md", "studies/trust", "studies/passes", "studies/attackers"} <= named
    assert [name for name in named if not (pages.ROOT / name).exists()] == []


def test_scripts_use_public_names_alone() -> None:
    scripts = [*STUDIES.rglob("*.py")]
    assert len(scripts) > 8
    modules = re.compile(r"^\s*(?:from|import) (calfat_plugin\.\S+|benchmarks\S*|tests\S*)", re.MULTILINE)
    assert [found for script in scripts for found in modules.findall(script.read_text(encoding="utf-8"))] == []
