"""Builds the documentation site as ``make docs`` does, and reads the pages."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

from tests.cli.runner import ROOT

#: Attributes of tags with which a browser loads something.
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a working copy.

    Args:
        source: has ``mkdocs.yml`` and ``docs/``.
        site: the folder to write.
    """
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)],
        cwd=source,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


class Page(HTMLParser):
    """A page of the site.

    Attributes:
        loaded: addresses of what a browser loads with it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if (address := dict(attributes).get(_LOADED.get(tag, ""))) is not None:
            self.loaded.append(address)
