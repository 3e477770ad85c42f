"""The public face: page, ``__all__`` and ``dir`` agree, and importing it costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import calfat_plugin
from tests.cli.runner import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def test_every_public_name_is_listed() -> None:
    """And hides no module: ``from calfat_plugin import entries`` asks for an attribute before a module."""
    assert dir(calfat_plugin) == sorted(calfat_plugin.__all__)
    assert set(calfat_plugin.__all__) & {path.stem for path in (ROOT / "calfat_plugin").iterdir()} == set()
    with pytest.raises(AttributeError, match=r"^module 'calfat_plugin' has no attribute 'evalute'$"):
        calfat_plugin.evalute  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    """They see an import below TYPE_CHECKING only where it is ``A as A``; Python sees all of them."""
    tree = ast.parse((ROOT / "calfat_plugin" / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.asname: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname
    }
    assert imported == calfat_plugin._HOME


def imported_by(statement: str) -> set[str]:
    """Modules in a new process after a statement that were not there before it."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_else() -> None:
    assert {name.partition(".")[0] for name in imported_by("import calfat_plugin")} - set(sys.stdlib_module_names) == {
        "calfat_plugin"
    }
    assert imported_by("import calfat_plugin") & {"calfat_plugin.api", "calfat_plugin.entries"} == set()


def test_no_public_name_but_the_base_of_models_imports_torch() -> None:
    """Modules of plugins are imported at every start of every command."""
    names = sorted(set(calfat_plugin.__all__) - {"ImageClassifier"})
    assert imported_by(f"from calfat_plugin import {', '.join(names)}") & {"torch", "fedml", "pandas"} == set()
