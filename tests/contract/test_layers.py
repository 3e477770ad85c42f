"""Imports between the parts of the package go one way, and only host/ imports fedml; see ``layers``."""

from __future__ import annotations

from tests.cli.runner import Ended, python
from tests.contract.layers import (
    FLOOR_OF,
    PACKAGE,
    PAGE,
    ROOT,
    cycle,
    file_cycle,
    imported,
    imports,
    part_of,
    table,
    written,
)

FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 600  # lines of a module


def test_every_part_has_a_floor() -> None:
    assert {part_of(file) for file in FILES} - {"__init__"} == set(FLOOR_OF)


def test_imports_go_down() -> None:
    upward = [
        f"{each.where}: {each.target}"
        for each in imports()
        if each.source != "__init__" and FLOOR_OF[each.target] > FLOOR_OF[each.source]
    ]
    assert upward == []


def test_no_two_parts_or_files_import_each_other() -> None:
    assert cycle(imports()) == []
    assert file_cycle() == []


def test_a_module_of_the_root_serves_more_than_one_part() -> None:
    users: dict[str, set[str]] = {}
    for each in imports():
        if (PACKAGE / f"{each.target}.py").exists():
            users.setdefault(each.target, set()).add(each.source)
    lonely = {
        module: sorted(sources)
        for module, sources in users.items()
        if len(sources) == 1 and all((PACKAGE / source).is_dir() for source in sources)
    }
    assert lonely == {}


def test_no_module_is_long() -> None:
    long = {str(file.relative_to(ROOT)): count for file in FILES if (count := len(file.open().readlines())) > LONGEST}
    assert long == {}


def test_the_architecture_page_prints_these_floors() -> None:
    assert written(PAGE.read_text()) == table(), "write it anew: python tests/contract/layers.py"


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
    outside = [name for name in MODULES if not name.startswith(("calfat_plugin.host.", "calfat_plugin.cli.flower_app"))]
    free = ("tasks", "installed", "runtimes", "executors", "transports.certificates", "transports.message")
    quiet = [f"calfat_plugin.host.{name}" for name in (*free, "transports.mqtt")]
    ended = python(HIDDEN.format(hidden={"fedml"}, modules=[*outside, *quiet]))
    assert ended == Ended(0, "all imported\n", "")


def test_what_lists_and_checks_imports_where_torch_is_missing() -> None:
    """`calfat plugins` and `calfat check` are to answer at once, so nothing that they touch imports torch."""
    light = [
        *("calfat_plugin.builtin", "calfat_plugin.registry", "calfat_plugin.experiment"),
        *("calfat_plugin.cli.main", "calfat_plugin.cli.check", "calfat_plugin.cli.plugins", "calfat_plugin.cli.run"),
        *(name for name in MODULES if name.endswith(".entries")),
        *(name for name in MODULES if FLOOR_OF.get(name.split(".")[1] if "." in name else "", 9) in (0, 1, 2)),
    ]
    light = [
        name for name in light if name.rpartition(".")[2] not in ("batches", "digits", "files", "folders", "published")
    ]
    assert "calfat_plugin.recipe.schema" in light
    hidden = {"fedml", "torch", "torchvision", "numpy", "scipy", "sklearn", "matplotlib"}
    assert python(HIDDEN.format(hidden=hidden, modules=light)) == Ended(0, "all imported\n", "")
