"""A plugin that overrides nothing, or misspells what it means to, is refused; one that changes something is not."""

from __future__ import annotations

import functools
import inspect
from abc import ABC
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from calfat_plugin import (
    ActiveCorrection,
    Aggregator,
    AggregatorEntry,
    Attacker,
    AttackerEntry,
    CalfatError,
    ClientLoss,
    EvaluationResult,
    EvaluationTask,
    Evaluator,
    EvaluatorEntry,
    InnerAttack,
    InnerAttackEntry,
    LocalCorrection,
    LocalTrainer,
    LossModifier,
    NoOptions,
    PluginError,
    Preset,
    Registry,
    TrainerEntry,
    option,
)
from calfat_plugin.aggregators.fedavg import FedAvg, FedAvgOptions
from calfat_plugin.entries import KINDS, Entry
from calfat_plugin.evaluators.gradient import PGD
from calfat_plugin.experiment.building import check_class
from calfat_plugin.experiment.checked import (
    Checked,
    CheckedAggregator,
    CheckedAttacker,
    CheckedCorrection,
    CheckedEvaluator,
    CheckedInnerAttack,
    CheckedModifier,
    CheckedTrainer,
)
from calfat_plugin.trainers.fedpgd import FedPGD
from tests import recipes
from tests.contract.plugin_mistakes import Sends
from tests.contract.test_mistakes import play
from tests.methods.helpers import RECIPE
from tests.plugins import offering


class Misspelt(FedPGD):
    def atack_loss(self, batch: Any) -> Any:
        return -super().atack_loss(batch)  # type: ignore[misc]  # that the method itself mentions it counts for nothing

    def train_loss(self, batch: Any) -> Any:
        return 2 * super().train_loss(batch)


class Uses(FedPGD):
    """A helper whose own code calls it, beside the inherited hook that it may have been meant for."""

    def train_loss(self, batch: Any) -> Any:
        return self.crafts()

    def crafts(self) -> float:
        return 0.0


class Constant(FedPGD):
    attack = False


class Descriptive(FedPGD):
    """A property under the name of no hook."""

    @property
    def attacs(self) -> bool:
        return False


class Nothing(FedPGD):
    """Trains as FedPGD does."""


class Configured(Attacker):
    def __init__(self, options: Any) -> None:
        self.options = options

    def message(self, task: Any) -> Any:
        return task.global_state


class Shadow:
    def attack_loss(self, batch: Any) -> Any:
        return batch.logits_adv.sum()


class Shadowed(FedPGD, Shadow):
    """What the mixin has comes too late."""


class Combines(Aggregator):
    def aggregate(self, task: Any) -> Any:
        return task.global_state


class Setup(PGD):
    def setup(self, task: Any) -> None:
        return None


class Quiet(ClientLoss):
    def attack_logit(self, logits: Any) -> Any:
        return 2 * logits


class Pull(ActiveCorrection):
    def after_backwards(self, model: Any) -> None: ...


class Pulls(LocalCorrection):
    def begin(self, task: Any) -> ActiveCorrection:
        return Pull()


class Pulling(FedAvg):
    def correction(self) -> LocalCorrection:
        return Pulls()


class Starts(LocalCorrection):
    def begins(self, task: Any) -> ActiveCorrection:
        return ActiveCorrection()


class Starting(FedAvg):
    def correction(self) -> LocalCorrection:
        return Starts()


#: A class, what it misspells, and what it means.
NEAR: list[tuple[type, str, str]] = [
    (Sends, "send", "sent"),
    (Misspelt, "atack_loss", "attack_loss"),
    (Uses, "crafts", "craft"),
    (Constant, "attack", "attacks"),
    (Descriptive, "attacs", "attacks"),
    (Setup, "setup", "set_up"),
    (Quiet, "attack_logit", "attack_logits"),
]
IDLE: list[tuple[type, str]] = [
    (Nothing, "overrides nothing of FedPGD, and so does exactly what FedPGD does. It can override: adapt_model, "),
    (Shadowed, "overrides nothing of FedPGD"),
    (Configured, "overrides nothing of Attacker, and so does exactly what Attacker does. It can override: poisoned"),
    (type("Dynamic", (InnerAttack,), {"__init__": lambda self, options: None}), "overrides nothing of InnerAttack"),
    (Combines, "its class Combines does not define combine, which every Aggregator needs."),
    (type("Empty", (Evaluator,), {}), "its class Empty does not define evaluate, which every Evaluator needs."),
]


@pytest.mark.parametrize(("cls", "name", "meant"), NEAR)
def test_a_misspelt_name_is_refused_with_its_place(cls: type, name: str, meant: str) -> None:
    value = vars(cls)[name]
    code = getattr(getattr(value, "fget", value), "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}" if code else f"in {__name__}"
    with pytest.raises(PluginError) as raised:
        check_class(cls)
    said = f"'{name}' ({where}), which is no part of {cls.__base__.__name__}."  # type: ignore[union-attr]
    assert f"{said} Did you mean '{meant}'?" in str(raised.value)


@pytest.mark.parametrize(("cls", "text"), IDLE)
def test_a_class_that_changes_nothing_is_refused(cls: type, text: str) -> None:
    with pytest.raises(PluginError) as raised:
        check_class(cls)
    assert text in str(raised.value)


# --- what is right passes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own:
    shown: int = option(3, help="of a test")


class Helped(FedPGD):
    """A helper beside the hook that it helps, one with an underscore, and names that are near no hook."""

    losses = (1.0, 2.0)

    def train_loss(self, batch: Any) -> Any:
        return self.train_losses(batch)

    def train_losses(self, batch: Any) -> Any:
        return sum(self.losses) * self._attack_losses(batch)

    def _attack_losses(self, batch: Any) -> Any:
        return batch.logits_adv.mean()

    def task_loss(self, batch: Any) -> Any:
        return self.ce(batch)

    def ce(self, batch: Any) -> Any:
        return batch.logits_adv.mean()

    def summary(self) -> str:
        return "for a notebook"


class Mixin:
    def attack_loss(self, batch: Any) -> Any:
        return batch.logits_adv.sum()


class Mixed(Mixin, FedPGD):
    pass


class Between(FedPGD, ABC):
    attacks = False


class Below(Between):
    """Its author's own base is what it changes nothing of."""


class Initialised(FedPGD):
    def __init__(self, options: Any, modifier: Any) -> None:
        super().__init__(options, modifier)
        self.attacks = False


class Library:
    """A base class from elsewhere, whose names have another purpose."""

    def starts(self) -> bool:
        return True


class External(Library, FedPGD):
    def train_loss(self, batch: Any) -> Any:
        return batch.logits_adv.mean()


class Both(Attacker):
    @functools.cached_property
    def sent(self) -> Any:  # type: ignore[override]
        return lambda task: task.global_state


RIGHT = [Helped, Mixed, Between, Below, Initialised, External, Both, FedPGD, Attacker, InnerAttack, dict]


@pytest.mark.parametrize("cls", RIGHT)
def test_a_class_that_changes_something_passes(cls: type) -> None:
    check_class(cls)


def test_options_and_presets_of_its_own_change_a_built_in_and_not_an_interface() -> None:
    check_class(Nothing, TrainerEntry("x", build=Nothing, config=Own))
    check_class(Nothing, TrainerEntry("x", build=Nothing, presets={"own": Preset("of a test")}))
    with pytest.raises(PluginError, match="overrides nothing of FedPGD"):
        check_class(Nothing, TrainerEntry("x", build=Nothing))
    with pytest.raises(PluginError, match="overrides nothing of Attacker"):
        check_class(Configured, AttackerEntry("x", build=Configured, config=Own))


def test_all_built_ins_pass() -> None:
    registry = Registry.load(entry_points=False)
    for kind in KINDS:
        for entry, _ in registry.offers(kind):
            check_class(entry.load(), entry)


# --- where it is refused ----------------------------------------------------------------------------------------------


def assembled(entry: Entry, keys: str) -> Any:
    recipe = RECIPE.replace("calfat:\n", f"calfat:\n  {keys}\n")
    return recipes.assembled(recipe, plugins=(offering(entry, name="wrong"),), name="test.yaml")


WHOM = "clients: [{ids: [1], attacker: wrong}]"


def test_a_check_of_the_recipe_says_so_with_its_place() -> None:
    for entry, keys, key in (
        (
            AttackerEntry("wrong", build=Sends),
            WHOM,
            "clients[0].attacker: attacker 'wrong' (passed in wrong): its class S",
        ),
        (
            TrainerEntry("wrong", build=Misspelt),
            "trainer: wrong",
            "trainer: local trainer 'wrong' (passed in wrong): its",
        ),
    ):
        with pytest.raises(CalfatError) as raised:
            assembled(entry, keys)
        assert str(raised.value).startswith(f"test.yaml:6: calfat.{key}")


@pytest.mark.parametrize("build", [lambda options: Sends(options), functools.partial(Sends), f"{__name__}:Sends"])
def test_a_factory_is_judged_by_what_it_makes(build: Any) -> None:
    """Recipes are checked without calling or importing it."""
    experiment = assembled(AttackerEntry("wrong", build=build), WHOM)
    with pytest.raises(PluginError, match=r"^attacker 'wrong' \(passed in wrong\): its class Sends has 'send' \("):
        experiment.built(experiment.clients[0].attacker, Attacker)


def test_a_factory_of_an_abstract_class_makes_nothing() -> None:
    experiment = assembled(AggregatorEntry("wrong", build=lambda options: Combines()), "aggregator: wrong")  # type: ignore[abstract]
    with pytest.raises(
        PluginError, match=r"^aggregator 'wrong' .*: its build makes no object: Can't instantiate abstract"
    ):
        experiment.build_aggregator()


PLAYED: list[tuple[Entry, str]] = [
    (AggregatorEntry("wrong", build=Pulling, config=FedAvgOptions), "aggregator 'wrong' .* Pull has 'after_backwards'"),
    (AggregatorEntry("wrong", build=Starting, config=FedAvgOptions), "aggregator 'wrong' .* Starts has 'begins' "),
    (EvaluatorEntry("wrong", build=lambda options: Setup(options)), "evaluator 'wrong' .* class Setup has 'setup'"),
    (
        InnerAttackEntry("wrong", build=lambda options: InnerAttack.__new__(IDLE[3][0])),
        "inner attack 'wrong' .* overrides nothing",
    ),
]


@pytest.mark.parametrize(("entry", "text"), PLAYED)
def test_what_a_plugin_makes_later_is_judged_when_it_does(entry: Entry, text: str) -> None:
    with pytest.raises(PluginError, match=text):
        play(entry)


class Setting(Evaluator):
    """It learns in ``set_up`` what it is."""

    def set_up(self, task: Any) -> None:
        self.has_budget = False

    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        numbers: dict[str, Any] = {"accuracy": 2.0, "accuracy_release": 0.5, "per_class": (), "per_class_release": ()}
        return EvaluationResult(label, 4, settings={}, implementation="ours", seconds=0.0, **numbers)


def test_a_checked_evaluator_is_what_its_plugin_is_and_refuses_its_result() -> None:
    entry = EvaluatorEntry("setting", Setting, uses_clients=True)
    evaluator = CheckedEvaluator(Setting(), entry, "evaluator 'setting'")
    assert evaluator.uses_clients
    assert evaluator.has_budget
    task: Any = SimpleNamespace(num_classes=3)
    evaluator.set_up(task)
    assert not evaluator.has_budget
    with pytest.raises(PluginError, match=r"^evaluator 'setting': its result has accuracy 2\.0"):
        evaluator.evaluate(task, "a")


def test_a_method_may_read_what_the_author_gave_the_inner_attack() -> None:
    class Remembers(InnerAttack):
        length = 3

        def reach(self, threat: Any) -> Any:
            return threat.scaled(2)

    attack: Any = CheckedInnerAttack(Remembers(), InnerAttackEntry("x", build=Remembers), "inner attack 'x'")
    for each in (attack, deepcopy(attack)):
        assert each.length == 3
    with pytest.raises(AttributeError, match="'Remembers' object has no attribute 'width'"):
        _ = attack.width


def test_a_trainer_among_others_is_given_the_plugins_themselves() -> None:
    """A method may ask for their type, as for its own options."""

    class Among(FedPGD):
        def among(self, others: Any) -> Any:
            return Told(None, others)  # type: ignore[arg-type]

    class Told(Nothing):
        pass

    entry = TrainerEntry("x", build=Among)
    trainer = CheckedTrainer(Among(None, None), entry, "local trainer 'x'")  # type: ignore[arg-type]
    other = CheckedTrainer(Nothing(None, None), entry, "local trainer 'x'")  # type: ignore[arg-type]
    of_server = trainer.among({3: other})
    assert isinstance(of_server, CheckedTrainer)
    assert isinstance(of_server.plugin, Told)
    assert of_server.plugin.modifier == {3: other.plugin}  # type: ignore[comparison-overlap]


CHECKED: list[tuple[type[Checked[Any, Any]], type]] = [
    (CheckedTrainer, LocalTrainer),
    (CheckedModifier, LossModifier),
    (CheckedInnerAttack, InnerAttack),
    (CheckedAggregator, Aggregator),
    (CheckedCorrection, LocalCorrection),
    (CheckedAttacker, Attacker),
    (CheckedEvaluator, Evaluator),
]


class CalledError(Exception):
    """A hook was called: its name and its arguments by name."""


def calling(hook: str, interface: type) -> Any:
    """A method that says how it was called."""
    signature = inspect.signature(getattr(interface, hook))

    def method(self: Any, *arguments: Any, **keywords: Any) -> None:
        by_name = dict(signature.bind(self, *arguments, **keywords).arguments)
        del by_name["self"]
        raise CalledError(hook, by_name)

    return method


@pytest.mark.parametrize(("checked", "interface"), CHECKED)
def test_a_checked_plugin_passes_every_hook_on(checked: type, interface: type) -> None:
    """Otherwise a hook would do what the interface does by default, whatever the plugin does."""
    hooks = [name for name in dir(interface) if not name.startswith("_") and callable(getattr(interface, name))]
    plugin = type("Calling", (interface,), {hook: calling(hook, interface) for hook in hooks})()
    entry = SimpleNamespace(config=NoOptions, metrics={}, uses_clients=True)
    wrapper = checked(plugin, entry, "plugin 'x'")
    assert hooks
    for hook in hooks:
        parameters = list(inspect.signature(getattr(interface, hook)).parameters)[1:]
        arguments = {name: MagicMock() for name in parameters}
        with pytest.raises(CalledError) as raised:
            getattr(wrapper, hook)(**arguments)
        called, received = raised.value.args
        assert called == hook
        assert received == arguments or hook == "among"  # which unwraps them


def test_a_checked_attack_has_the_steps_and_looks_back_as_its_plugin_does() -> None:
    entry = InnerAttackEntry("x", build=InnerAttack)
    assert not CheckedInnerAttack(InnerAttack(), entry, "x").has_own_steps
    assert not CheckedInnerAttack(InnerAttack(), entry, "x").looks_back
    overriding = {"take_steps": lambda *given: None, "after_step": lambda *given: None}
    attack = type("Own", (InnerAttack,), overriding)()
    assert CheckedInnerAttack(attack, entry, "x").has_own_steps
    assert CheckedInnerAttack(attack, entry, "x").looks_back
