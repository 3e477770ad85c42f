"""What `calfat check` refuses about methods, modifiers and aggregators, word for word; and the shipped recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from calfat_plugin import entries
from calfat_plugin.entries import ModifierEntry
from calfat_plugin.errors import RecipeError
from calfat_plugin.experiment import assemble, defined_modifiers
from calfat_plugin.interfaces import LossModifier
from calfat_plugin.recipe import read_document
from calfat_plugin.registry import Registry
from tests.methods.helpers import experiment, registry
from tests.plugins import offering

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("trainer", "aggregator", "place"),
    [
        ({"name": "fedtrades", "beta": -1}, "fedavg", "test.yaml:1: calfat.trainer.beta"),
        ({"name": "mixfat", "ratio": 1.5}, "fedavg", "test.yaml:1: calfat.trainer.ratio"),
        ({"name": "mixfat", "sampling": "fix"}, "fedavg", "test.yaml:1: calfat.trainer.sampling"),
        ({"name": "calfat", "adv_ratio": -0.1}, "fedavg", "test.yaml:1: calfat.trainer.adv_ratio"),
        ({"name": "fedrbn", "roles": "at st teacher"}, "fedavg", "test.yaml:1: calfat.trainer"),
        ({"name": "fedrbn", "roles": "st st st"}, "fedavg", "test.yaml:1: calfat.trainer"),
        ({"name": "fedrbn", "roles": "at st"}, "fedavg", "test.yaml:1: calfat.trainer"),
        ({"name": "fedrbn", "at_fraction": 0.3}, "fedavg", "test.yaml:1: calfat.trainer"),
        ({"name": "fedgairat", "weighting": "tan"}, "fedavg", "test.yaml:1: calfat.trainer.weighting"),
        ({"name": "fedgairat", "loss": "calibrated"}, "fedavg", "test.yaml:1: calfat.trainer.loss"),
        ({"name": "standard", "loss": "robal"}, "fedavg", "test.yaml:1: calfat.trainer.loss"),
        ({"name": "calfat", "loss": "calibrated"}, "fedavg", "test.yaml:1: calfat.trainer.loss"),
        ("fedpgd", {"name": "fedprox", "mu": -0.1}, "test.yaml:2: calfat.aggregator.mu"),
        ("fedpgd", {"name": "scaffold", "variant": "III"}, "test.yaml:2: calfat.aggregator.variant"),
        ("fedpgd", {"name": "sfat", "ratio": 0.9}, "test.yaml:2: calfat.aggregator.ratio"),
        ("fedpgd", {"name": "sfat", "top": 4}, "test.yaml:2: calfat.aggregator"),
        ("standard", "sfat", "test.yaml:2: calfat.aggregator"),
        ("fedrbn", {"name": "sfat"}, "test.yaml:2: calfat.aggregator"),
    ],
)
def test_refusals(trainer, aggregator, place, snapshot):
    with snapshot.raises(RecipeError, f"{place}: "):
        experiment(trainer, aggregator)


@pytest.mark.parametrize(
    ("name", "late", "first"),
    [
        ("fedgairat", {"start_round": 3}, 3),
        ("fedgairat", {}, 60),
        ("fedawp", {"warmup": 2}, 3),
        ("sfat", {"start_round": 3}, 3),
    ],
)
def test_a_method_that_would_begin_after_the_run_draws_a_warning(name, late, first):
    def warnings(options):
        plugin = {"name": name, **options}
        return experiment("fedpgd", plugin).warnings if name == "sfat" else experiment(plugin).warnings

    place = "test.yaml:2: calfat.aggregator" if name == "sfat" else "test.yaml:1: calfat.trainer"
    assert warnings(late) == (f"{place}: '{name}' begins to differ in round {first}, and round 2 is the last.",)
    assert warnings({key: value - 1 for key, value in (late or {"start_round": 3}).items()}) == ()


def test_gairat_needs_two_attack_steps(snapshot):
    with snapshot.raises(RecipeError):
        experiment("fedgairat", calfat__threat__steps=1)
    discrete = {"name": "fedgairat", "weighting": "discrete"}
    assert experiment(discrete, calfat__threat__steps=1).trainer.name == "fedgairat"


def test_a_third_partys_modifier_says_which_methods_it_is_for():
    class Focal(LossModifier):
        def bind(self, class_counts):
            raise NotImplementedError

    plugin = offering(ModifierEntry("focal", build=Focal, methods=("fedpgd", "calfat")))
    known = Registry.load(entry_points=False, plugins=[plugin])
    by_name = {method.name: defined_modifiers(known, method) for method, _ in known.offers(entries.TrainerEntry)}
    assert "focal" in by_name["fedpgd"]
    assert "focal" not in by_name["fedmart"]
    assert by_name["calfat"] == ()  # it brings its own loss, whatever a modifier says


# --- the shipped recipes ----------------------------------------------------------------------------------------------


# Standard training keeps the file name of its aggregator, which papers call the whole by.
SHIPPED = {"calfat": "calfat", "fedpgd": "fedpgd", "fedavg": "standard"}


@pytest.mark.parametrize("dataset", ["digits", "fmnist", "cifar10"])
def test_recipes_of_one_data_set_differ_in_the_method_and_its_learning_rate_only(dataset):
    written = {}
    for file, method in SHIPPED.items():
        found = assemble(read_document(RECIPES / f"{file}_{dataset}.yaml"), registry())
        assert (found.trainer.name, found.dataset.name, found.warnings) == (method, dataset, ())
        settings = found.as_run()
        del settings["calfat"]["trainer"]
        del settings["train_args"]["learning_rate"]
        del settings["calfat"]["reported"]  # the paper's numbers for that method
        written[method] = settings
    assert all(settings == written["calfat"] for settings in written.values())


@pytest.mark.parametrize("kind", [entries.TrainerEntry, entries.ModifierEntry, entries.AggregatorEntry])
def test_entries_have_a_formula_and_a_paper(kind):
    for entry, _ in registry().offers(kind):
        assert entry.formula, entry.name
        assert entry.name == "plain" or entry.citation is not None, entry.name
