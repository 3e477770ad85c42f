"""What this package says it needs: the versions of Python and of other packages."""

from __future__ import annotations

import configparser
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "calfat-plugin"
SOURCE = Path(__file__).resolve().parents[2]  # the checkout, where this runs from one


@dataclass(frozen=True)
class Declared:
    """What the package says it needs.

    Attributes:
        python: bounds on the version of Python, such as ``>=3.10, <3.12``.
        requirements: such as ``numpy>=1.26``, those of extras included.
        installed: whether the package is installed, or runs from a source tree that nobody installed.
    """

    python: str
    requirements: tuple[str, ...]
    installed: bool


def declared() -> Declared:
    """Read the metadata of the installed package, or ``setup.cfg`` where it is not installed."""
    try:
        ours = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        setup = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
        setup.read(SOURCE / "setup.cfg")
        options = setup["options"] if setup.has_section("options") else {}
        lines = tuple(filter(None, options.get("install_requires", "").splitlines()))
        return Declared(options.get("python_requires", ""), lines, installed=False)
    return Declared(ours.metadata["Requires-Python"] or "", tuple(ours.requires or ()), installed=True)
