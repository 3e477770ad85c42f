"""Run directories that a disk, a person or a program damaged."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.bench import Case
from tests.fuzz.texts import VALUES, change_text

_COMMANDS = (
    ("report", "run"),
    ("report", "."),
    ("run", "run/recipe.yaml", "--resume", "--run-dir", "run", "--plain"),
    ("attack", "run", "--attacks", "fgsm"),
)
_WEIGHTS = (4, 2, 4, 1)
_SECONDS = 15.0  # drawing takes some, and so does a round


def cases(seed: int, count: int, originals: list[Path], folder: Path) -> Iterator[Case]:
    """Commands on damaged copies of run directories.

    Args:
        originals: run directories that are whole.
        folder: where to put the damaged copy; it is made anew for each case.
    """
    for number in range(count):
        name = f"directory, seed {seed}, number {number}"
        rng = random.Random(name)
        shutil.rmtree(folder, ignore_errors=True)
        original = rng.choice(originals)
        shutil.copytree(original, folder / "run")
        done = [damage(folder / "run", rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        words = rng.choices(_COMMANDS, _WEIGHTS)[0]
        yield Case(f"{name} ({original.name}: {'; '.join(done)})", words, folder=folder, seconds=_SECONDS)


def damage(run: Path, rng: random.Random) -> str:
    """Damage one file; returns what was done."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and "figures" not in path.parts)
    if not files:
        return "nothing is left to damage"
    weights = [6 if path.suffix in (".json", ".csv") else 1 for path in files]
    path = rng.choices(files, weights)[0]
    way = rng.choice(_SPECIAL.get(path.suffix, ()) * 3 + _ANY)
    return f"{path.relative_to(run)} {way(path, rng)}"


def _removed(path: Path, rng: random.Random) -> str:
    path.unlink()
    return "is gone"


def _emptied(path: Path, rng: random.Random) -> str:
    path.write_bytes(b"")
    return "is empty"


def _cut(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    size = rng.randrange(len(content) + 1)
    path.write_bytes(content[:size])
    return f"is cut after {size} bytes"


def _flipped(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes() or b"x")
    places = [rng.randrange(len(content)) for _ in range(rng.choice([1, 3, 30]))]
    for place in places:
        content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"has flipped bits at {places}"


def _folder(path: Path, rng: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "is a directory"


def _loop(path: Path, rng: random.Random) -> str:
    path.unlink()
    path.symlink_to(path.name)
    return "is a link to itself"


def _text(path: Path, rng: random.Random) -> str:
    path.write_text(change_text(path.read_text(encoding="utf-8", errors="replace"), rng), "utf-8", "surrogatepass")
    return f"has another text: {path.read_bytes()[:1500]!r}"


def _json_value(path: Path, rng: random.Random) -> str:
    """Another value, or none, anywhere in the tree."""
    try:
        tree: Any = [json.loads(path.read_text(encoding="utf-8"))]
    except ValueError:
        return _cut(path, rng)
    holder, key, where = rng.choice(list(_spots(tree, "")))
    if rng.random() < 0.25:
        del holder[key]
        what = "is gone"
    else:
        holder[key] = copy.deepcopy(rng.choice(VALUES))
        what = f"is {holder[key]!r:.80}"
    path.write_text(json.dumps(tree[0] if tree else None, default=str), encoding="utf-8")
    return f"{where or 'the whole'} {what}"


def _spots(tree: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    pairs = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in pairs[:5] if isinstance(tree, list) else pairs:
        yield tree, key, f"{where}/{key}"
        yield from _spots(value, f"{where}/{key}")


def _csv_cell(path: Path, rng: random.Random) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    row = rng.randrange(len(lines))
    cells = lines[row].split(",")
    cell = rng.randrange(len(cells))
    way = rng.choice(["value", "short", "long", "gone", "huge"])
    if way == "value":
        cells[cell] = str(rng.choice(VALUES))
    elif way == "short":
        del cells[cell:]
    elif way == "long":
        cells += ["1"] * 50
    elif way == "huge":
        cells[cell] = "x" * 200_000
    lines[row : row + 1] = [] if way == "gone" else [",".join(cells)]
    path.write_text("\n".join(lines) + rng.choice(["\n", ""]), encoding="utf-8", errors="replace")
    return f"row {row}, cell {cell}: {way}: {lines[row][:200] if row < len(lines) else ''!r}"


Damage = Callable[[Path, random.Random], str]
_ANY: tuple[Damage, ...] = (_removed, _emptied, _cut, _cut, _flipped, _flipped, _folder, _loop)
_SPECIAL: dict[str, tuple[Damage, ...]] = {
    ".json": (_json_value, _json_value, _text),
    ".csv": (_csv_cell, _csv_cell, _text),
    ".yaml": (_text,),
}
