"""What is public, read from the source without importing it, and what its documentation lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import griffe

import calfat_plugin
from calfat_plugin import hookspecs, testing
from tests.cli.runner import ROOT

#: A shape, a length or "scalar", as in ``(N, C) float`` or ``(n,) int64``.
_SHAPE = re.compile(r"\((?:[A-Za-z]\w*|\.\.\.|\d+)(?:,[^()]*)?\)|\bshapes?\b|\bscalar\b")
_ROLE = re.compile(r":\w+:`|::$", re.MULTILINE)
PATHS = (
    *(f"calfat_plugin.{name}" for name in calfat_plugin.__all__ if name != "__version__"),
    *(f"calfat_plugin.hookspecs.{name}" for name in vars(hookspecs) if name.startswith("calfat_")),
    *(f"calfat_plugin.testing.{name}" for name in testing.__all__),
)


@cache
def package() -> griffe.Object | griffe.Alias:
    """The package as its source says."""
    return griffe.load("calfat_plugin", search_paths=[ROOT], docstring_parser="google")


def public(path: str) -> griffe.Object:
    """The object that a public name leads to."""
    found = package()[path.removeprefix("calfat_plugin.")]
    return found.final_target if isinstance(found, griffe.Alias) else found


def lacks(found: griffe.Object) -> list[str]:
    """What the documentation of a public object lacks, a line each; empty: nothing."""
    return [f"{found.path}: {lack}" for lack in _lacks(found)]


def _lacks(found: griffe.Object) -> Iterator[str]:
    if found.docstring is None:
        yield "no docstring"
    elif markup := _ROLE.search(found.docstring.value):
        yield f"{markup[0]!r} is no Markdown"
    elif isinstance(found, griffe.Class):
        yield from _lacks_of_class(found)
    elif isinstance(found, griffe.Function):
        yield from _lacks_of_function(found)


def _lacks_of_class(found: griffe.Class) -> Iterator[str]:
    said = _said(found)
    for name, member in found.members.items():
        if name.startswith("_") or member.is_alias:
            continue
        if isinstance(member, griffe.Function):
            if member.docstring is not None or not _inherited(member):
                yield from (f"{name}: {lack}" for lack in _lacks(member))
        elif member.is_attribute and member.annotation and member.docstring is None and not _described(name, said):
            yield f"{name}: not in 'Attributes'"
    if "__init__" in found.members and "dataclass" not in found.labels:
        yield from (f"__init__: {lack}" for lack in _lacks_of_function(found.members["__init__"]))


def _lacks_of_function(found: griffe.Function) -> Iterator[str]:
    said = "\n".join([_text(found), *_inherited(found), _said(found.parent)])
    for parameter in found.parameters:
        if parameter.name not in ("self", "cls") and not _described(parameter.name, said):
            yield f"'{parameter.name}' is not in 'Args'"
    tensors = [parameter for parameter in found.parameters if str(parameter.annotation) == "Tensor"]
    if (tensors or str(found.returns) == "Tensor") and not _SHAPE.search(said):
        yield "a tensor without a shape"


def _described(name: str, said: str) -> bool:
    """Whether a docstring has an item of this name, or names it in its text."""
    return re.search(rf"^ *{name}: |``{name}``", said, re.MULTILINE) is not None


def _inherited(found: griffe.Function) -> list[str]:
    """What the bases of its class say of a method."""
    bases = found.parent.mro() if isinstance(found.parent, griffe.Class) else []
    return [text for base in bases if found.name in base.members and (text := _text(base.members[found.name]))]


def _said(found: griffe.Object | None) -> str:
    """What a class and its bases say of themselves; of a module: nothing."""
    return "\n".join(map(_text, (found, *found.mro()))) if isinstance(found, griffe.Class) else ""


def _text(found: griffe.Object | griffe.Alias) -> str:
    return found.docstring.value if found.docstring else ""
