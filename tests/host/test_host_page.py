"""docs/host.md points to things that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "host.md").read_text()


def test_every_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    written = {
        name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(named) >= 5
    assert named - written == set()


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`((?:tests|host|runs|calfat_plugin)/[\w/]*(?:\.py)?)`", PAGE))
    missing = {name for name in named if not (ROOT / name).exists() and not (ROOT / "calfat_plugin" / name).exists()}
    assert len(named) >= 5
    assert missing == set()
