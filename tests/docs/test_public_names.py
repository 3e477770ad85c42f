"""Every public name and hook is documented and has its place in the reference; without either, these tests fail."""

from __future__ import annotations

import re
from pathlib import Path

import griffe
import pytest

from tests.cli.runner import ROOT
from tests.docs.public_names import PATHS, lacks, public

PAGES = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "reference").glob("*.md")))


def left_out(paths: tuple[str, ...], pages: str) -> list[str]:
    """Public names that pages of the reference do not have exactly once."""
    shown = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    return [f"{path}: {shown.count(path)} times in docs/reference" for path in paths if shown.count(path) != 1]


def test_every_public_name_is_documented() -> None:
    assert [lack for path in PATHS for lack in lacks(public(path))] == []


def test_every_public_name_is_in_the_reference() -> None:
    assert left_out(PATHS, PAGES) == []
    assert set(re.findall(r"^::: (\S+)$", PAGES, re.MULTILINE)) == {*PATHS, "calfat_plugin.__version__"}


@pytest.mark.parametrize("path", PATHS)
def test_a_deleted_docstring_is_found(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = public(path)
    monkeypatch.setattr(found, "docstring", None)
    assert lacks(found) == [f"{found.path}: no docstring"]


@pytest.mark.parametrize("path", PATHS)
def test_a_name_deleted_from_the_reference_is_found(path: str) -> None:
    assert left_out(PATHS, PAGES.replace(f"::: {path}\n", "")) == [f"{path}: 0 times in docs/reference"]


PLANTED = '''
"""A module with what a public name may lack."""

def hook(run: RunInfo) -> None:
    """Called once."""

def role(x: Tensor) -> None:
    """As :func:`hook`; ``x``: (N,)."""

def shape(x: Tensor) -> None:
    """Look at ``x``."""

class Interface:
    """What a plugin implements."""

    steps: int = 1

    def __init__(self, options: object) -> None: ...

    def fit(self, task: LocalTask) -> None: ...

class Plugin(Interface):
    """Says nothing new of what its base describes."""

    def fit(self, task: LocalTask) -> None: ...

class Good:
    """Attributes that are described.

    Attributes:
        steps: of an attack.
    """

    steps: int = 1

    def fit(self, task: LocalTask) -> Tensor:
        """Train.

        Args:
            task: a client's work.

        Returns:
            (N,) losses.
        """
'''


def test_each_lack_is_named(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    module = griffe.load("planted", search_paths=[tmp_path])
    assert [lack for member in module.members.values() for lack in lacks(member)] == [
        "planted.hook: 'run' is not in 'Args'",
        "planted.role: ':func:`' is no Markdown",
        "planted.shape: a tensor without a shape",
        "planted.Interface: steps: not in 'Attributes'",
        "planted.Interface: fit: no docstring",
        "planted.Interface: __init__: 'options' is not in 'Args'",
        "planted.Plugin: fit: no docstring",
    ]
