"""Which run directories a page is of."""

from __future__ import annotations

from pathlib import Path

from calfat_plugin.errors import RunError
from calfat_plugin.run_files import read_suite
from calfat_plugin.stored_run import RECIPE_FILE


def find_runs(path: Path) -> list[Path]:
    """The run directories at ``path``, those that its suite lists, or all below it, sorted.

    A suite lists its runs in ``suite.json``; they may lie with another suite that shares them.
    """
    if (path / RECIPE_FILE).is_file():
        return [path]
    if path.is_file():  # such as the page of a run
        example = Path("runs/calfat_digits/0-20260101-120000")
        if (path.parent / RECIPE_FILE).is_file():
            example = path.parent
        raise RunError(f"{path}: not a directory. Name run directories, such as {example}.")
    listed = []
    for cell in read_suite(path).cells:
        for of_cell in cell.runs:
            place = listed_run(path, Path(of_cell.directory))
            if place is not None:
                listed.append(place)
    if listed:
        return listed
    below = sorted(recipe.parent for recipe in path.rglob(RECIPE_FILE)) if path.is_dir() else []
    if not below:
        what = "neither here nor below is there a run" if path.is_dir() else "no such directory"
        raise RunError(f"{path}: {what}. Name run directories, such as runs/calfat_digits/0-20260101-120000.")
    return below


def listed_run(suite: Path, written: Path) -> Path | None:
    """A run of a suite: where ``suite.json`` says, or at the same place beside the suite, if both were moved."""
    moved = suite.resolve().parent.joinpath(*written.parts[-3:])  # resolved: "." has no parent
    for place in (written, moved):
        if (place / RECIPE_FILE).is_file():
            return place
    return None
