"""Mutated recipes and suites: changed as trees, as texts and as bytes."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from tests.fuzz.bench import ROOT, Case

SHIPPED = sorted([*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "suites").glob("*.yaml")])

#: Values that somebody writes by mistake, or to see what happens.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 10**6, 2**31, 2**63, 2**64, 10**400, -0.0, 0.5, 1e-300, 1e300),
    *(math.inf, -math.inf, math.nan),
    *("", " ", "0", "8/255", "1/0", "1e400", "nan", "inf", "null", "yes", "~", "#", "\n", "a/b", "a:b", "é", "<b>"),
    *("calfat", "fedavg", "digits", "cnn", "natural", "pgd20", "dirichlet", "linf", "l2", "../x", "/dev/null"),
    *("a" * 5000, "\u202etxt", "\x1b[31m", "%s{}{0}$HOME"),
    *([], [[]], {}, [None], [1, 2, 3], ["natural", "natural"], [{}], {"": 1}, {"a": {"b": {"c": 1}}}),
    *({"name": None}, {"name": "calfat"}, {"name": "pgd", "steps": 0}, {"name": 3}),
)

#: Pieces of text that YAML, numbers or the terminal give a meaning.
PIECES = (
    *(":", "- ", "{", "}", "[", "]", ",", "'", '"', "\\", "#", "? ", "|\n", ">\n", "=", "@", "`", "~"),
    *("&a ", "*a", "<<: *a\n", "  x: [*a]\n", "a: 1\n", "calfat:\n", "%YAML 9.9\n", "---\n", "...\n"),
    *("!!bool maybe", "!!timestamp x", "!!binary x", "!!set {a}", "!!int 0x", "!x ", "!!python/object:os.system"),
    *("\t", "\r", "\x00", "\x1b]0;x\x07", "\ufeff", "\ud7ff", "\u2028"),
    *("0o17", "0x_", "1:30", "2001-99-99", "1_000", ".inf", "9" * 5000),
)

Tree = Any


def cases(seed: int, count: int) -> Iterator[Case]:
    """Checks of mutated files; ``suite --dry-run`` for some suites, ``check --show`` for some recipes."""
    for number in range(count):
        name = f"recipe, seed {seed}, number {number}"
        rng = random.Random(name)
        source = rng.choice(SHIPPED)
        content = mutated(source.read_text(encoding="utf-8"), rng)
        file = "mutated/case.yaml"
        words = ("check", file, *rng.choice([(), (), (), ("--show",), ("--seed", "1")]))
        if source.parent.name == "suites" and rng.random() < 0.3:
            words = ("suite", file, "--dry-run")
        yield Case(f"{name} ({source.name})", words, {file: content})


def mutated(text: str, rng: random.Random) -> bytes:
    """One to four changes of one kind or another."""
    kinds = rng.choice([(change_tree,), (change_tree,), (change_text,), (change_tree, change_text), (change_bytes,)])
    content: Any = text
    for kind in kinds:
        for _ in range(rng.randint(1, 4)):
            content = kind(content, rng)
    return content if isinstance(content, bytes) else content.encode(errors="surrogatepass")


def change_tree(text: str, rng: random.Random) -> str:
    """Change the tree of values and write it anew; a text that is no tree any more is changed as a text."""
    try:
        tree = yaml.safe_load(text)
        spots = list(_spots(tree))
    except (yaml.YAMLError, ValueError, RecursionError):
        return change_text(text, rng)
    if not spots:
        return change_text(text, rng)
    holder, key = rng.choice(spots)
    rng.choice(_TREE_CHANGES)(tree, holder, key, rng)
    try:
        return yaml.safe_dump(tree, sort_keys=False, default_flow_style=rng.choice([None, False, True]))
    except (yaml.YAMLError, ValueError):
        return change_text(text, rng)


def _spots(tree: Tree) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of every value."""
    pairs = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in pairs:
        yield tree, key
        yield from _spots(value)


def _other_value(tree: Tree, holder: Any, key: Any, rng: random.Random) -> None:
    holder[key] = copy.deepcopy(rng.choice(VALUES))


def _other_number(tree: Tree, holder: Any, key: Any, rng: random.Random) -> None:
    value = holder[key]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        holder[key] = rng.choice([-value, value * 1000, value + 0.5, value / 3, 0, str(value), [value]])
    else:
        _other_value(tree, holder, key, rng)


def _gone(tree: Tree, holder: Any, key: Any, rng: random.Random) -> None:
    del holder[key]


def _renamed(tree: Tree, holder: Any, key: Any, rng: random.Random) -> None:
    if isinstance(holder, dict):
        cut = rng.randrange(len(str(key)) + 1)
        other: Any = rng.choice([str(key)[:cut] + str(key)[cut + 1 :], f"{key}x", str(key).upper(), 3, True, None, ""])
        holder[other] = holder.pop(key)


def _moved(tree: Tree, holder: Any, key: Any, rng: random.Random) -> None:
    """The value appears somewhere else as well."""
    where, there = rng.choice(list(_spots(tree)))
    where[there] = copy.deepcopy(holder[key])


def _added(tree: Tree, holder: Any, key: Any, rng: random.Random) -> None:
    if isinstance(holder, dict):
        donor = yaml.safe_load(rng.choice(SHIPPED).read_text(encoding="utf-8"))
        where, there = rng.choice(list(_spots(donor)))
        holder[there if isinstance(there, str) else "x"] = where[there]
    else:
        holder.insert(key, copy.deepcopy(rng.choice(VALUES)))


def _wrapped(tree: Tree, holder: Any, key: Any, rng: random.Random) -> None:
    value = holder[key]
    for _ in range(rng.choice([1, 1, 3, 30])):
        value = rng.choice([[value], {"name": value}, {"x": value}])
    holder[key] = value


_TREE_CHANGES: tuple[Callable[[Tree, Any, Any, random.Random], None], ...] = (
    _other_value, _other_value, _other_value, _other_number, _other_number, _gone, _renamed, _moved, _added, _wrapped,
)  # fmt: skip


def change_text(text: str, rng: random.Random) -> str:
    """Put a piece in, leave some out, repeat a line, swap two, or splice another file in."""
    lines = text.splitlines(keepends=True) or [""]
    place, line = rng.randrange(len(text) + 1), rng.randrange(len(lines))
    way = rng.randrange(6)
    if way == 0:
        return text[:place] + rng.choice(PIECES) + text[place:]
    if way == 1:
        return text[:place] + text[place + rng.choice([1, 1, 5, 50]) :]
    if way == 2:
        return "".join([*lines[:line], lines[line] * rng.choice([2, 2, 2000]), *lines[line + 1 :]])
    if way == 3:
        rng.shuffle(lines)
        return "".join(lines)
    if way == 4:
        other = rng.choice(SHIPPED).read_text(encoding="utf-8").splitlines(keepends=True)
        return "".join([*lines[:line], *other[rng.randrange(len(other)) :]])
    return "".join([*lines[:line], " " * rng.randint(1, 4) + lines[line], *lines[line + 1 :]])


def change_bytes(text: str | bytes, rng: random.Random) -> bytes:
    """Flip, cut or repeat bytes."""
    content = bytearray(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    place = rng.randrange(len(content) + 1)
    way = rng.randrange(3)
    if way == 0 and place < len(content):
        content[place] = rng.randrange(256)
    elif way == 1:
        del content[place:]
    else:
        content[place:place] = rng.randbytes(rng.choice([1, 4, 300]))
    return bytes(content)
