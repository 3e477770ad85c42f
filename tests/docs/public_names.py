"""The public names, read from the source without importing it, and the gaps of their documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator

import griffe

import calfat_plugin
from calfat_plugin import hookspecs, testing
from reference_python import find

#: A shape, a length or "scalar", as in ``(N, C) float`` or ``(n,) int64``.
_SHAPE = re.compile(r"\((?:[A-Za-z]\w*|\.\.\.|\d+)(?:,[^()]*)?\)|\bshapes?\b|\bscalar\b")
PATHS = (
    *(f"calfat_plugin.{name}" for name in calfat_plugin.__all__ if name != "__version__"),
    *(f"calfat_plugin.hookspecs.{name}" for name in vars(hookspecs) if name.startswith("calfat_")),
    *(f"calfat_plugin.testing.{name}" for name in testing.__all__),
)


def lacks(path: str) -> list[str]:
    """What the documentation of a public name lacks, a line each; empty: nothing."""
    return [f"{path}: {lack}" for lack in _lacks(find(path.removeprefix("calfat_plugin.")))]


def _lacks(found: griffe.Object) -> Iterator[str]:
    owner = found.parent if isinstance(found.parent, griffe.Class) else found
    classes = [owner, *owner.mro()] if isinstance(owner, griffe.Class) else []
    its_own = [found, *(each.members[found.name] for each in classes if found.name in each.members)]
    said = "\n".join(each.docstring.value for each in (*its_own, *classes) if each.docstring)
    if not any(each.docstring for each in its_own) and found.name != "__init__":
        yield f"{found.name}: no docstring"
    if isinstance(found, griffe.Class):
        for name, member in found.members.items():
            is_public = (name == "__init__" and "dataclass" not in found.labels) or not name.startswith("_")
            if is_public and member.is_function:
                yield from _lacks(member)
            elif is_public and member.is_attribute and member.annotation and not member.docstring:
                yield from [] if _names(said, name) else [f"{name}: not in 'Attributes'"]
    if isinstance(found, griffe.Function):
        arguments = [each for each in found.parameters if each.name not in ("self", "cls")]
        yield from (f"{found.name}: no {each.name!r} in 'Args'" for each in arguments if not _names(said, each.name))
        if "Tensor" in (str(found.returns), *(str(each.annotation) for each in arguments)) and not _SHAPE.search(said):
            yield f"{found.name}: a tensor without a shape"


def _names(said: str, name: str) -> bool:
    """Whether a docstring has an item of this name, or names it in its text."""
    return re.search(rf"^ *{name}: |``{name}``", said, re.MULTILINE) is not None
