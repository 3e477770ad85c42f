"""Looking at a page without a browser: its elements, ids, references and text."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

_VOID = {"meta", "link", "br", "hr", "img"}
_SILENT = {"style", "title", "script"}


@dataclass
class Page:
    """What is on a page.

    Attributes:
        tags: (name, attributes) of every element, in order.
        text: what a reader sees, spaces collapsed.
        errors: closing tags that close nothing.
    """

    source: str
    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    text: str = ""
    errors: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Page:
        """Parse a file."""
        page = cls(path.read_text(encoding="utf-8"))
        parser = _Parser(page)
        parser.feed(page.source)
        parser.close()
        page.errors += [f"<{name}> stays open" for name in parser.open]
        page.text = " ".join(page.text.split())
        return page

    def all(self, name: str) -> list[dict[str, str]]:
        """Attributes of every element of a name."""
        return [attributes for tag, attributes in self.tags if tag == name]

    @property
    def ids(self) -> list[str]:
        """Every id."""
        return [attributes["id"] for _, attributes in self.tags if "id" in attributes]

    @property
    def references(self) -> list[str]:
        """Every address that a browser would follow or fetch."""
        found = [
            value
            for _, attributes in self.tags
            for key, value in attributes.items()
            if key in ("src", "href", "xlink:href", "srcset", "data", "action", "poster")
        ]
        return found + re.findall(r"url\(([^)]*)\)", self.source) + re.findall(r"@import\s+(\S+)", self.source)

    @property
    def figures(self) -> list[str]:
        """The SVG of every figure."""
        prefix = "data:image/svg+xml;base64,"
        return [base64.b64decode(image["src"].removeprefix(prefix)).decode() for image in self.all("img")]


class _Parser(HTMLParser):
    def __init__(self, page: Page) -> None:
        super().__init__(convert_charrefs=True)
        self.page = page
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.page.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.page.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.page.errors.append(f"</{tag}> where <{self.open[-1] if self.open else ''}> is open")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in _SILENT:
            self.page.text += f" {data}"
