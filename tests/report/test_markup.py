"""HTML by construction."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from calfat_plugin.report.markup import Markup, element, facts, joined, section, table


class Text(HTMLParser):
    """Counts elements and gathers text and attributes."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.text = ""
        self.attributes: dict[str, str | None] = {}
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes.update(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_text_stays_text_whatever_it_holds(text: str) -> None:
    found = Text(element("p", text, title=text))
    assert found.names == ["p"]
    assert found.text == text
    assert found.attributes["title"] == text


def test_elements_nest_and_leave_out_what_is_none() -> None:
    inner = element("b", "1 < 2")
    assert element("p", inner, " & ", class_="a", aria_label="x", id=None) == (
        '<p class="a" aria-label="x"><b>1 &lt; 2</b> &amp; </p>'
    )


def test_joined_escapes_only_what_is_no_markup() -> None:
    assert joined([Markup("<i>"), "<i>"], by="|") == "<i>|&lt;i&gt;"


def test_a_section_without_content_is_nothing() -> None:
    assert section("a", "Heading", Markup(), Markup()) == ""
    assert section("a", "Heading", "x") == '<section id="a"><h2>Heading</h2>x</section>'


def test_a_table_scrolls_in_a_box_that_the_keyboard_reaches() -> None:
    made = table(["name", "value"], [["a", "1"], ["b", "2"]], caption="Things", row_classes=["", "mean"])
    assert made == (
        '<div class="scroll" role="region" aria-label="Things" tabindex="0"><table><thead><tr>'
        '<th scope="col">name</th><th class="number" scope="col">value</th></tr></thead><tbody>'
        '<tr class=""><th scope="row">a</th><td class="number">1</td></tr>'
        '<tr class="mean"><th scope="row">b</th><td class="number">2</td></tr></tbody></table></div>'
    )


def test_facts() -> None:
    assert facts([("a", "1")], small=True) == '<dl class="facts small"><div><dt>a</dt><dd>1</dd></div></dl>'
