"""Every section and table of docs/methods.md that code, tests or pages cite exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.cli.runner import ROOT

PAGE = ROOT / "docs" / "methods.md"
NUMBER = r"\d+(?:\.\d+)*"
LIST = rf"{NUMBER}(?:(?:-|, | and |, and ){NUMBER})*"
#: "methods.md 5.6", "`docs/methods.md`, sections 3 and 6.2"
SECTIONS = re.compile(rf"methods\.md`?,?(?: sections?)? ({LIST})")
#: The paper's own tables have whole numbers.
TABLES = re.compile(r"[Tt]ables? (\d+\.\d+)")


def sections(page: str) -> dict[str, str]:
    """Number to text of each section, and of each item of a numbered list: item 1 of section 15 is 15.1."""
    pieces = re.split(rf"^##+ ({NUMBER})\.? .*$", page, flags=re.MULTILINE)
    found = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    items = {
        f"{number}.{item}": text
        for number, body in found.items()
        for item, text in re.findall(r"^(\d+)\. (.*)$", body, re.MULTILINE)
    }
    assert not items.keys() & found.keys()
    return {**items, **found}


def cited(text: str) -> Iterator[tuple[str, bool]]:
    """(number, whether it is a table) of every citation in a text, also of one that a line break divides."""
    text = re.sub(r"\s*\n\s*(?:# ?)?", " ", text)
    for found in SECTIONS.finditer(text):
        yield from ((number, False) for number in re.findall(NUMBER, found[1]))
    for found in TABLES.finditer(text):
        yield found[1], True


def citations() -> list[tuple[str, str, bool]]:
    """(file, number, whether it is a table) of all citations in the repository."""
    files = [*ROOT.glob("calfat_plugin/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("docs/*.md")]
    return [
        (str(file.relative_to(ROOT)), number, is_table)
        for file in sorted(files)
        if file != Path(__file__)
        for number, is_table in cited(file.read_text(encoding="utf-8"))
    ]


SECTIONS_OF_THE_PAGE = sections(PAGE.read_text(encoding="utf-8"))


def test_what_is_cited_exists() -> None:
    found = citations()
    assert len(found) > 20
    missing = [
        (file, number)
        for file, number, is_table in found
        if number not in SECTIONS_OF_THE_PAGE or (is_table and "\n| ---" not in SECTIONS_OF_THE_PAGE[number])
    ]
    assert missing == []


def test_the_page_cites_its_own_sections() -> None:
    text = PAGE.read_text(encoding="utf-8")
    own = re.findall(rf"\bsection ({NUMBER}\b)", text) + re.findall(r"\((\d+\.\d+)\)", text)
    assert own
    assert [number for number in own if number not in SECTIONS_OF_THE_PAGE] == []
