"""The pages that answer questions, and their fenced blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.cli.runner import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(
    str(path.relative_to(DOCS))
    for path in (
        *DOCS.glob("howto/*.md"),
        *DOCS.glob("explanation/*.md"),
        DOCS / "troubleshooting.md",
        DOCS / "glossary.md",
    )
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED = re.compile(r"`([\w./-]+)`:$")
_NOT_RUN = re.compile(r"<!-- not run: \S.* -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: after the fence.
        text: between the fences.
        saved: the file that the line before names, or an empty text.
        is_run: whether the line before gives no reason why it is not run.
    """

    language: str
    text: str
    saved: str
    is_run: bool


def text_of(page: str) -> str:
    """The page's source; ``page`` is a path below docs/."""
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """The page's blocks in their order."""
    found, source = [], text_of(page)
    for fence in FENCE.finditer(source):
        above = [line for line in source[: fence.start()].splitlines() if line]
        is_run = _NOT_RUN.fullmatch(above[-1]) is None
        name = _SAVED.search(above[-1 if is_run else -2])
        found.append(Block(fence[1], fence[2], name[1] if name else "", is_run))
    return found
