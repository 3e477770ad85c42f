"""Pages in headless Chromium: no horizontal scroll, no missing figure, no error, legible text; light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from calfat_plugin.report import theme, write_comparison
from tests.report.browser import look, picture
from tests.report.made import made_run
from tests.report.pages import Page
from tests.report.real import RealRun

pytestmark = pytest.mark.needs("chromium")
WIDTHS = (390, 768, 1280)


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
def pages(real: RealRun, wide: Path) -> dict[str, Path]:
    """The page that a real run wrote at its end, and the wide one."""
    return {"run": real.directory / "report.html", "comparison": wide}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("which", ["run", "comparison"])
def test_a_page_fits_and_is_whole(which: str, width: int, pages: dict[str, Path]) -> None:
    seen = look(pages[which], width)
    assert seen.inner == width
    assert seen.scroll == width
    assert seen.outside == []
    assert seen.troubles == []
    assert seen.fetched == []
    assert seen.broken == 0
    assert seen.bare == []
    assert len(seen.figures) == len(Page.read(pages[which]).all("figure")) >= 4
    for figure in seen.figures:
        left, wide, right, high = figure["box"]
        assert left >= 0
        assert right <= width
        assert wide >= 300
        assert high >= 150
        assert figure["text"] >= 7.5  # line height of the smallest words in CSS pixels


@pytest.mark.parametrize("dark", [False, True])
def test_a_table_that_goes_on_beyond_the_edge_has_a_shadow_there(dark: bool, wide: Path) -> None:
    paper = theme.PAPER.dark if dark else theme.PAPER.light
    for width, goes_on in ((390, True), (1920, False)):
        table = look(wide, width, dark=dark).tables[0]
        assert table["name"] == "Results"
        assert (table["hidden"] > 0) is goes_on
        top, height = int(table["top"]), int(table["height"])
        image = picture(wide, width, top + height + 50, dark=dark)
        edge = [image.getpixel((int(table["right"]) - 2, y)) for y in range(top + 2, top + height - 2)]
        plain = sum(rgb(paper) == f"rgb{pixel}" for pixel in edge) / len(edge)
        assert plain < 0.1 if goes_on else plain > 0.8  # lines between rows reach the edge


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


@pytest.mark.parametrize("dark", [False, True])
def test_a_page_follows_the_reader_into_the_dark(dark: bool, pages: dict[str, Path]) -> None:
    seen = look(pages["run"], 1280, dark=dark)
    mode = "dark" if dark else "light"
    assert (seen.background, seen.color) == (rgb(getattr(theme.PAPER, mode)), rgb(getattr(theme.TEXT, mode)))
    assert {figure["filter"] for figure in seen.figures} == {theme.DARK_FILTER if dark else "none"}
