"""What `calfat check` refuses about methods, modifiers and aggregators, word for word; and the shipped recipes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from calfat_plugin import entries
from calfat_plugin.entries import ModifierEntry
from calfat_plugin.errors import RecipeError
from calfat_plugin.experiment import assemble, defined_modifiers, same_but_rounds
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.interfaces import LossModifier
from calfat_plugin.options import describe_options
from calfat_plugin.recipe import read_document
from calfat_plugin.registry import Registry
from tests.methods.helpers import experiment, registry

RECIPES = Path(__file__).parents[2] / "recipes"
METHODS = [method.name for method, _ in registry().offers(entries.TrainerEntry)]


def refusal(trainer="fedpgd", aggregator="fedavg", **settings):
    with pytest.raises(RecipeError) as error:
        experiment(trainer, aggregator, **settings)
    return str(error.value)


@pytest.mark.parametrize(
    ("trainer", "aggregator", "text"),
    [
        (
            {"name": "fedtrades", "beta": -1},
            "fedavg",
            "test.yaml:1: calfat.trainer.beta: got -1 (int), expected a number, >= 0.",
        ),
        (
            {"name": "mixfat", "ratio": 1.5},
            "fedavg",
            "test.yaml:1: calfat.trainer.ratio: got 1.5 (float), expected a number, 0 <= value <= 1.",
        ),
        (
            {"name": "mixfat", "sampling": "fix"},
            "fedavg",
            "test.yaml:1: calfat.trainer.sampling: got 'fix' (text), expected one of per_batch, fixed. "
            "Did you mean 'fixed'?",
        ),
        (
            {"name": "calfat", "adv_ratio": -0.1},
            "fedavg",
            "test.yaml:1: calfat.trainer.adv_ratio: got -0.1 (float), expected a number, 0 <= value <= 1.",
        ),
        (
            {"name": "fedrbn", "roles": "at st teacher"},
            "fedavg",
            "test.yaml:1: calfat.trainer: roles: got 'teacher' in 'at st teacher', expected at or st for each client.",
        ),
        (
            {"name": "fedrbn", "roles": "st st st"},
            "fedavg",
            "test.yaml:1: calfat.trainer: roles: got 'st st st', expected at least one client of role at.",
        ),
        (
            {"name": "fedrbn", "roles": "at st"},
            "fedavg",
            "test.yaml:1: calfat.trainer: roles: got 2 roles in 'at st', expected one for each of the 3 clients "
            "(train_args.client_num_in_total).",
        ),
        (
            {"name": "fedrbn", "at_fraction": 0.3},
            "fedavg",
            "test.yaml:1: calfat.trainer: at_fraction: got 0.3, which leaves none of the 3 clients to train "
            "adversarially; expected at least 0.333333.",
        ),
        (
            {"name": "fedgairat", "weighting": "tan"},
            "fedavg",
            "test.yaml:1: calfat.trainer.weighting: got 'tan' (text), expected one of tanh, sigmoid, discrete. "
            "Did you mean 'tanh'?",
        ),
        (
            {"name": "fedgairat", "loss": "calibrated"},
            "fedavg",
            "test.yaml:1: calfat.trainer.loss: local trainer 'fedgairat' does not support the loss modifier "
            "'calibrated'. It supports: plain.",
        ),
        (
            {"name": "standard", "loss": "robal"},
            "fedavg",
            "test.yaml:1: calfat.trainer.loss: local trainer 'standard' does not support the loss modifier "
            "'robal'. It supports: calibrated, fedlc, fedrs, logitadj, plain.",
        ),
        (
            {"name": "calfat", "loss": "calibrated"},
            "fedavg",
            "test.yaml:1: calfat.trainer.loss: local trainer 'calfat' does not support the loss modifier "
            "'calibrated'. It has its own loss; remove the key.",
        ),
        (
            "fedpgd",
            {"name": "fedprox", "mu": -0.1},
            "test.yaml:2: calfat.aggregator.mu: got -0.1 (float), expected a number, >= 0.",
        ),
        (
            "fedpgd",
            {"name": "scaffold", "variant": "III"},
            "test.yaml:2: calfat.aggregator.variant: got 'III' (text), expected one of I, II. Did you mean 'II'?",
        ),
        (
            "fedpgd",
            {"name": "sfat", "ratio": 0.9},
            "test.yaml:2: calfat.aggregator.ratio: got 0.9 (float), expected a number, >= 1.",
        ),
        (
            "fedpgd",
            {"name": "sfat", "top": 4},
            "test.yaml:2: calfat.aggregator: top: got 4 favoured clients, expected at most the 3 that train in a round "
            "(train_args.client_num_per_round).",
        ),
        (
            "fedavg",
            "sfat",
            "test.yaml:2: calfat.aggregator: aggregator 'sfat' and local trainer 'standard' cannot work together: SFAT "
            "ranks clients by their adversarial loss, and standard federated learning has none.",
        ),
        (
            "fedrbn",
            {"name": "sfat"},
            "test.yaml:2: calfat.aggregator: aggregator 'sfat' and local trainer 'fedrbn' cannot work together: SFAT "
            "ranks clients by their adversarial loss, and FedRBN's losses mix clean and adversarial parts that differ "
            "from client to client.",
        ),
    ],
)
def test_refusals(trainer, aggregator, text):
    assert refusal(trainer, aggregator) == text


def test_sfat_may_favour_all_clients_of_a_round():
    assert experiment("fedpgd", {"name": "sfat", "top": 3}).recipe.warnings == ()


def test_gairat_needs_two_attack_steps():
    assert refusal("fedgairat", calfat__threat__steps=1) == (
        "test.yaml:1: calfat.trainer: weighting tanh divides by half the attack's steps, rounded down, so "
        "calfat.threat.steps must be at least 2; got 1. weighting: discrete takes any number."
    )
    discrete = {"name": "fedgairat", "weighting": "discrete"}
    assert experiment(discrete, calfat__threat__steps=1).trainer.name == "fedgairat"


def test_a_third_partys_modifier_says_which_methods_it_is_for():
    class Focal(LossModifier):
        def bind(self, class_counts):
            raise NotImplementedError

    class Plugin:
        @staticmethod
        @hookimpl
        def calfat_loss_modifiers():
            return [ModifierEntry("focal", build=Focal, methods=("fedpgd", "calfat"))]

    known = Registry.load(entry_points=False, plugins=[Plugin()])
    by_name = {method.name: defined_modifiers(known, method) for method, _ in known.offers(entries.TrainerEntry)}
    assert "focal" in by_name["fedpgd"]
    assert "focal" not in by_name["fedmart"]
    assert by_name["calfat"] == ()  # it brings its own loss, whatever a modifier says


# --- former names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["fedavg", {"name": "fedavg"}, {"name": "fedavg", "loss": "fedlc"}])
def test_a_former_name_still_works_and_draws_a_note(written):
    found = experiment(written)
    now = {**written, "name": "standard"} if isinstance(written, dict) else "standard"
    same = experiment(now)
    assert found.as_run() == same.as_run()  # so that runs of either name resume each other
    assert found.as_run()["calfat"]["trainer"]["name"] == found.trainer.label == "standard"
    assert same_but_rounds(found.as_run(), same.as_run()) == []
    assert same.recipe.warnings == ()
    assert found.recipe.warnings == (
        "test.yaml:1: calfat.trainer: the local trainer 'fedavg' is now called 'standard'; the old name still works, "
        "with the same results.",
    )


def test_an_aggregators_name_is_no_former_name():
    assert experiment("fedpgd", "fedavg").recipe.warnings == ()
    assert registry().find(entries.TrainerEntry, "fedavg")[0].name == "standard"
    assert registry().find(entries.AggregatorEntry, "fedavg")[0].name == "fedavg"


# --- the shipped recipes ----------------------------------------------------------------------------------------------


def recipe_of(method, dataset):
    """Standard training keeps the file name of its aggregator, which papers call the whole by."""
    return RECIPES / f"{'fedavg' if method == 'standard' else method}_{dataset}.yaml"


@pytest.mark.parametrize("dataset", ["digits", "cifar10"])
@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_a_recipe_of_its_own(method, dataset):
    settings = assemble(read_document(recipe_of(method, dataset)), registry())
    assert settings.trainer.name == method
    assert settings.dataset.name == dataset
    assert settings.recipe.warnings == ()


@pytest.mark.parametrize("dataset", ["digits", "cifar10"])
def test_recipes_of_one_data_set_differ_in_the_method_and_its_learning_rate_only(dataset):
    written = {}
    for method in METHODS:
        settings = assemble(read_document(recipe_of(method, dataset)), registry()).as_run()
        del settings["calfat"]["trainer"]
        del settings["train_args"]["learning_rate"]
        del settings["calfat"]["reported"]  # the paper's numbers for that method
        written[method] = settings
    assert all(settings == written["calfat"] for settings in written.values())


# --- entries as documentation -----------------------------------------------------------------------------------------

KINDS = (entries.TrainerEntry, entries.ModifierEntry, entries.AggregatorEntry)
ENTRIES = [entry for kind in KINDS for entry, _ in registry().offers(kind)]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.kind} {entry.name}".replace(" ", "-"))
def test_entries_explain_themselves(entry):
    assert entry.summary
    assert entry.formula
    assert entry.name == "plain" or entry.citation is not None
    if entry.citation is not None:
        assert re.match(r"@\w+\{\w+,\n", entry.citation.bibtex)
        assert entry.citation.bibtex.count("{") == entry.citation.bibtex.count("}")
    for info in describe_options(entry.config):
        assert info.help, info.name
