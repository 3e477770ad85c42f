"""Pages in headless Chromium: no horizontal scroll, no missing figure, no error, legible text; light and dark."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from calfat_plugin.report import write_comparison, write_run_report
from calfat_plugin.report.page import DARK_FILTER, PAPER, TEXT
from tests.report.browser import Seen, look
from tests.report.made import full_run, made_run
from tests.report.pages import Page

pytestmark = pytest.mark.needs("chromium")
WIDTHS = (390, 768, 1280, 1920)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison with all that is wide: long names, many settings, 100 classes, reported numbers."""
    root = tmp_path_factory.mktemp("wide") / "study"
    classes = [f"a-class-with-a-name-without-spaces-{label}" for label in range(10)]
    for number in range(9):
        made_run(
            root / f"a-directory-with-quite-a-long-name-{number}",
            f"calfat.trainer.scale={number + 1}",
            f"train_args.learning_rate=0.0{number + 1}",
            "calfat.reported={source: 'a-source-without-any-spaces-in-its-very-long-name', natural: 60}",
            final={"natural": 0.6, "fgsm": 0.4, "pgd20": 0.35},
            classes=classes,
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calfat_plugin.report.charts.FORMATS", {})  # files beside the page: not looked at
        return write_comparison([root])


@pytest.fixture(scope="module")
def pages(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of a run with all that a page can show, and the wide one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calfat_plugin.report.charts.FORMATS", {})
        return {"run": write_run_report(full_run(tmp_path_factory.mktemp("run") / "made")), "comparison": wide}


Look = Callable[[str, bool], dict[int, Seen]]


@pytest.fixture(scope="module")
def seen(pages: dict[str, Path]) -> Look:
    """A page at each width, light or dark: a browser starts once for all widths."""
    return functools.cache(lambda which, dark: look(pages[which], *WIDTHS, dark=dark))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("which", ["run", "comparison"])
def test_a_page_fits_and_is_whole(which: str, width: int, pages: dict[str, Path], seen: Look) -> None:
    page = seen(which, False)[width]
    assert page.inner == width
    assert page.scroll == width
    assert page.outside == []
    assert page.troubles == []
    assert page.fetched == []
    assert page.broken == 0
    assert len(page.figures) == len(Page.read(pages[which]).all("figure")) >= 4
    for figure in page.figures:
        left, wide, right, high = figure["box"]
        assert left >= 0
        assert right <= width
        assert wide >= 300
        assert high >= 150
        assert figure["text"] >= 7.5  # line height of the smallest words in CSS pixels


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


@pytest.mark.parametrize("dark", [False, True])
def test_a_page_follows_the_reader_into_the_dark(dark: bool, seen: Look) -> None:
    page = seen("comparison", dark)[1280]
    mode = "dark" if dark else "light"
    assert (page.background, page.color) == (rgb(getattr(PAPER, mode)), rgb(getattr(TEXT, mode)))
    assert {figure["filter"] for figure in page.figures} == {DARK_FILTER if dark else "none"}
