"""Every hook is on docs/hooks.md with its signature, and works."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from calfat_plugin import entries, hookspecs
from calfat_plugin.entries import KINDS, Entry
from calfat_plugin.experiment import Experiment
from tests.cli.runner import ROOT
from tests.plugins import offering
from tests.recipes import assembled

HOOKS = [name for name in vars(hookspecs) if name.startswith("calfat_")]
PAGE = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")


def section(hook: str) -> str:
    return PAGE.partition(f"### `{hook}`\n")[2].partition("\n### ")[0]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_documented(hook: str) -> None:
    specification = getattr(hookspecs, hook)
    signature = f"{hook}{inspect.signature(specification)}".replace("'", "")
    assert section(hook).startswith(f"\n```text\n{signature}\n```\n")
    assert specification.__doc__


def test_the_page_has_the_hooks_in_the_order_of_their_module_and_no_others() -> None:
    assert re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE) == HOOKS


def test_every_hook_is_used() -> None:
    assert set(HOOKS) == {kind.hook for kind in KINDS} | set(hookspecs.LIFE)


def test_examples_on_the_page_are_python() -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        ast.parse(example)


# --- what can be offered ----------------------------------------------------------------------------------------------


#: Hook to a recipe that names what a plugin offers there as ``mine``, and where the experiment has it.
PICKED: dict[str, tuple[str, Callable[[Experiment], Any]]] = {
    "calfat_local_trainers": ("calfat: {trainer: mine}", lambda found: found.trainer),
    "calfat_loss_modifiers": ("calfat: {trainer: {name: fedpgd, loss: mine}}", lambda found: found.modifier),
    "calfat_inner_attacks": ("calfat: {threat: {inner: mine}}", lambda found: found.threat.inner),
    "calfat_aggregators": ("calfat: {aggregator: mine}", lambda found: found.aggregator),
    "calfat_evaluators": ("calfat: {evaluators: [mine]}", lambda found: found.evaluators[0]),
    "calfat_datasets": ("data_args: {dataset: mine}\ncalfat:", lambda found: found.dataset),
    "calfat_models": ("model_args: {model: mine}\ncalfat:", lambda found: found.model),
    "calfat_partitions": ("data_args: {partition_method: mine}\ncalfat:", lambda found: found.partition),
    "calfat_attackers": ("calfat: {clients: [{ids: 0, attacker: mine}]}", lambda found: found.clients[0].attacker),
    "calfat_loggers": ("calfat: {loggers: [mine]}", lambda found: found.loggers[0]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_plugin_offers_can_be_named_in_a_recipe(kind: type[Entry]) -> None:
    more = {"methods": ("fedpgd",)} if kind is entries.ModifierEntry else {}
    entry = kind("mine", build=dict, **more)  # type: ignore[arg-type]
    recipe, pick = PICKED[kind.hook]
    assert pick(assembled(recipe, plugins=(offering(entry),))).entry is entry
