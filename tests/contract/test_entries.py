"""Entries: what an author may write, and what each mistake is told as."""

from __future__ import annotations

import re
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import pytest

from calfat_plugin import entries
from calfat_plugin.cli.plugins import entry_page
from calfat_plugin.entries import (
    KINDS,
    AggregatorEntry,
    Entry,
    EvaluatorEntry,
    InnerAttackEntry,
    ModifierEntry,
    Preset,
    TrainerEntry,
)
from calfat_plugin.errors import CalfatError, OptionError, PluginError, RecipeError
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.options import describe_options, option
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.recipe.schema import HOST_SECTIONS, EvaluationOptions, Monitor, Recipe, RuntimeOptions
from calfat_plugin.recipe.training import ADDED
from calfat_plugin.registry import Registry
from calfat_plugin.threat import ThreatModel
from tests import recipes
from tests.plugins import offering
from tests.snapshot import TextSnapshot


@dataclass(frozen=True)
class Steps:
    """Options of a test."""

    steps: int = option(3, low=1, help="how many")


@dataclass(frozen=True)
class Margins:
    """Options of a test, one of them without a default."""

    scale: float = option(help="of all")
    margin: float = option(1.0, low=0, help="where hinged")
    hinge: bool = option(True, help="whether it hinges")


@dataclass(frozen=True)
class Named:
    """An option that recipes could not tell from the plugin's name."""

    name: str = option("x", help="no")


@dataclass(frozen=True)
class WithLoss:
    """An option that is a trainer's own key."""

    loss: str = option("ce", help="no")


def refusal(kind: type[Entry], *arguments: Any, **more: Any) -> str:
    with pytest.raises(PluginError) as raised:
        kind(*arguments, **more)
    return str(raised.value)


@pytest.mark.parametrize("name", ["Pgd", "20pgd", "p g d", "", "pgd/20", None, 3])
def test_a_name_that_recipes_could_not_write_is_refused(name: Any, snapshot: TextSnapshot) -> None:
    snapshot(refusal(EvaluatorEntry, name, build=dict))


def test_options_that_recipes_use_themselves_are_refused() -> None:
    said = "has an option '{}'; recipes use that key for something else."
    assert refusal(EvaluatorEntry, "e", build=dict, config=Named) == f"evaluator 'e' {said.format('name')}"
    for key in ("loss", *ADDED):
        config = make_dataclass("Taken", [(key, str, option("x", help="no"))], frozen=True)
        assert refusal(TrainerEntry, "t", build=dict, config=config) == f"local trainer 't' {said.format(key)}"
    assert EvaluatorEntry("e", build=dict, config=WithLoss).name == "e"  # only a trainer has a 'loss' beside it


@pytest.mark.parametrize(
    "wrong",
    [
        {"number_option": "steps"},
        {"config": Steps, "presets": {"a": Preset("b", {"step": 1})}},
    ],
)
def test_options_that_recipes_could_not_express_are_refused(wrong: dict[str, Any], snapshot: TextSnapshot) -> None:
    snapshot(refusal(EvaluatorEntry, "e", build=dict, **wrong))


@pytest.mark.parametrize(
    ("kind", "fields", "complaint"),
    [
        (TrainerEntry, {"build": None}, "build is None; expected str | Callable[..., Any]."),
        (TrainerEntry, {"config": Steps()}, "config is Steps(steps=3); expected type."),
        (TrainerEntry, {"citation": "Me, 2026"}, "citation is 'Me, 2026'; expected Citation | None."),
        (TrainerEntry, {"presets": {"a": {}}}, "presets is {'a': {}}; expected Mapping[str, Preset]."),
        (TrainerEntry, {"check": 5}, "check is 5; expected Callable[[Any, Any], None]."),
        (TrainerEntry, {"metrics": ["x"]}, "metrics is ['x']; expected Mapping[str, str]."),
        (TrainerEntry, {"modifiers": "plain"}, "modifiers is 'plain'; expected tuple[str, ...]."),
        (TrainerEntry, {"conflicts": {1: "x"}}, "conflicts is {1: 'x'}; expected Mapping[str, str]."),
        (AggregatorEntry, {"uses_monitored_data": 1}, "uses_monitored_data is 1; expected bool."),
        (entries.DatasetEntry, {"num_classes": True}, "num_classes is True; expected int | None."),
        (entries.DatasetEntry, {"image_shape": (8, 8)}, "image_shape is (8, 8); expected tuple[int, int, int] | None."),
    ],
)
def test_a_field_that_is_not_of_its_type_is_refused(kind: type[Entry], fields: dict[str, Any], complaint: str) -> None:
    assert refusal(kind, "x", **{"build": dict, **fields}) == f"{kind.kind} 'x': its {complaint}"


def test_so_are_those_of_citations_and_presets() -> None:
    for wrong in (lambda: entries.Citation("Me, 2026", None), lambda: Preset("as published", recipe={})):  # type: ignore
        with pytest.raises(
            PluginError, match=r"^(Citation: its bibtex is None; expected str\.$|Preset: its recipe is {}; )"
        ):
            wrong()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        ("no_such_package:Thing", "does not import (No module named 'no_such_package')."),
        ("collections:NoSuch", "does not import (module 'collections' has no attribute 'NoSuch')."),
        ("math:pi", "is 3.141592653589793; expected a class or a function."),
        *((build, "expected package.module:Name.") for build in ("collections", "collections:", ":Thing", "a b:C")),
    ],
)
def test_a_text_that_names_nothing_is_reported(build: str, reason: str) -> None:
    with pytest.raises(PluginError, match=r"^local trainer 't' cannot be built: ") as raised:
        TrainerEntry("t", build=build).load()
    assert str(raised.value).endswith(reason)
    assert TrainerEntry("t", build="collections:OrderedDict").load().__name__ == "OrderedDict"
    assert TrainerEntry("t", build=dict).load() is dict


# --- what entries say about recipes -----------------------------------------------------------------------------------


def at_most_as_many_as_clients(options: Steps, recipe: Recipe) -> None:
    if options.steps > recipe.train.client_num_in_total:
        raise OptionError(f"steps: {options.steps} are more than clients.")


def warned_beyond_clients(options: Steps, recipe: Recipe) -> str:
    return "takes more steps than clients." if options.steps > recipe.train.client_num_in_total else ""


def ends_the_process(options: Steps, recipe: Recipe) -> None:
    raise SystemExit(None if options.steps == 3 else "no\n  licence")


TRAINERS = [
    TrainerEntry(
        "checked", build=dict, config=Steps, check=at_most_as_many_as_clients, conflicts={"fedavg": "of a test."}
    ),
    TrainerEntry("ending", build=dict, config=Steps, check=ends_the_process),
    TrainerEntry("warned", build=dict, config=Steps, warn=warned_beyond_clients),
    TrainerEntry("quoted", build=dict, warn=lambda options, recipe: options),
    TrainerEntry("margins", build=dict, config=Margins, idle=lambda o: {} if o.hinge else {"margin": "it hinges."}),
    TrainerEntry("idle-elsewhere", build=dict, config=Margins, idle=lambda options: {"margins": "it hinges."}),
]
ATTACKS = [
    InnerAttackEntry("checked-too", build=dict, config=Steps, check=at_most_as_many_as_clients),
    InnerAttackEntry("warned-too", build=dict, config=Steps, warn=warned_beyond_clients),
]
MODIFIER = ModifierEntry("new", build=dict, methods=("fedpgd",))
REGISTRY = Registry.load(entry_points=False, plugins=[offering(*TRAINERS, MODIFIER, *ATTACKS)])


def assembled(calfat: str) -> Experiment:
    return assemble(parse_document(f"train_args: {{client_num_in_total: 5}}\ncalfat: {calfat}\n", "a.yaml"), REGISTRY)


def complaint(calfat: str) -> str:
    with pytest.raises(RecipeError) as raised:
        assembled(calfat)
    return str(raised.value)


def test_an_entry_checks_its_options_against_the_recipe_and_so_does_the_inner_attack_of_a_group(
    snapshot: TextSnapshot,
) -> None:
    snapshot(complaint("{trainer: {name: checked, steps: 6}}"))
    group = "{name: few, ids: 0, threat: {inner: {name: checked-too, steps: %d}}}"
    assert complaint(f"{{clients: [{group % 6}]}}") == "a.yaml:2: calfat.clients[0]: steps: 6 are more than clients."
    assembled(f"{{clients: [{group % 5}]}}")


def test_an_entry_warns_of_its_options_and_so_does_the_inner_attack_of_a_group() -> None:
    (warning,) = assembled("{trainer: {name: warned, steps: 6}}").warnings
    assert warning == "a.yaml:2: calfat.trainer: 'warned' takes more steps than clients."
    group = "{trainer: %s, clients: [{name: few, ids: 0, threat: {inner: {name: warned-too, steps: %d}}}]}"
    (warning,) = assembled(group % ("warned", 6)).warnings
    assert warning == "a.yaml:2: calfat.clients[0]: 'warned-too' takes more steps than clients."
    assert assembled(group % ("warned", 5)).warnings == ()
    with pytest.raises(PluginError, match=r"^local trainer 'quoted' \(.*\): warn returned a NoOptions; expected a str"):
        assembled("{trainer: quoted}")


def test_an_option_that_another_makes_useless_is_warned_of_at_its_place() -> None:
    margins = "{trainer: {name: margins, scale: 1, hinge: %s, margin: %s}}"
    (warning,) = assembled(margins % ("false", 2)).warnings
    assert warning == "a.yaml:2: calfat.trainer.margin: this key has no effect here: it hinges."
    assert assembled(margins % ("true", 2)).warnings == assembled(margins % ("false", 1)).warnings == ()
    with pytest.raises(PluginError, match=r"^local trainer 'idle-elsewhere' \(.*\): .*'margins'.* does not declare"):
        assembled("{trainer: {name: idle-elsewhere, scale: 1}}")


def test_an_entry_may_be_of_a_subclass_of_the_plugins_own() -> None:
    @dataclass(frozen=True)
    class Mine(AggregatorEntry):
        team: str = "us"

    recipe = "model_args: {model: cnn_small}\ncalfat: {aggregator: mine}"
    found = recipes.assembled(recipe, plugins=(offering(Mine("mine", build=dict)),))
    assert found.who(found.aggregator) == "aggregator 'mine' (passed in Plugin)"


def test_a_check_cannot_end_the_process() -> None:
    said = (
        "a.yaml:2: calfat.trainer: local trainer 'ending' (passed in Plugin): its code ends the process, sys.exit({})."
    )
    remedy = " Raise an error of calfat_plugin.errors instead."
    assert complaint("{trainer: ending}") == said.format("") + remedy
    assert complaint("{trainer: {name: ending, steps: 2}}") == said.format("no licence") + remedy
    assert complaint("{clients: [{name: few, ids: 0, trainer: ending}]}").startswith(  # named after the group
        said.format("").replace("calfat.trainer", "calfat.clients[0]")
    )


def test_a_method_and_an_aggregator_that_exclude_each_other_are_refused(snapshot: TextSnapshot) -> None:
    snapshot(complaint("{trainer: {name: checked, steps: 2}}"))


def test_a_modifier_may_say_with_which_methods_it_composes() -> None:
    assert assembled("{trainer: {name: fedpgd, loss: new}}").modifier.name == "new"
    known = ", ".join(sorted(REGISTRY.find(TrainerEntry, "fedtrades")[0].modifiers))
    assert complaint("{trainer: {name: fedtrades, loss: new}}") == (
        "a.yaml:2: calfat.trainer.loss: local trainer 'fedtrades' does not support the loss modifier 'new'. "
        f"It supports: {known}."
    )


# --- the built-in ones ------------------------------------------------------------------------------------------------

BUILT_IN = [entry for kind in KINDS for entry, _ in Registry.load(entry_points=False).offers(kind)]


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: f"{entry.kind} {entry.name}")
def test_a_built_in_entry_says_what_it_is(entry: Entry) -> None:
    assert entry.summary
    assert not entry.summary.endswith(".")
    assert len(entry.summary) <= 120
    assert all(info.help for info in describe_options(entry.config))
    assert all(preset.help for preset in entry.presets.values())
    if isinstance(entry, (TrainerEntry, EvaluatorEntry)) and entry.name != "natural":
        assert entry.citation is not None


def test_every_paper_of_the_package_is_whole_and_cited() -> None:
    text = (Path(entries.__file__).parent / "papers.bib").read_text(encoding="utf-8")
    keys = re.findall(r"^@\w+\{(\w+),$", text, re.MULTILINE)
    papers = [entries.paper(key) for key in keys]
    assert len(set(papers)) == text.count("\n@") + text.startswith("@") == text.count("% ")
    assert all(paper.text[:1].isalpha() and paper.bibtex.count("{") == paper.bibtex.count("}") for paper in papers)
    package = Path(entries.__file__).parent
    used = "".join(file.read_text(encoding="utf-8") for file in package.rglob("*.py"))
    assert [key for key in keys if f'paper("{key}")' not in used] == []


# --- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "metric", "taken"),
    [
        (TrainerEntry, "loss", " (taken: alignment, loss, passes)"),
        (TrainerEntry, "a/b", " (taken: alignment, loss, passes)"),
        (EvaluatorEntry, "Margin", ""),
    ],
)
def test_a_metric_needs_a_name_that_is_free(kind: type[Entry], metric: str, taken: str) -> None:
    said = refusal(kind, "mine", build=dict, metrics={metric: "of a test"})
    assert said.startswith(f"{kind.kind} 'mine' has a metric '{metric}'; ")
    assert said.endswith(f"digits, '_'{taken}.")


FOG = entries.EvaluatorEntry("fog", build=dict, summary="of a test", metrics={"ece": "calibration error"})


@pytest.mark.parametrize(("label", "twice"), [("train", "train"), ("group", "group"), ("fog/ece", "fog/ece")])
def test_two_measurements_under_one_name_are_refused(label: str, twice: str, snapshot: TextSnapshot) -> None:
    assert "- Metric `ece`: calibration error\n" in entry_page(Registry.load(entry_points=False), FOG)
    recipe = f"calfat: {{threat: {{eps: 0.1}}, monitor: {{evaluators: [fog, {{name: natural, label: {label}}}]}}}}"
    with snapshot.raises(CalfatError, twice):
        recipes.assembled(recipe, plugins=(offering(FOG),), name="a.yaml")


def test_every_option_says_what_null_means() -> None:
    built_in = Registry.load(entry_points=False)
    configs = [entry.config for kind in KINDS for entry, _ in built_in.offers(kind)]
    configs += [*HOST_SECTIONS.values(), Monitor, EvaluationOptions, RuntimeOptions, ThreatModel]
    unexplained = {
        f"{config.__name__}.{info.name}: {info.help}"
        for config in configs
        for info in describe_options(config)
        if info.optional and info.default is None and "null: " not in info.help
    }
    assert unexplained == set()
