"""Markdown around texts that somebody else wrote: names, citations and commands stay texts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from calfat_plugin.peer_text import printable
from calfat_plugin.report.page import template_environment

if TYPE_CHECKING:
    from jinja2 import Template

# As entities, which every renderer shows as the sign itself and none reads as syntax: HTML, cells of tables, and what
# turns addresses into links.
_ENTITIES = {sign: f"&#{ord(sign)};" for sign in "&<>|:@~$`"}
_BACKSLASHED = {sign: f"\\{sign}" for sign in r"\*_{}[]()#+!"}
_ESCAPES = str.maketrans({**_ENTITIES, **_BACKSLASHED})
_TAG = re.compile(r"<(?=[A-Za-z/!?])")


class Markdown(str):
    """Markdown that this package wrote, which is not escaped."""


def one_line(text: str) -> str:
    """The same in one line of printable characters."""
    return " ".join(printable(text).split())


def escaped(value: object) -> Markdown:
    """One line of text that renders as the value's text, whatever is in it."""
    if isinstance(value, Markdown):
        return value
    text = one_line(str(value)).translate(_ESCAPES)
    return Markdown(text.replace("www.", "www&#46;").replace(" %", "&nbsp;%"))  # no line ends before a %


def row(cells: Iterable[object]) -> Markdown:
    """A row of a table."""
    return Markdown(f"| {' | '.join(map(escaped, cells))} |")


def fenced(text: str, language: str) -> Markdown:
    """A block of code that no line of the text can end; empty for no text."""
    lines = printable(text).strip("\n")
    if not lines:
        return Markdown("")
    longest = max(map(len, re.findall("`+", lines)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markdown(f"{fence}{language}\n{lines}\n{fence}")


def quoted(text: str) -> Markdown:
    """A user's own Markdown as a quotation, without HTML, so that it is seen to be no part of what surrounds it."""
    lines = _TAG.sub("&lt;", printable(text)).strip().splitlines()
    return Markdown("\n".join(f"> {line}".rstrip() for line in lines))


@cache
def template_of(name: str) -> Template:
    """A template whose values are escaped unless they are :class:`Markdown`."""
    return template_environment("calfat_plugin.exporting", finalize=escaped).get_template(name)
