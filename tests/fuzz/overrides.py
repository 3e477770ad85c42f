"""Mutated ``--set`` options on shipped recipes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import yaml

from tests.fuzz.bench import ROOT, Case
from tests.fuzz.texts import PIECES, VALUES

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def cases(seed: int, count: int) -> Iterator[Case]:
    """Checks with one to three overrides each; of suites, some."""
    suites = sorted((ROOT / "suites").glob("digits_table*.yaml"))
    keys = sorted({key for path in RECIPES for key in _keys(yaml.safe_load(path.read_text(encoding="utf-8")))})
    for number in range(count):
        name = f"override, seed {seed}, number {number}"
        rng = random.Random(name)
        file = rng.choice([*RECIPES, rng.choice(suites)])
        words = [word for _ in range(rng.randint(1, 3)) for word in ("--set", override(keys, rng))]
        yield Case(f"{name} ({file.name})", ("check", f"{file.parent.name}/{file.name}", *words))


def override(keys: list[str], rng: random.Random) -> str:
    """``section.key=value``, more or less."""
    key, value = rng.choice(keys), rng.choice(VALUES)
    written = (
        value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()
    )
    written = rng.choice(
        [written, written, rng.choice(PIECES), f"{{name: {written}}}", f"[{written}]", f"&a [{written}, *a]"]
    )
    at = rng.randrange(len(key) + 1)
    key = rng.choice([key, key, key, key[:at] + key[at + 1 :], f"{key}.x", key.upper(), key.replace(".", "..", 1), ""])
    text = f"{key}{rng.choice(['=', '=', '=', '=', ': ', '', '=='])}{written}"
    return text.replace("\x00", "")  # no argument of a command holds one


def _keys(tree: Any, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys(value, f"{prefix}{key}.")
