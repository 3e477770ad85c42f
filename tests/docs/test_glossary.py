"""docs/glossary.md: what it names exists."""

from __future__ import annotations

import json
import re

import pytest

import calfat_plugin
from calfat_plugin.cli.main import COMMANDS
from calfat_plugin.entries import Entry
from calfat_plugin.registry import Registry
from tests.cli.runner import calfat
from tests.docs.pages import text_of

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in text_of("glossary.md").splitlines()
    if line.startswith("|") and not line.startswith(("| term", "| ---"))
]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[3])})


def _keys(section: dict[str, object], below: str = "") -> set[str]:
    """Dotted keys of a recipe, those of sections included."""
    found = set()
    for key, value in section.items():
        found |= {f"{below}{key}"} | (_keys(value, f"{below}{key}.") if isinstance(value, dict) else set())
    return found


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Keys of recipes, plugins, public names, commands, and what a run directory has."""
    silo = ("--set", "common_args.training_type=cross_silo", "--set", "comm_args.backend=GRPC")
    recipe = json.loads(calfat("check", "calfat_digits", "--json", *silo).out)["recipe"]
    registry = Registry.load(entry_points=False)
    plugins = {name for kind in Entry.__subclasses__() for name in registry.names(kind)}
    files = set(re.findall(r"`([^`]+)`", text_of("run_directory.md")))
    return _keys(recipe) | plugins | set(calfat_plugin.__all__) | {f"calfat {name}" for name in COMMANDS} | files


def test_there_is_one_line_for_each_term() -> None:
    assert all(len(row) == 4 and row[0] and row[2] for row in ROWS)
    terms = [row[0] for row in ROWS]
    assert len(set(terms)) == len(terms) >= 60


@pytest.mark.parametrize("name", NAMED)
def test_what_it_names_exists(name: str, known: set[str]) -> None:
    assert name in known
