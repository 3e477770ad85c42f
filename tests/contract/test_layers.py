"""The floors of docs/architecture.md: each imports only itself and those below, and only host/ imports fedml."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.runner import ROOT, Ended, python

PACKAGE = ROOT / "calfat_plugin"
FLOORS = (
    # 0 maths: tensors in, tensors out; no files, no configuration
    "errors threat seeds losses losses_methods priors margins attacks averaging drift propagation weight_perturbation "
    "metrics compat",
    # 1 inputs: labels and seed to shards, name to tensors, name to module
    "partition datasets loaders models",
    # 2 contract: what plugins provide, and what flows between the parts
    "options results interfaces entries hookspecs recipe wire",
    # 3 built-ins, offered through the same hooks as anyone's
    "trainers modifiers aggregators evaluators loggers builtin builtin_inputs",
    # 4 assembly: names resolved, options typed, the two parties of a federation
    "registry experiment parties reference",
    # 5 the host
    "host",
    # 6 doors
    "runs report suites cli",
)
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts.split()}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    """The module or package of the package's top level that a file belongs to."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import anywhere in a file, also of those for the type checker and in functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are written in full"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_part_has_a_floor() -> None:
    assert {part_of(file) for file in FILES} - {"__init__"} == set(FLOOR)


def test_imports_go_down() -> None:
    upward = []
    for file in FILES:
        for line, name in imported(file):
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if package == PACKAGE.name and FLOOR.get(target, 0) > FLOOR.get(part_of(file), 0):
                upward.append(f"{file.relative_to(ROOT)}:{line}: {name}")
    assert upward == []


def test_only_the_host_floor_imports_the_host() -> None:
    outside = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in FILES
        for line, name in imported(file)
        if name.partition(".")[0] == "fedml" and part_of(file) != "host"
    ]
    assert outside == []


MODULES = sorted(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in FILES)
HIDDEN = """
import importlib, importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)

sys.meta_path.insert(0, Hidden())
for name in {modules!r}:
    importlib.import_module(name)
print("all imported")
"""


def test_everything_but_the_host_floor_imports_where_fedml_is_missing() -> None:
    outside = [name for name in MODULES if not name.startswith("calfat_plugin.host.")]
    quiet = ["calfat_plugin.host.arguments", "calfat_plugin.host.patches", "calfat_plugin.host.command"]
    ended = python(HIDDEN.format(hidden={"fedml"}, modules=[*outside, *quiet]))
    assert ended == Ended(0, "all imported\n", "")


def test_what_lists_and_checks_imports_where_torch_is_missing() -> None:
    """`calfat plugins` and `calfat check` are to answer at once, so nothing that they touch imports torch."""
    light = [
        *("calfat_plugin.builtin", "calfat_plugin.registry", "calfat_plugin.experiment", "calfat_plugin.reference"),
        *("calfat_plugin.cli.main", "calfat_plugin.cli.check", "calfat_plugin.cli.plugins", "calfat_plugin.cli.run"),
        *(name for name in MODULES if FLOOR.get(name.split(".")[1] if "." in name else "", 9) in (0, 2)),
    ]
    assert "calfat_plugin.recipe.parse" in light
    hidden = {"fedml", "torch", "torchvision", "numpy", "scipy", "sklearn", "matplotlib"}
    assert python(HIDDEN.format(hidden=hidden, modules=light)) == Ended(0, "all imported\n", "")


def test_the_check_itself_can_fail() -> None:
    if importlib.util.find_spec("fedml") is None:
        pytest.skip("fedml is not installed")
    ended = python(HIDDEN.format(hidden={"fedml"}, modules=["fedml"]))
    assert ended.code == 1
    assert "No module named 'fedml'" in ended.err
