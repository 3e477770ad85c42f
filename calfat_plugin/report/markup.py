"""HTML by construction: whatever is not :class:`Markup` is text, and is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_VOID = frozenset({"meta", "br", "hr"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str | None) -> Markup:
    """``<name attributes>children</name>``.

    Args:
        name: the tag.
        children: escaped unless :class:`Markup`.
        attributes: None leaves one out; a trailing or inner ``_`` stands for ``-`` (``class_``, ``aria_label``).
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(children)}</{name}>")


def joined(children: Iterable[str], by: str = "") -> Markup:
    """Children one after another."""
    return Markup(by.join(child if isinstance(child, Markup) else escape(child) for child in children))


def section(anchor: str, heading: str, *children: str) -> Markup:
    """A part of the page; empty where it has nothing to show."""
    inside = joined(children)
    return element("section", element("h2", heading), inside, id=anchor) if inside else Markup()


def table(
    head: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    caption: str,
    numbers_from: int = 1,
    row_classes: Iterable[str] = (),
) -> Markup:
    """A table in a box of its own that scrolls sideways, so that the page never does.

    Args:
        head: column headings.
        rows: cells; the first of each row is its heading.
        caption: what the table is, for screen readers and as the box's name.
        numbers_from: index of the first column that is aligned as numbers.
        row_classes: CSS classes, one a row; may be shorter than the rows.
    """
    classes = list(row_classes)

    def cell(name: str, index: int, content: str, **attributes: str) -> Markup:
        return element(name, content, class_="number" if index >= numbers_from else None, **attributes)

    top = [cell("th", index, content, scope="col") for index, content in enumerate(head)]
    body = []
    for number, row in enumerate(rows):
        cells = [
            cell("th", 0, content, scope="row") if index == 0 else cell("td", index, content)
            for index, content in enumerate(row)
        ]
        body.append(element("tr", *cells, class_=classes[number] if number < len(classes) else None))
    return element(
        "div",
        element("table", element("thead", element("tr", *top)), element("tbody", *body)),
        class_="scroll",
        role="region",
        aria_label=caption,
        tabindex="0",
    )


def facts(pairs: Iterable[tuple[str, str]], *, small: bool = False) -> Markup:
    """A list of (term, value); ``small`` puts short values closer together."""
    return element(
        "dl",
        *(element("div", element("dt", term), element("dd", value)) for term, value in pairs),
        class_="facts small" if small else "facts",
    )


def details(summary: str, *children: str) -> Markup:
    """What is folded away until asked for."""
    return element("details", element("summary", summary), *children)
