"""Where a key matters is a tag on its declaration: the lists that follow from it, and a key that is added."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import calfat_plugin
from calfat_plugin.experiment import Experiment, assemble, same_but_rounds, why_not
from calfat_plugin.experiment.differences import unchanging_digest
from calfat_plugin.host.tasks import fingerprint
from calfat_plugin.loggers.base import public_recipe
from calfat_plugin.options import Tag, option, tagged
from calfat_plugin.recipe.clients import group_keys_with
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.recipe.keys import Section, keys_of
from calfat_plugin.recipe.schema import HOST_SECTIONS, CalfatSection
from calfat_plugin.recipe.tagged_keys import has_tag, keys_with, reasons_to_keep, without
from calfat_plugin.recipe.training import EMAOptions
from calfat_plugin.registry import Registry
from calfat_plugin.report.scores import problem_of, settings_of
from calfat_plugin.suites.record import digest
from tests.report.made import experiment

REGISTRY = Registry.load(entry_points=False)

FREE = {
    "device_args",
    "data_args.data_cache_dir",
    "common_args.host",
    "comm_args",
    "calfat.dataset.download",
    "calfat.evaluation.evidence_mb",
    "calfat.loggers",
    "calfat.reported",
    "calfat.runtime.executor",
    "calfat.runtime.scheduler",
    "calfat.flower",
    "calfat.silo",
    "calfat.plugins.*.file",
}
KEYS = {
    Tag.FREE: FREE,
    Tag.MAY_CHANGE: FREE | {"calfat.dataset.sha256", "train_args.patience"},
    Tag.NO_DIGEST: FREE | {"calfat.dataset.sha256", "common_args.random_seed", "calfat.name"},
    Tag.NO_SETTING: FREE | {"common_args.random_seed", "calfat.name", "calfat.runtime"},
    Tag.PROBLEM: {
        "data_args",
        "model_args",
        "train_args.client_num_in_total",
        "calfat.dataset",
        "calfat.model",
        "calfat.partition",
        "calfat.threat",
    },
    Tag.MEASURED: {
        "data_args",
        "calfat.dataset",
        "calfat.partition",
        "calfat.evaluators",
        "calfat.monitor",
        "calfat.evaluation",
        "calfat.reported",
        "calfat.threat.norm",
        "calfat.threat.eps",
    },
    Tag.OF_A_PARTY: {
        "device_args",
        "comm_args",
        "data_args.data_cache_dir",
        "calfat.dataset.download",
        "calfat.runtime.threads",
        "calfat.silo",
        "calfat.flower",
        "calfat.evaluators",
        "calfat.monitor",
        "calfat.evaluation",
        "calfat.loggers",
        "calfat.reported",
        "calfat.plugins.*.file",
    },
    Tag.NAMED_LAST: {"calfat.evaluators", "calfat.evaluation", "calfat.monitor", "calfat.plugins"},
    Tag.SECRET: {"comm_args"},
}


@pytest.mark.parametrize(("tag", "keys"), KEYS.items(), ids=lambda value: value.name if isinstance(value, Tag) else "")
def test_the_keys_with_a_tag_are_these(tag: Tag, keys: set[str]) -> None:
    assert {*keys_with(tag)} == keys


def test_every_tag_is_in_the_table_above() -> None:
    assert {*KEYS} == {*Tag, Tag.FREE}


def test_keys_of_a_group_that_are_of_the_problem() -> None:
    problem = {"name", "ids", "share", "smallest", "largest", "seed", "threat", "attacker"}
    assert {*group_keys_with(Tag.PROBLEM)} == problem


def test_keys_whose_change_a_resumed_run_explains() -> None:
    assert {*reasons_to_keep()} == {
        "train_args.comm_round",
        "calfat.runtime.threads",
        "calfat.runtime.layout",
        "calfat.runtime.precision",
        "calfat.plugins",
        "calfat.evaluators",
    }
    assert why_not(["calfat.runtime.precision"]) == "Rounds in different arithmetic would make a model of neither. "
    assert why_not(["calfat.trainer.name"]) == ""


def test_a_section_gives_its_tags_to_the_keys_below_it_and_to_no_other() -> None:
    assert has_tag("device_args.gpu_id", Tag.FREE)
    assert has_tag("calfat.silo.tls.ca", Tag.FREE)
    assert has_tag("calfat.plugins.mine.file", Tag.FREE)
    assert not has_tag("calfat.plugins.mine.sha256", Tag.FREE)
    assert not has_tag("calfat.dataset.download_from", Tag.FREE)
    assert not has_tag("calfat", Tag.FREE)
    recipe = {"device_args": {"gpu_id": 1}, "calfat": {"silo": {"bind": "x"}, "trainer": {"name": "calfat"}}}
    assert without(recipe, Tag.FREE) == {"calfat": {"trainer": {"name": "calfat"}}}


def test_public_sections_are_those_without_secrets() -> None:
    recipe: dict[str, Any] = {name: {"key": 1} for name in (*HOST_SECTIONS, "calfat", "tracking_args")}
    assert list(public_recipe(recipe)) == [
        *("common_args", "data_args", "model_args", "train_args", "device_args", "calfat")
    ]


def _alike(function: Callable[[Experiment], object]) -> Callable[[Experiment, Experiment], bool]:
    return lambda first, second: function(first) == function(second)


#: Tag to whether the part of the package that asks for it takes two recipes as alike.
ALIKE: dict[Tag, Callable[[Experiment, Experiment], bool]] = {
    Tag.MAY_CHANGE: lambda first, second: same_but_rounds(first.as_run(), second.as_run()) == [],
    Tag.NO_DIGEST: _alike(digest),
    Tag.NO_SETTING: _alike(lambda run: settings_of(run.as_run())),
    Tag.OF_A_PARTY: _alike(fingerprint),
    Tag.SECRET: _alike(lambda run: public_recipe(run.as_run())),
}


@pytest.fixture
def declared() -> Iterator[Callable[[Tag], None]]:
    """Gives the section ``calfat.ema``, which has no tags, a key ``note`` that has some."""
    section = keys_of(CalfatSection)["ema"]
    assert isinstance(section, Section)
    caches = (keys_with, reasons_to_keep)

    def declare(tags: Tag) -> None:
        @dataclass(frozen=True)
        class Noted(EMAOptions):
            note: str = tagged(tags, option("none", help="a remark for the reader"), fixed_because="It is a remark")

        object.__setattr__(section, "config", Noted)
        for cached in caches:
            cached.cache_clear()

    yield declare
    object.__setattr__(section, "config", EMAOptions)
    for cached in caches:
        cached.cache_clear()


def recipe(note: str) -> Experiment:
    text = f"model_args: {{model: cnn_small}}\ncalfat:\n  trainer: calfat\n  ema: {{note: {note}}}\n"
    return assemble(parse_document(text, "r.yaml"), REGISTRY)


@pytest.mark.parametrize("tags", [Tag(0), *ALIKE, Tag.FREE, Tag.FREE | Tag.OF_A_PARTY], ids=lambda tags: str(tags.name))
def test_a_new_key_matters_where_its_tags_say_and_nowhere_else(tags: Tag, declared: Callable[[Tag], None]) -> None:
    declared(tags)
    first, second = recipe("mine"), recipe("yours")
    assert {tag: alike(first, second) for tag, alike in ALIKE.items()} == {tag: tag in tags for tag in ALIKE}
    may_change = Tag.MAY_CHANGE in tags
    assert (unchanging_digest(first.as_run()) == unchanging_digest(second.as_run())) == may_change
    assert "calfat.ema.note" not in problem_of(first.as_run())


def test_a_new_key_of_the_problem_keeps_accuracies_apart(declared: Callable[[Tag], None]) -> None:
    declared(Tag.PROBLEM)
    assert problem_of(recipe("mine").as_run())["calfat.ema.note"] == "mine"


def test_a_new_key_that_may_not_change_gives_its_reason(declared: Callable[[Tag], None]) -> None:
    declared(Tag(0))
    different = same_but_rounds(recipe("mine").as_run(), recipe("yours").as_run())
    assert different == ["calfat.ema.note"]
    assert why_not(different) == "It is a remark. "


@pytest.mark.parametrize(
    ("keys", "may_grow"),
    [
        ((), True),
        (("train_args.lr_schedule=cosine",), False),
        (("calfat.threat.by_class={}",), False),
        (("calfat.threat.by_class={warmup: 0}",), True),
        (("calfat.threat.inner={name: atas, reset: 2}",), False),
        (("calfat.threat.inner={name: atas, reset: 3}",), True),
        (("calfat.clients=[{ids: 0, threat: {inner: {name: atas, reset: 2}}}]",), False),
    ],
)
def test_a_run_may_have_more_rounds_where_none_of_them_counts_the_rounds(keys: tuple[str, ...], may_grow: bool) -> None:
    run, longer = (experiment(*keys, f"train_args.comm_round={rounds}").as_run() for rounds in (4, 7))
    different = [] if may_grow else ["train_args.comm_round"]
    assert same_but_rounds(run, longer) == same_but_rounds(longer, run) == different
    assert (unchanging_digest(run) == unchanging_digest(longer)) == may_grow


#: Two keys of the section ``calfat``, of which one says how a run is carried out and the other one makes the model.
ADDED = """\
    note: str = tagged(Tag.FREE | Tag.OF_A_PARTY, option("none", help="a remark for the reader"))
    mode: str = option("old", choices=("old", "new"), help="how it trains")
"""
USE = """\
import json
from calfat_plugin.cli.schema import recipe_schema
from calfat_plugin.errors import RecipeError
from calfat_plugin.experiment import assemble, same_but_rounds
from calfat_plugin.host.tasks import fingerprint
from calfat_plugin.recipe.document import Document, parse_document
from calfat_plugin.registry import Registry
from calfat_plugin.report.scores import settings_of
from calfat_plugin.suites.record import digest

REGISTRY = Registry.load(entry_points=False)


def recipe(keys):
    text = f"model_args: {{model: cnn_small}}\\ncalfat: {{trainer: calfat, {keys}}}\\n"
    return assemble(parse_document(text, "r.yaml"), REGISTRY)


def alike(first, second):
    runs = first.as_run(), second.as_run()
    return {
        "resume": same_but_rounds(*runs) == [],
        "setting": settings_of(runs[0]) == settings_of(runs[1]),
        "digest": digest(first) == digest(second),
        "parties": fingerprint(first) == fingerprint(second),
    }


plain, noted, new = recipe("name: x"), recipe("note: mine"), recipe("mode: new")
assert assemble(Document("again.yaml", noted.as_run()), REGISTRY).as_run() == noted.as_run()
try:
    refused = recipe("noet: mine").name
except RecipeError as error:
    refused = str(error)
properties = recipe_schema(REGISTRY)["properties"]["calfat"]["properties"]
print(json.dumps({
    "values": [noted.note, noted.as_run()["calfat"]["note"], plain.mode, new.mode],
    "note": alike(plain, noted),
    "mode": alike(plain, new),
    "refused": refused,
    "help": [properties[key]["description"] for key in ("note", "mode")],
}))
"""


def test_a_key_added_to_calfat_is_a_change_of_one_file(tmp_path: Path) -> None:
    package = Path(calfat_plugin.__file__).parent
    shutil.copytree(package, tmp_path / "calfat_plugin", ignore=shutil.ignore_patterns("__pycache__"))
    schema = tmp_path / "calfat_plugin" / "recipe" / "schema.py"
    text, last = schema.read_text(), "    flower: FlowerOptions = tagged("
    assert text.count(last) == 1
    schema.write_text(text.replace(last, ADDED + last))
    use = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert use.returncode == 0, use.stderr
    result = json.loads(use.stdout)
    assert result["values"] == ["mine", "mine", "old", "new"]
    assert result["note"] == {"resume": True, "setting": True, "digest": True, "parties": True}
    assert result["mode"] == {"resume": False, "setting": False, "digest": False, "parties": False}
    assert result["refused"].startswith("r.yaml:2: calfat.noet: ")
    assert "'note'" in result["refused"]
    assert result["help"] == ["a remark for the reader", "how it trains"]
