"""docs/howto, docs/explanation, troubleshooting and glossary: what they show works, and what they point to is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.docs.pages import DOCS, PAGES, blocks, text_of
from tests.docs.reader import Reader
from tests.inputs.on_disk import write_class_folders


def _prepare_data(folder: Path) -> None:
    """The reader's own images, and arrays."""
    write_class_folders(folder / "images", ["benign", "malignant"], 40, 10, size=40)
    rng = np.random.default_rng(0)
    arrays = {
        f"{name}_{split}": part
        for split, count in (("train", 300), ("test", 30))
        for name, part in (
            ("x", rng.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)),
            ("y", np.arange(count, dtype=np.uint8) % 3),
        )
    }
    np.savez(folder / "shapes.npz", **arrays)  # type: ignore[arg-type]


PREPARED: dict[str, Callable[[Path], None]] = {"howto/data.md": _prepare_data}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_every_block_works(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's order, except those that say why they are not run."""
    PREPARED.get(page, lambda folder: None)(tmp_path)
    reader = Reader(tmp_path, monkeypatch)
    for block in blocks(page):
        if block.is_run:
            reader.follow(block)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_saves_are_used(page: str) -> None:
    shown = [block for block in blocks(page) if block.is_run]
    for number, block in enumerate(shown):
        if block.saved:
            stem = Path(block.saved).stem
            assert any(stem in later.text for later in shown[number + 1 :]), f"{block.saved} is used nowhere"


def _anchors(page: Path) -> set[str]:
    """As GitHub and MkDocs make them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Within docs/, because the site has nothing else."""
    for target in re.findall(r"\]\(([^)]+)\)", text_of(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        led = (DOCS / page).parent / path if path else DOCS / page
        assert led.is_file(), target
        assert led.resolve().is_relative_to(DOCS), target
        assert not anchor or anchor in _anchors(led), target


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("explanation/")])
def test_figures_are_measured_or_cited_elsewhere(page: str) -> None:
    """Each number with two decimals is in the results of this package, or among the facts about the methods."""
    known = "".join((DOCS / source).read_text(encoding="utf-8") for source in ("results_digits.md", "methods.md"))
    for figure in re.findall(r"(?<![\d.])\d+\.\d\d(?!\d)", text_of(page)):
        assert figure in known, figure
