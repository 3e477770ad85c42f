"""The texts that the package can print, read off its source: what is filled in when it runs is an ellipsis."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.cli.runner import ROOT

HOLE = "…"
_FIELD = re.compile(r"\{[^{}]*\}|%[\w.]*[dsgfr]")


@cache
def texts() -> frozenset[str]:
    """Every text of the package, implicit and explicit joins as one, with :data:`HOLE` for each value in it."""
    files = sorted((ROOT / "calfat_plugin").rglob("*.py"))
    return frozenset(text for file in files for text in _texts(ast.parse(file.read_text(encoding="utf-8"))))


def _texts(tree: ast.AST) -> Iterator[str]:
    comments = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings among them
    for node in ast.walk(tree):
        if id(node) in comments:
            continue
        if isinstance(node, ast.JoinedStr | ast.BinOp):
            yield _joined(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _FIELD.sub(HOLE, node.value)  # a template of str.format or of a log line
            yield node.value


def _joined(node: ast.expr) -> str:
    """An f-string, or texts added to each other."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _once(_joined(node.left) + _joined(node.right))
    if isinstance(node, ast.JoinedStr):
        return _once("".join(map(_joined, node.values)))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else HOLE


def _once(text: str) -> str:
    return re.sub(f"{HOLE}+", HOLE, text)
