"""docs/report.md: its commands exist, its recipes assemble, its pictures and pages are there."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from calfat_plugin.analyses.tsne import EXAMPLES, PERPLEXITY
from calfat_plugin.cli.main import main
from calfat_plugin.experiment import assemble
from calfat_plugin.loggers.scalars import accuracies, round_scalars
from calfat_plugin.loggers.tensorboard import FOLDER
from calfat_plugin.recipe.document import Document
from calfat_plugin.registry import Registry
from tests.report.made import evaluation, record

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "report.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


COMMANDS = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_are_understood(words: list[str]) -> None:
    assert words[0] == "calfat"
    context = click.Context(main, info_name="calfat")
    command = main.get_command(context, words[1])
    assert command is not None
    given = command.make_context(words[1], words[2:], parent=context, resilient_parsing=False).params
    recipes = [value for value in given.values() if isinstance(value, str) and value.startswith("recipes/")]
    assert all((ROOT / recipe).is_file() for recipe in recipes)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_recipes_are_understood(block: str) -> None:
    run = assemble(Document("report.md", yaml.safe_load(block)), Registry.load(entry_points=False))
    assert run.recipe.warnings == ()
    assert run.loggers or run.recipe.reported.percent


def test_pictures_and_pages_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (ROOT / "docs" / target).is_file(), target


def test_names_and_numbers_are_those_of_the_code() -> None:
    assert f"up to {EXAMPLES:,} clean test examples" in TEXT
    assert f"perplexity {PERPLEXITY:g}" in TEXT
    assert f"`{FOLDER}/`" in TEXT
    result = evaluation("natural", 0.5)
    finished = dataclasses.replace(record(1, {"natural": 0.5}), learning_rate=0.1)
    known = {*round_scalars(finished), *accuracies("final", result)}
    told = set(re.findall(r"`([a-z_]+(?:/[a-z_<>]+)?)`", TEXT.partition("Both log")[2].partition("A resumed run")[0]))
    shown = {re.sub(r"client_\d+", "client_<k>", name).replace("natural", "<evaluator>") for name in known}
    assert told - {"_release"} == {name for name in shown if not name.endswith("_release")}
