"""The layers of the package, and the imports between its parts: what ``docs/architecture.md`` prints is made here.

A part is a module or a package at the package's top level. ``python tests/contract/layers.py`` writes the table.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "calfat_plugin"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- layers: made by `python tests/contract/layers.py` -->", "<!-- end of layers -->"

#: (name, purpose, parts); a part imports from its own layer and from those above it in this list.
FLOORS = (
    (
        "basics",
        "version, errors, exact numbers, options, derived seeds, safe files, a peer's texts, timers, memory layouts",
        "version errors compat exact threat seeds options disk typed_json peer_text profiling layouts",
    ),
    ("maths", "tensors in, tensors out; no files, no configuration", "maths"),
    (
        "contract",
        "what a recipe may say, and what plugins provide",
        "shipped recipe entries results rounds rounds_csv returned observer hookspecs interfaces datasets",
    ),
    (
        "built-ins",
        "the built-in plugins, registered through the same hooks as third-party plugins",
        "tensor_files model_files partitions models trainers modifiers inner_attacks aggregators attackers evaluators "
        "loggers builtin",
    ),
    ("assembly", "names resolved, options typed; the two parties of a federation", "registry experiment federation"),
    ("host", "FedML and Flower; of the others, only `cli/flower_app.py` imports one", "host"),
    (
        "runs",
        "run directories, and the reports and analyses made from them",
        "run_files stored_run runs report analyses judging exporting suites",
    ),
    ("commands", "the command line, and what it shows of progress", "progress cli __main__"),
    ("Python", "what programs, notebooks and the tests of plugins call; `__init__` offers `api`", "api testing"),
)
FLOOR_OF = {part: number for number, (_, _, parts) in enumerate(FLOORS) for part in parts.split()}


@dataclass(frozen=True)
class Import:
    """One import of ours: from a part to another, and where it is written."""

    source: str
    target: str
    where: str


def part_of(file: Path, package: Path = PACKAGE) -> str:
    """The module or package of the top level that a file belongs to."""
    return file.relative_to(package).parts[0].removesuffix(".py")


@functools.cache
def imported(file: Path) -> Sequence[tuple[int, str]]:
    """(line, dotted name) of every import anywhere in a file, also of those for the type checker and in functions."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are written in full"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def imports(package: Path = PACKAGE) -> list[Import]:
    """Every import between two parts of the package."""
    found = []
    for file in sorted(package.rglob("*.py")):
        for line, name in imported(file):
            top, *rest = name.split(".")
            source = part_of(file, package)
            if top == package.name and rest and rest[0] != source and not rest[0].startswith("__"):
                found.append(Import(source, rest[0], f"{file.relative_to(package.parent)}:{line}"))
    return found


def cycle(found: list[Import]) -> list[str]:
    """Parts that import each other, directly or through others; the first again at the end."""
    sorter = TopologicalSorter[str]()
    for each in found:
        sorter.add(each.source, each.target)
    try:
        sorter.prepare()
    except CycleError as error:
        parts: list[str] = error.args[1]
        return parts
    return []


def file_cycle(package: Path = PACKAGE) -> list[str]:
    """The same for single files, by dotted name; ``__init__`` files, which re-export, are left out."""
    files = {".".join(file.relative_to(package.parent).with_suffix("").parts): file for file in package.rglob("*.py")}
    found = []
    for name, file in files.items():
        if name.endswith("__init__"):
            continue
        for _, target in imported(file):
            known = next((t for t in (target, target.rpartition(".")[0]) if t in files), None)
            if known is not None and known != name:
                found.append(Import(name, known, name))
    return cycle(found)


def table() -> str:
    """The layers as a Markdown table, the lowest first."""
    rows = ["| layer | purpose | parts |", "| --- | --- | --- |"]
    for number, (name, what, parts) in enumerate(FLOORS):
        shown = " ".join(f"`{part}/`" if (PACKAGE / part).is_dir() else f"`{part}`" for part in parts.split())
        rows.append(f"| {number} {name} | {what} | {shown} |")
    return "\n".join(rows)


def written(page: str) -> str:
    """The text between the marks of a page."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    """Write the table into the page."""
    page = PAGE.read_text()
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
