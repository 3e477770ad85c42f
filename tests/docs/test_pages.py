"""docs/howto, docs/explanation, troubleshooting and glossary: what they show works, and what they point to is there."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click
import numpy as np
import pytest
import yaml

from calfat_plugin.cli.main import main
from calfat_plugin.entries import EvaluatorEntry
from calfat_plugin.experiment import assemble
from calfat_plugin.host.runtimes import supported_runtime
from calfat_plugin.recipe.document import Document
from calfat_plugin.registry import Registry
from calfat_plugin.testing import builtin_registry, check_attacker, check_dataset, check_evaluator, check_trainer
from tests.docs.names import BUILT_IN, inline, recipe_keys
from tests.docs.pages import DOCS, FENCE, PAGES, blocks, text_of
from tests.docs.reader import Reader
from tests.inputs.on_disk import write_class_folders


def _prepare_data(folder: Path) -> None:
    """The reader's own images, and arrays."""
    write_class_folders(folder / "images", ["benign", "malignant"], 40, 10, size=40)
    rng = np.random.default_rng(0)
    arrays = {
        f"{name}_{split}": part
        for split, count in (("train", 300), ("test", 30))
        for name, part in (
            ("x", rng.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)),
            ("y", np.arange(count, dtype=np.uint8) % 3),
        )
    }
    np.savez(folder / "shapes.npz", **arrays)  # type: ignore[arg-type]


PREPARED: dict[str, Callable[[Path], None]] = {"howto/data.md": _prepare_data}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_every_block_works(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's order, except those that say why they are not run."""
    PREPARED.get(page, lambda folder: None)(tmp_path)
    reader = Reader(tmp_path, monkeypatch)
    for block in blocks(page):
        if block.is_run:
            reader.follow(block)


CHECKED: dict[str, Callable[[Registry, Path], object]] = {
    "howto/attackers.md": lambda registry, folder: check_attacker("stale", registry=registry),
    "howto/data.md": lambda registry, folder: check_dataset("shapes", folder, registry=registry),
    "howto/evaluator.md": lambda registry, folder: check_evaluator("corners", registry=registry),
    "howto/method.md": lambda registry, folder: check_trainer("margin-fat", registry=registry),
}


@pytest.mark.parametrize("page", CHECKED)
def test_plugins_that_a_page_shows_keep_their_contract(page: str, tmp_path: Path) -> None:
    PREPARED.get(page, lambda folder: None)(tmp_path)
    modules = []
    for block in blocks(page):
        if block.saved and "@hookimpl" in block.text:
            modules.append(ModuleType(Path(block.saved).stem))
            exec(compile(block.text, block.saved, "exec", dont_inherit=True), vars(modules[-1]))
    CHECKED[page](builtin_registry(*modules), tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_keys_in_the_text_exist(page: str) -> None:
    sections = {key for key in recipe_keys() if "." not in key}
    keys = [name for name in inline(page) if re.fullmatch(rf"({'|'.join(sections)})(\.\w+)+", name)]
    assert [key for key in keys if key not in recipe_keys()] == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_are_understood(page: str) -> None:
    """Their options exist, and the attacks that they name."""
    for text in inline(page):
        typed = f"calfat attack run {text}" if text.startswith("--attacks ") else text
        if not typed.startswith("calfat "):
            continue
        words = shlex.split(typed.replace("…", "").replace(" N", " 2"))
        if len(words) < 3:
            continue
        command = main.get_command(click.Context(main), words[1])
        assert command is not None, text
        given = command.make_context(words[1], words[2:]).params
        for pick in given.get("attacks", "").split(",") if words[1] == "attack" else ():
            assert BUILT_IN.find(EvaluatorEntry, pick.rpartition("=")[2])


TYPED = {
    (path.name, line)
    for path in sorted(DOCS.glob("*.md"))
    for block in FENCE.finditer(re.sub(r"^ +(?=```|calfat )", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    for line in re.sub(r"\\\n\s*", "", block[2]).splitlines()
    if line.startswith("calfat ")
}


@pytest.mark.parametrize(("page", "line"), sorted(TYPED))
def test_commands_that_a_page_shows_are_understood(page: str, line: str) -> None:
    """Of the pages whose blocks are not run: the commands and their options exist."""
    context = click.Context(main, info_name="calfat")
    _, *words = shlex.split(re.sub(r" (>|&|#).*$", "", line))
    assert words[0] in (*main.list_commands(context), "--version", "--help"), line
    if (command := main.get_command(context, words[0])) is not None:
        command.make_context(words[0], words[1:], parent=context, resilient_parsing=False)


@pytest.mark.parametrize("page", ["cross_silo.md", "report.md"])
def test_recipes_that_a_page_shows_are_good(page: str) -> None:
    """Each is a change of the first: other sections, other keys below ``calfat`` and ``calfat.silo``."""
    shown = re.findall(r"^ *```yaml\n(.*?)^ *```", text_of(page), re.MULTILINE | re.DOTALL)
    first = yaml.safe_load(shown[0])
    for change in map(yaml.safe_load, shown):
        calfat = {**first["calfat"], **change.get("calfat", {})}
        calfat["silo"] = {**(first["calfat"].get("silo") or {}), **(calfat.get("silo") or {})}
        experiment = assemble(Document(page, {**first, **change, "calfat": calfat}), BUILT_IN)
        if page == "cross_silo.md":
            supported_runtime(experiment)
        assert experiment.warnings == ()


def message(node: ast.expr) -> str:
    """What an expression of the code says, with … for values; of what is no text: …"""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(message, node.values))
    if isinstance(node, ast.BinOp):
        return message(node.left) + message(node.right)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


def test_messages_that_have_a_heading_are_said() -> None:
    """Whoever meets a message searches the page for its words."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in DOCS.parent.glob("calfat_plugin/**/*.py")]
    said = [message(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr)]
    for heading in re.findall(r"^### `(.*)`$", text_of("troubleshooting.md"), re.MULTILINE):
        pattern = re.compile(".*".join(map(re.escape, heading.split("…"))), re.DOTALL)
        assert any(map(pattern.search, said)), heading
