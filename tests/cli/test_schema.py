"""``calfat schema``: an editor accepts what ``calfat check`` accepts, and marks what is plainly wrong."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import yaml
from jsonschema import Draft7Validator

from calfat_plugin import AggregatorEntry, option
from calfat_plugin.cli.plugins import entry_page
from calfat_plugin.cli.schema import recipe_schema
from calfat_plugin.errors import CalfatError
from calfat_plugin.experiment import assemble
from calfat_plugin.recipe.document import Document
from calfat_plugin.recipe.schema import CALFAT_KEYS, HOST_SECTIONS
from calfat_plugin.registry import Registry
from calfat_plugin.shipped import shipped_files
from tests.cli.runner import calfat
from tests.plugins import offering
from tests.silo.federation import RECIPE as SILO

REGISTRY = Registry.load(entry_points=False)
SCHEMA = recipe_schema(REGISTRY)
VALIDATOR = Draft7Validator(SCHEMA)


def complaints(recipe: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(recipe)]


def test_it_is_a_schema_with_every_section_and_key_and_the_command_prints_it() -> None:
    Draft7Validator.check_schema(SCHEMA)
    assert set(SCHEMA["properties"]) == {*HOST_SECTIONS, "calfat"}
    assert set(SCHEMA["properties"]["calfat"]["properties"]) == set(CALFAT_KEYS)
    printed = json.loads(calfat("schema").out)
    assert set(printed) == set(SCHEMA)
    assert printed["properties"]["train_args"] == SCHEMA["properties"]["train_args"]


@pytest.mark.parametrize("name", shipped_files())
def test_shipped_recipes_are_accepted_as_written_and_as_run(name: str) -> None:
    written = yaml.safe_load(shipped_files()[name].read_text())
    assert complaints(written) == []
    assert complaints(assemble(Document(name, written), REGISTRY).as_run()) == []


@pytest.mark.parametrize(
    "text",
    [
        "calfat: {trainer: null, aggregator: , threat: , silo: , evaluators: null, reported: null}",
        "calfat: {trainer: {preset: release}, aggregator: {weights: uniform}}",
        "calfat: {threat: {eps: 8/255, step_size: 1e-2}, evaluators: [{name: pgd, step_size: 2/3 eps}]}\n"
        "train_args: {learning_rate: 1e-2, comm_round: 1e1}",
        "calfat: {evaluators: [natural, pgd7, {name: pgd7, label: mine, restarts: 2}]}",
        "calfat: {trainer: {name: fedpgd, loss: {name: calibrated}}}",
        "calfat: {}\ntrain_args: {server_lr: 1}",
    ],
)
def test_other_ways_of_writing_are_accepted(text: str) -> None:
    assert complaints(yaml.safe_load(text)) == []
    assert complaints(SILO) == []


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("train_args: {comm_round: 3}", "$"),
        ("calfat: {trainr: calfat}", "$.calfat"),
        ("calfat: {trainer: calfatt}", "$.calfat.trainer"),
        ("calfat: {trainer: {name: calfat, presett: release}}", "$.calfat.trainer"),
        ("calfat: {trainer: {presett: release}}", "$.calfat.trainer"),
        ("calfat: {evaluators: [natural, {name: pgd20, step: 3}]}", "$.calfat.evaluators[1]"),
        ("calfat: {evaluators: natural}", "$.calfat.evaluators"),
        ("calfat: {evaluators: [{label: mine}]}", "$.calfat.evaluators[0]"),
        ("calfat: {threat: {eps: eight}}", "$.calfat.threat.eps"),
        ("calfat: {trainer: {name: fedpgd, label: mine}}", "$.calfat.trainer"),
        ("calfat: {threat: {eps: eps/4}}", "$.calfat.threat.eps"),
        ("calfat: {threat: {step_size: eps*4}}", "$.calfat.threat.step_size"),
        ("calfat: {}\ntrain_args: {comm_round: 0}", "$.train_args.comm_round"),
        ("calfat: {}\ncommon_args: {training_type: simulaton}", "$.common_args.training_type"),
        ("calfat: {}\ndevice_args: {using_gpu: 'yes'}", "$.device_args.using_gpu"),
    ],
)
def test_what_is_plainly_wrong_is_marked_at_its_place(text: str, at: str) -> None:
    recipe = yaml.safe_load(text)
    with pytest.raises(CalfatError):
        assemble(Document("r.yaml", recipe), REGISTRY)
    assert [line.partition(": ")[0] for line in complaints(recipe)] == [at]


@dataclass(frozen=True)
class Lists:
    """Options that are lists."""

    widths: tuple[int, ...] | None = option((8,), low=1, help="of layers")
    kinds: tuple[Literal["fog", "snow"], ...] = option((), help="which")


@pytest.mark.parametrize(
    ("options", "good"),
    [
        ("widths: [1, '2'], kinds: [fog, snow]", True),
        ("widths: null, kinds: []", True),
        ("widths: 3", False),
        ("widths: [0]", False),
        ("widths: [null]", False),
        ("kinds: null", False),
        ("kinds: [rain]", False),
    ],
)
def test_lists_are_marked_where_the_command_refuses_them(options: str, good: bool) -> None:
    entry = AggregatorEntry("listed", build=str, config=Lists, summary="of lists")
    registry = Registry.load(entry_points=False, plugins=[offering(entry)])
    recipe = yaml.safe_load(f"calfat: {{aggregator: {{name: listed, {options}}}}}")
    assert "| `widths` | a list, each a whole number, >= 1, or null | `[8]` | of layers |" in entry_page(
        registry, entry
    )
    found = list(Draft7Validator(recipe_schema(registry)).iter_errors(recipe))
    assert (found == []) == good
    with nullcontext() if good else pytest.raises(CalfatError):
        assemble(Document("r.yaml", recipe), registry)
