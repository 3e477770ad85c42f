"""A key of a recipe is declared once; parser, recipe as run, JSON schema and reference go by the declaration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import pytest

from calfat_plugin.cli.schema import recipe_schema
from calfat_plugin.errors import RecipeError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.options import OptionInfo, option
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.recipe.keys import keys_of
from calfat_plugin.recipe.schema import CalfatSection, Threat
from calfat_plugin.registry import Registry
from reference_pages import pages
from tests.snapshot import TextSnapshot

REGISTRY = Registry.load(entry_points=False)


@dataclass(frozen=True)
class Noted(Threat):
    """``calfat.threat`` with one more key."""

    note: str = option("none", help="a remark for the reader")


@pytest.fixture
def noted() -> Iterator[None]:
    """The section ``calfat.threat`` has a key ``note``."""
    section = keys_of(CalfatSection)["threat"]
    object.__setattr__(section, "config", Noted)
    yield
    object.__setattr__(section, "config", Threat)


def recipe(threat: str) -> Experiment:
    text = f"model_args: {{model: cnn_small}}\ncalfat:\n  trainer: calfat\n  threat: {threat}\n"
    return assemble(parse_document(text, "r.yaml"), REGISTRY)


@pytest.mark.usefixtures("noted")
def test_a_new_key_is_known_wherever_recipes_are_read_or_described(snapshot: TextSnapshot) -> None:
    assert recipe("{eps: 0.1, note: mine}").as_run()["calfat"]["threat"]["note"] == "mine"
    assert recipe("{eps: 0.1}").as_run()["calfat"]["threat"]["note"] == "none"
    with snapshot.raises(RecipeError):
        recipe("{noet: mine}")
    threat = recipe_schema(REGISTRY)["properties"]["calfat"]["properties"]["threat"]
    assert threat["properties"]["note"]["description"] == "a remark for the reader"
    assert "| `note` | a text | `none` | a remark for the reader |" in pages()["recipes.md"]


def test_eps_of_a_recipe_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[object] = []
    original = OptionInfo.parse

    def parse(info: OptionInfo, value: object) -> object:
        if value in ("24/511", Fraction(24, 511)):
            parsed.append(value)
        return original(info, value)

    monkeypatch.setattr(OptionInfo, "parse", parse)
    experiment = recipe("{eps: 24/511}")
    assert experiment.threat.eps == Fraction(24, 511)
    assert [pick.options.threat(experiment.threat).eps for pick in experiment.evaluators[1:]] == [Fraction(24, 511)] * 2
    assert parsed == ["24/511"]


def test_without_it_the_key_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"section 'threat' has no option 'note'"):
        recipe("{note: mine}")
