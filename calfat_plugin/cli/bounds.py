"""What versions this package allows, and whether a version is one of them.

The bounds are our own: release numbers with ``==``, ``!=``, ``>=``, ``<=``, ``>``, ``<``. So this is all it takes, and
``calfat doctor`` needs no other package to find out that one is missing.
"""

from __future__ import annotations

import configparser
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "calfat-plugin"
SOURCE = Path(__file__).resolve().parents[2]  # the checkout, where this runs from one

_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*\(?([^)]*)\)?")
_BOUND = re.compile(r"(==|!=|>=|<=|>|<)\s*([0-9][0-9.]*)")
_COMPARE: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Requirement:
    """A distribution and the versions of it that are allowed, such as ``numpy`` and ``>=1.26,<2``."""

    name: str
    bounds: str

    def allows(self, version: str) -> bool:
        """Whether ``version`` keeps every bound; local parts (``+cpu``) and pre-release marks do not count."""
        return allows(self.bounds, version)


@dataclass(frozen=True)
class Declared:
    """What the package says it needs.

    Attributes:
        python: bounds on the version of Python.
        requirements: without those of extras.
        installed: whether the package is installed, or runs from a source tree that nobody installed.
    """

    python: str
    requirements: tuple[Requirement, ...]
    installed: bool


def declared() -> Declared:
    """Read the metadata of the installed package, or ``setup.cfg`` where it is not installed."""
    try:
        ours = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        setup = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
        setup.read(SOURCE / "setup.cfg")
        options = setup["options"] if setup.has_section("options") else {}
        lines = options.get("install_requires", "").splitlines()
        return Declared(options.get("python_requires", ""), parse_requirements(lines), installed=False)
    return Declared(ours.metadata["Requires-Python"] or "", parse_requirements(ours.requires or ()), installed=True)


def parse_requirements(lines: list[str] | tuple[str, ...]) -> tuple[Requirement, ...]:
    """Requirements as ``setup.cfg`` and package metadata write them; those behind a marker (extras) are left out."""
    found = []
    for line in map(str.strip, lines):
        match = _REQUIREMENT.fullmatch(line)
        if match is not None and ";" not in line:
            bounds = sorted((part.strip() for part in match[2].split(",") if part.strip()), reverse=True)  # lower first
            found.append(Requirement(match[1], ", ".join(bounds)))
    return tuple(found)


def allows(bounds: str, version: str) -> bool:
    """Whether ``version`` keeps every one of ``bounds``, such as ``>=3.10, <3.12``."""
    number = _release(version)
    return all(_COMPARE[sign](*_same_length(number, _release(bound))) for sign, bound in _BOUND.findall(bounds))


def _release(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` to (2, 13, 0)."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match is not None else ()


def _same_length(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Padded with zeros: 2 is 2.0.0."""
    length = max(len(first), len(second))
    return first + (0,) * (length - len(first)), second + (0,) * (length - len(second))
