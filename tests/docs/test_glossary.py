"""docs/glossary.md: what it names exists."""

from __future__ import annotations

import re

import pytest

import calfat_plugin
from calfat_plugin.cli.main import COMMANDS
from tests.docs.names import plugins, recipe_keys
from tests.docs.pages import text_of

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in text_of("glossary.md").splitlines()
    if line.startswith("|") and not line.startswith(("| term", "| ---"))
]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[3])})


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Keys of recipes, plugins, public names, commands, and what a run directory has."""
    files = set(re.findall(r"^\| `([^`]+)`", text_of("run_directory.md"), re.MULTILINE))
    commands = {f"calfat {name}" for name in COMMANDS}
    return {*recipe_keys(), *plugins(), *calfat_plugin.__all__, *commands, *files}


def test_there_is_one_line_for_each_term() -> None:
    assert all(len(row) == 4 and row[0] and row[2] for row in ROWS)
    terms = [row[0] for row in ROWS]
    assert len(set(terms)) == len(terms) >= 60


@pytest.mark.parametrize("name", NAMED)
def test_what_it_names_exists(name: str, known: set[str]) -> None:
    assert name in known
