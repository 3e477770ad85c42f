"""Every check of ``calfat_plugin.testing`` can fail: plugins with one mistake each, and what is said of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from calfat_plugin import entries, testing
from calfat_plugin.aggregators.fedavg import FedAvg, FedAvgOptions
from calfat_plugin.datasets import Dataset, ImageData
from calfat_plugin.entries import Entry
from calfat_plugin.errors import BudgetError, ModelError, PluginError, UpdateError
from calfat_plugin.evaluators.base import BudgetedAttack, BudgetOptions
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.evaluators.natural import Natural
from calfat_plugin.hookspecs import hookimpl
from calfat_plugin.interfaces import Aggregate, ClientLoss, InnerAttack, LocalTrainer, LossModifier
from calfat_plugin.registry import Registry
from calfat_plugin.testing.tiny import build_tiny_model
from calfat_plugin.trainers.fedpgd import FedPGD
from calfat_plugin.trainers.fedtrades import FedTRADES, FedTRADESOptions
from tests.snapshot import TextSnapshot


def registry(entry: Entry) -> Registry:
    """The built-ins and this entry."""

    @hookimpl
    def offer(self: Any) -> list[Entry]:
        return [entry]

    return testing.builtin_registry(type("Plugin", (), {type(entry).hook: offer})())


def complaint(check: Callable[..., Any], entry: Entry, *more: Any, **options: Any) -> str:
    with pytest.raises((AssertionError, UpdateError, BudgetError, ModelError, PluginError)) as raised:
        check(entry.name, *more, registry=registry(entry), **options)
    return str(raised.value)


COUNTER = itertools.count(1)  # what a plugin with a memory of its own would have


# --- trainers ---------------------------------------------------------------------------------------------------------


class Forgetful(FedPGD):
    """Returns a part of the model."""

    def fit(self, task):
        update = super().fit(task)
        return dataclasses.replace(update, state={"classifier.bias": update.state["classifier.bias"]})


class Miscounting(FedPGD):
    def fit(self, task):
        return dataclasses.replace(super().fit(task), num_examples=1)


class Idle(FedPGD):
    """Returns the model as it got it."""

    def fit(self, task):
        state = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
        return dataclasses.replace(super().fit(task), state=state)


class Remembering(FedPGD):
    def train_loss(self, batch):
        return super().train_loss(batch) * (1 + 1e-3 * next(COUNTER))


class KeepsInObject(FedPGD):
    """Its second round depends on an attribute that a resumed run does not have; single tasks do not show it."""

    def fit(self, task):
        update = super().fit(task)
        if task.settings.num_rounds != 4:  # as the federation has it
            return update
        self.rounds = getattr(self, "rounds", 0) + 1
        return dataclasses.replace(update, client_state={"rounds": torch.tensor([float(self.rounds)])})


class Spoiling(FedPGD):
    def fit(self, task):
        update = super().fit(task)
        task.data.x.mul_(0.5)
        return update


class NoSingles(FedPGD):
    """Not defined for a batch of one: a division by zero."""

    def train_loss(self, batch):
        logits = batch.logits_adv
        return super().train_loss(batch) + 0 * logits.sum() / (len(logits) - 1)


class Exhausted(FedPGD):
    def fit(self, task):
        return dataclasses.replace(super().fit(task), metrics={"loss": float("inf")})


class Aliasing(FedPGD):
    """Returns the model's own tensors, in which the next client is trained."""

    def fit(self, task):
        return dataclasses.replace(super().fit(task), state=task.model.state_dict())


class Keeping(FedPGD):
    """Adds to what the client keeps where it lies, so that a round made again begins elsewhere."""

    def fit(self, task):
        count = task.client_state.get("count", torch.zeros(1))
        count += 1
        return dataclasses.replace(super().fit(task), client_state={"count": count.clone()})


class Sending(FedPGD):
    def broadcast(self, updates):
        return {"x/scale": torch.ones(1)}

    def begin_round(self, task):
        for tensor in task.broadcast.values():
            tensor.mul_(2)


def always(**fields: int) -> Any:
    """Trains with these fields of the task, whatever the task has."""

    class Always(FedPGD):
        def fit(self, task):
            return super().fit(dataclasses.replace(task, **fields))

    Always.__name__ = f"Always{next(iter(fields)).title()}"
    return Always


class Unlearning(FedPGD):
    """Minimises what it should maximise."""

    def train_loss(self, batch):
        return -super().train_loss(batch)


class Uphill(FedPGD):
    """The right loss, and a step of the wrong sign."""

    def backward(self, batch):
        loss = super().backward(batch)
        for parameter in batch.model.parameters():
            parameter.grad.neg_()
        return loss


class Helping(FedPGD):
    """Climbs the probability of the right class."""

    def attack_loss(self, batch):
        return -super().attack_loss(batch)


class HelpingTrades(FedTRADES):
    def attack_loss(self, batch):
        return -super().attack_loss(batch)


class Still(FedPGD):
    def attack_loss(self, batch):
        return 0 * super().attack_loss(batch)


class Adapting(FedPGD):
    """Its attack sees batch statistics, and moves the running ones."""

    def attack_loss(self, batch):
        batch.model.train()
        batch.model(batch.x_nat)
        batch.model.eval()
        return super().attack_loss(batch)


class Shaking(FedPGD):
    """Draws the attack's start from torch's global generator."""

    def start(self, x_nat, task, generator):
        return x_nat + 0.1 * torch.rand(x_nat.shape)


class LeavesL2(FedPGD):
    """Steps by the sign, whatever the norm."""

    def backward(self, batch):
        batch.x_adv = (batch.x_nat + 0.1 * (batch.x_adv - batch.x_nat).sign()).clamp(0, 1)
        return super().backward(batch)


LOWER = (
    "x with plain, linf: the attack must cost the training loss no less than random noise does in the budget: it makes "
)
WRONG_SIGN = ". The loop climbs attack_loss: has a loss the wrong sign?"
TRAINERS = [
    (Forgetful, "x with plain: tensor 'body.0.weight' is missing"),
    (Miscounting, "x with plain: num_examples must be 10, the client's."),
    (Idle, "x with plain: a round of training must change the model; no tensor changed."),
    (Remembering, "x with plain: the same task must give the same state, whichever client was trained in between."),
    (KeepsInObject, "a run that is resumed after round 1 must end with the same client states; keep no state in"),
    (Spoiling, "the client's data must not be changed in place."),
    (NoSingles, "client 0, round 1, epoch 1: the training loss is nan by batch 1 of 1."),
    (Exhausted, "x with plain: metrics must be finite numbers with the training loss as 'loss'; got {'loss': inf}."),
    (Aliasing, "an update must hold copies: tensors of the model, which is trained on, must not be changed in place."),
    (Keeping, "x with plain: what the client keeps must not be changed in place."),
    (Sending, "x with plain: what the server sends must not be changed in place."),
    (always(seed=0), "x with plain: another seed must give other batches; derive every stream from the task's seed."),
    (always(round=1), "x with plain: another round must give other batches; derive every stream from the task's"),
    (always(client=0), "x with plain: another client must give other batches; derive every stream from the task's"),
    (Unlearning, "x with plain: training must lower the cross-entropy of the client's images, which went from 1.93"),
    (Uphill, "x with plain: training must lower the cross-entropy of the client's images, which went from 1.93 to"),
    (Helping, f"{LOWER}it 0.0595, noise 0.716{WRONG_SIGN}"),
    (HelpingTrades, f"{LOWER}it 0.651, noise 0.761{WRONG_SIGN}"),
    (Still, "x with plain, linf: the attack must move its start; attack_loss has no gradient there."),
    (Adapting, "x with plain, linf: the attack must leave the model's tensors as it found them."),
    (Shaking, "x with plain, linf: the attack must leave the global random generators as it found them."),
    (LeavesL2, "x with plain, l2: 12 of 12 adversarial examples left the l2 ball of eps 0.3; the worst is example 8,"),
]


@pytest.mark.parametrize(("broken", "text"), TRAINERS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_trainer(broken: Any, text: str) -> None:
    config = {"config": FedTRADESOptions} if issubclass(broken, FedTRADES) else {}
    assert complaint(testing.check_trainer, entries.TrainerEntry("x", build=broken, **config)).startswith(text)


# --- the steps of a known method --------------------------------------------------------------------------------------


class Again(FedTRADES):
    """TRADES by PyTorch's own functions, as its authors write it."""

    def divergence(self, batch, reduction):
        nat, adv = batch.logits_nat, batch.logits_adv
        return nn.functional.kl_div(adv.log_softmax(dim=1), nat.softmax(dim=1), reduction=reduction)

    def attack_loss(self, batch):
        return self.divergence(batch, "sum")

    def train_loss(self, batch):
        natural = nn.functional.cross_entropy(batch.logits_nat, batch.y)
        return natural + self.options.beta * self.divergence(batch, "batchmean")


class Reversed(Again):
    """KL(f(x') || f(x)) in place of KL(f(x) || f(x'))."""

    def attack_loss(self, batch):
        nat, adv = batch.logits_nat, batch.logits_adv
        return nn.functional.kl_div(nat.log_softmax(dim=1), adv.softmax(dim=1), reduction="sum")


class Summed(Again):
    def train_loss(self, batch):
        natural = nn.functional.cross_entropy(batch.logits_nat, batch.y)
        return natural + self.options.beta * self.divergence(batch, "mean")


class Fresh(Again):
    """Its momentum is lost in the third epoch."""

    def make_optimizer(self, parameters, task):
        optimizer = super().make_optimizer(parameters, task)
        steps = itertools.count(1)
        optimizer.register_step_pre_hook(lambda *_: optimizer.state.clear() if next(steps) == 3 else None)
        return optimizer


class Larger(Again):
    def adapt_model(self, model):
        model.register_buffer("spare", torch.zeros(1))
        return model


class OwnLoop(LocalTrainer):
    """A method whose loop is not ours."""

    def __init__(self, options, modifier):
        self.method = Again(options, modifier)

    def fit(self, task):
        return self.method.fit(task)


STEPS = [
    (
        Reversed,
        "x: in step 1 of client 0, round 100, its adversarial examples are not those of 'fedtrades': example 6 is "
        "off by up to 0.08, more than 0.0001. Compare start and attack_loss.",
    ),
    (
        Summed,
        "x: in step 1 of client 0, round 1, its weights are not those of 'fedtrades': 'body.0.weight' is off by up "
        "to 0.0119, more than 0.0001. Compare train_loss, backward and optimiser.",
    ),
    (
        Fresh,
        "x: in step 3 of client 0, round 1, its weights are not those of 'fedtrades': 'classifier.bias' is off by up "
        "to 0.0894, more than 0.0001. Compare train_loss, backward and optimiser.",
    ),
    (
        Larger,
        "x: in step 1 of client 0, round 1, its tensors are not those of 'fedtrades': only one of the two has 'spare'.",
    ),
]


@pytest.mark.parametrize(("broken", "text"), STEPS, ids=lambda value: getattr(value, "__name__", ""))
def test_other_steps(broken: Any, text: str) -> None:
    entry = entries.TrainerEntry("x", build=broken, config=FedTRADESOptions)
    assert complaint(testing.check_same_steps, entry, "fedtrades") == text


@pytest.mark.parametrize("method", [Again, OwnLoop])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_the_same_steps(method: Any, norm: Any) -> None:
    known = registry(entries.TrainerEntry("x", build=method, config=FedTRADESOptions))
    beta = {"beta": 3.0}
    testing.check_same_steps("x", "fedtrades", registry=known, reference_options=beta, steps=3, norm=norm, **beta)


def test_a_late_difference_and_one_of_clients_that_lack_classes() -> None:
    known = testing.builtin_registry()
    with pytest.raises(AssertionError, match=r"^fedgairat: in step 1 of client 0, round 100, its weights are not"):
        testing.check_same_steps("fedgairat", "fedpgd", registry=known, steps=1)
    testing.check_same_steps("fedgairat", "fedpgd", registry=known, steps=1, start_round=101)


# --- aggregators ------------------------------------------------------------------------------------------------------


class InPlaceByNumpy(FedAvg):
    def combine(self, task):
        found = super().combine(task)
        if len(task.updates) > 1:
            next(iter(task.updates[1].state.values())).numpy().fill(0)
        return found


class Remembers(FedAvg):
    def combine(self, task):
        found = super().combine(task)
        return dataclasses.replace(found, broadcast={"x/n": torch.tensor([float(next(COUNTER))])})


class NeedsTwo(FedAvg):
    def combine(self, task):
        first, second = list(task.updates.values())[:2] if len(task.updates) > 1 else (None, None)
        state = {name: (first.state[name] + second.state[name]) / 2 for name in task.global_state} if first else {}
        return Aggregate(state)


AGGREGATORS = [
    (InPlaceByNumpy, "x: what combine is given must not be changed in place."),
    (Remembers, "x: the same task must give the same broadcast, whichever round came in between."),
    (NeedsTwo, "x, a round of 1: tensor 'body.0.weight' is missing"),
]


def stepping(factor: float) -> Any:
    """theta + factor (mean - theta)."""

    class Stepping(FedAvg):
        def combine(self, task):
            mean, old = super().combine(task), task.global_state
            moved = {name: old[name] + factor * (mean.state[name] - old[name]) for name in old}
            return dataclasses.replace(mean, state=moved)

    return entries.AggregatorEntry("x", build=Stepping, config=FedAvgOptions)


def test_an_aggregator_takes_what_all_clients_agree_on() -> None:
    who = "x: clients that all send the same model must "
    assert complaint(testing.check_aggregator, stepping(-1)).startswith(f"{who}move the model towards it in every")
    assert complaint(testing.check_aggregator, stepping(-1), unanimous=False).startswith(f"{who}move the model towards")
    assert complaint(testing.check_aggregator, stepping(0), unanimous=False).startswith(f"{who}move the model towards")
    for factor in (0.5, 3):
        assert complaint(testing.check_aggregator, stepping(factor)) == (
            f"{who}get that model. If the server takes a step of its own length, pass unanimous=False."
        )
        testing.check_aggregator("x", registry=registry(stepping(factor)), unanimous=False)


@pytest.mark.parametrize(("broken", "text"), AGGREGATORS, ids=lambda value: getattr(value, "__name__", ""))
def test_an_aggregator(broken: Any, text: str) -> None:
    entry = entries.AggregatorEntry("x", build=broken, config=FedAvgOptions)
    assert complaint(testing.check_aggregator, entry).startswith(text)


def test_an_aggregator_that_looks_at_the_servers_images() -> None:
    class Looking(FedAvg):
        def combine(self, task):
            monitored = task.monitored()
            assert monitored.logits(task.global_state).shape == (len(monitored.data), 4)
            return super().combine(task)

    entry = entries.AggregatorEntry("x", build=Looking, config=FedAvgOptions, uses_monitored_data=True)
    testing.check_aggregator("x", registry=registry(entry))


# --- evaluators -------------------------------------------------------------------------------------------------------


class Attack(BudgetedAttack):
    """Does nothing."""

    def settings(self, task):
        return {}

    def craft(self, task, x, y, noise):
        return x


class Wavering(Attack):
    def evaluate(self, task, label):
        share = next(COUNTER) % 12 / 12
        return dataclasses.replace(super().evaluate(task, label), accuracy=0.0, accuracy_release=share)


class Harsh(Attack):
    """Counts every example as wrong, also with eps 0."""

    def evaluate(self, task, label):
        found = super().evaluate(task, label)
        return dataclasses.replace(found, accuracy=0.0, accuracy_release=0.0)


class Changed(Natural):
    """One value of the result replaced by that of the class attribute ``values``."""

    values: dict[str, Any] = {}  # noqa: RUF012

    def evaluate(self, task, label):
        return dataclasses.replace(super().evaluate(task, label), **self.values)


def changed(**values: Any) -> Any:
    return type(f"With{next(iter(values)).title()}", (Changed,), {"values": values})


class Descending(PGD):
    def loss(self, logits, y):
        return -super().loss(logits, y)


class DescendingInL1(PGD):
    def craft(self, task, x, y, noise):
        self.sign = -1 if self.threat(task).norm == "l1" else 1
        return super().craft(task, x, y, noise)

    def loss(self, logits, y):
        return self.sign * super().loss(logits, y)


class Boasting(PGD):
    """Reports other numbers than those of its examples; not where eps is 0."""

    def evaluate(self, task, label):
        found = super().evaluate(task, label)
        if task.threat.eps == 0:
            return found
        nothing = {"accuracy": 0.0, "per_class": (0.0,) * 4}
        return dataclasses.replace(found, accuracy_release=1.0, per_class_release=(1.0,) * 4, **nothing)


class Backward(PGD):
    """Leaves gradients in the model's parameters."""

    def craft(self, task, x, y, noise):
        self.loss(task.model(x), y).backward()
        return super().craft(task, x, y, noise)


class Straying(Natural):
    """Hands out points beyond the pixel range."""

    gives_examples = True

    def evaluate(self, task, label):
        found = super().evaluate(task, label)
        task.on_examples(torch.arange(len(task.data)), task.data.x * 1.5)
        return found


class Halving(PGD):
    """Continues as if all that came before an interruption had been right."""

    def evaluate(self, task, label):
        place = task.scratch and task.scratch / "half"
        if place is not None and place.exists():
            ones = dict.fromkeys(("per_class", "per_class_release"), (1.0,) * 4)
            return dataclasses.replace(super().evaluate(task, label), accuracy=1.0, accuracy_release=1.0, **ones)
        if place is not None:
            place.parent.mkdir(exist_ok=True)
            place.touch()
        return super().evaluate(task, label)


class AskingAboutNothing(PGD):
    """Asks again about what it has not broken, be it nothing."""

    def craft(self, task, x, y, noise):
        found = super().craft(task, x, y, noise)
        task.model(found[task.model(found).argmax(dim=1) == y])
        return found


class LinfOnly(Attack):
    """Moves each pixel by eps, whatever the norm."""

    def craft(self, task, x, y, noise):
        return task.threat.random_start(x, noise).sub(x).sign().mul(float(task.threat.eps)).add(x).clamp(0, 1)


EVALUATORS = [
    (DescendingInL1, "x: an attack must break some of 12 images that the model gets right, in the l1 ball of eps 1;"),
    (Descending, "x: an attack must break some of 12 images that the model gets right, in the linf ball of eps 0.1;"),
    (Attack, "x: an attack must break some of 12 images that the model gets right, in the linf ball of eps 0.1; it"),
    (Boasting, "x: accuracy_release is 1; on the examples that it hands out it is 0."),
    (Backward, "x: the model's parameters must be left without gradients, and able to have them; take"),
    (Halving, "x: interrupted half way and started again with what it kept in EvaluationTask.scratch, it must give"),
    (AskingAboutNothing, "x: it asks the model about an empty batch; skip the call then."),
    (LinfOnly, "evaluator 'x': 5 of 5 adversarial examples left the l2 ball of eps 0.3; the worst is example "),
    (Straying, "evaluator 'x': 12 of 12 adversarial examples left the pixel range [0, 1]; the worst is example "),
    (changed(per_class=(1.0,) * 4), "x: the examples that per_class counts as right must be those of accuracy; got"),
    (Wavering, "x: the same model, images and seed must give the same result; draw from EvaluationTask.seed alone."),
    (Harsh, "x: with eps 0 it must find the natural accuracy "),
    (changed(num_examples=99), "x: num_examples must be those that it counted."),
    (changed(accuracy=0.123), "x: accuracy must be a share of its 12 examples; got 0.123."),
    (changed(accuracy=0.5, accuracy_release=0.0), "x: accuracy must be at most accuracy_release and the natural "),
    (changed(per_class=()), "x: per_class and per_class_release must have values for each of the 4 classes."),
]


@pytest.mark.parametrize(("broken", "text"), EVALUATORS, ids=lambda value: getattr(value, "__name__", ""))
def test_an_evaluator(broken: Any, text: str) -> None:
    entry = entries.EvaluatorEntry("x", build=broken, config=PGDOptions if issubclass(broken, PGD) else BudgetOptions)
    assert complaint(testing.check_evaluator, entry).startswith(text)


# --- modifiers --------------------------------------------------------------------------------------------------------


def modifier(loss: Any, adapt: Callable[[nn.Module], nn.Module] = lambda model: model) -> Any:
    class Modifier(LossModifier):
        def __init__(self, options):
            pass

        def adapt_model(self, model):
            return adapt(model)

        def bind(self, class_counts):
            return loss(class_counts)

    return Modifier


class Loss(ClientLoss):
    def __init__(self, class_counts):
        self.counts = class_counts


class Mean(Loss):
    def cross_entropy(self, logits, y):
        return super().cross_entropy(logits, y).mean()


class Log(Loss):
    def attack_logits(self, logits):
        return logits + self.counts.log()


class Batchwise(Loss):
    def kl_logits(self, logits):
        return logits - logits.mean(dim=0)


class Drawing(Loss):
    def __init__(self, class_counts):
        self.shift = next(COUNTER) * torch.arange(4)

    def margin_logits(self, logits):
        return logits + self.shift


class Writing(Loss):
    def attack_logits(self, logits):
        return logits.mul_(2)


class Counting(Loss):
    def __init__(self, class_counts):
        class_counts += 1


MODIFIERS = [
    (modifier(Mean), "x, counts [5, 3, 2, 1]: cross_entropy must give (6,); got ()."),
    (modifier(Log), "x, counts [7, 0, 0, 2]: attack_logits must be finite for finite logits; got "),
    (modifier(Batchwise), "x, counts [5, 3, 2, 1]: kl_logits: an example's value must not depend on the others of"),
    (modifier(Drawing), "x, counts [5, 3, 2, 1]: margin_logits: the same counts must give the same values."),
    (modifier(Writing), "x, counts [5, 3, 2, 1]: attack_logits: its input must not be changed in place."),
    (modifier(Counting), "x: the class counts must not be changed in place."),
    (modifier(Loss, lambda model: model.body), "x: the adapted model must give logits (3, 4); got (3, 12)."),
]


@pytest.mark.parametrize(("broken", "text"), MODIFIERS)
def test_a_modifier(broken: Any, text: str) -> None:
    entry = entries.ModifierEntry("x", build=broken, methods=("fedpgd",))
    assert complaint(testing.check_modifier, entry).startswith(text)


# --- inner attacks ----------------------------------------------------------------------------------------------------


class Outside(InnerAttack):
    """Declares nothing, and goes twice as far."""

    def craft(self, task):
        return task.climb(steps=3, step_size=float(task.threat.eps), within=task.threat.scaled(2))


class Declared(Outside):
    def reach(self, threat):
        return threat.scaled(2)


class Downhill(InnerAttack):
    def craft(self, task):
        away = dataclasses.replace(task, loss=lambda logits: -task.loss(logits))
        return InnerAttack.craft(self, away)


class OneStep(InnerAttack):
    """Does not say that it takes one step."""

    def craft(self, task):
        return task.climb(steps=1, step_size=float(task.threat.step_size))


class AtTheImage(OneStep):
    def start(self, x_nat, threat, generator):
        return x_nat


class Meaning(InnerAttack):
    """An image's step depends on its mini-batch."""

    def craft(self, task):
        x_adv = task.start
        for _ in range(task.threat.steps):
            slope = task.gradient(x_adv)
            x_adv = task.threat.project(task.threat.ascend(x_adv, slope + slope.mean(dim=0), 0.1), task.x_nat)
        return x_adv


class AnyStart(InnerAttack):
    def start(self, x_nat, threat, generator):
        return threat.random_start(x_nat, torch.Generator().manual_seed(next(COUNTER)))


class OverImages(InnerAttack):
    def craft(self, task):
        found = super().craft(task)
        task.x_nat.mul_(0.5)
        return found


class Graphed(InnerAttack):
    def craft(self, task):
        return super().craft(task).requires_grad_()


class Trains(InnerAttack):
    def craft(self, task):
        with torch.no_grad():
            task.model.classifier.bias += 1
        return super().craft(task)


class Replays(InnerAttack):
    def take_steps(self, batch, step, memory):
        step(batch.again())
        return step(batch)


INNER_ATTACKS: list[tuple[Any, dict[str, Any], str]] = [
    (Outside, {}, "x, linf, cross-entropy: 12 of 12 adversarial examples left the linf ball of eps 0.005;"),
    (Downhill, {}, "x, linf, cross-entropy: its images must cost more than their start; the loss went from "),
    (OneStep, {}, "x, linf, cross-entropy: craft must call task.loss once for each of its 3 steps, as its entry"),
    (AtTheImage, {"steps": lambda options: 1}, "x, linf, cross-entropy: one step must start from noise: at the clean"),
    (Meaning, {}, "x, linf, cross-entropy: an image must not depend on the others of its mini-batch."),
    (AnyStart, {}, "x, linf, cross-entropy: start must draw from the generator that it is given, and from no other."),
    (OverImages, {}, "x, linf, cross-entropy: clean images and start must not be changed in place."),
    (Graphed, {}, "x, linf, cross-entropy: craft must return images without gradient; detach them."),
    (Trains, {}, "x, linf, cross-entropy: it must leave the model's tensors as it found them."),
    (Replays, {}, "x, linf: 6 optimiser steps for 3 mini-batches; the entry's replays make it 3."),
]


@pytest.mark.parametrize(("broken", "more", "text"), INNER_ATTACKS)
def test_an_inner_attack(broken: Any, more: dict[str, Any], text: str) -> None:
    assert complaint(testing.check_inner_attack, entries.InnerAttackEntry("x", build=broken, **more)).startswith(text)


def test_an_inner_attack_may_declare_a_set_of_its_own() -> None:
    entry = entries.InnerAttackEntry("x", build=Declared, steps=lambda options: 3)
    testing.check_inner_attack("x", registry=registry(entry))


def test_a_trainer_with_its_own_attack_stays_in_the_budget() -> None:
    class Outside(FedPGD):
        def craft(self, batch, task, inner):
            return task.climb(steps=3, step_size=float(task.threat.eps), within=task.threat.scaled(2))

    entry = entries.TrainerEntry("x", build=Outside)
    assert complaint(testing.check_trainer, entry).startswith(
        "local trainer 'x' (passed in Plugin): client 0, round 1, batch 1: 4 of 4 adversarial examples left"
    )


# --- data sets, models, partitions, loggers ---------------------------------------------------------------------------


def dataset(name: str = "x", scale: float = 1.0, seed: Callable[[], int] = lambda: 0) -> Any:
    def load(root: Path) -> Dataset:
        found = testing.tiny_dataset()
        train = ImageData(testing.tiny_images(seed(), 30).x * scale, found.train.y)
        return dataclasses.replace(found, name=name, train=train)

    return load


DATASETS = [
    (dataset("y"), {}, "x: its name must be 'x'; got 'y'."),
    (dataset(), {"num_classes": 3}, "x: the entry says 3 classes, the data have 4."),
    (dataset(), {"image_shape": (1, 8, 8)}, "x: the entry says images (1, 8, 8); they are (1, 4, 4)."),
    (dataset(scale=0.0), {}, "x: the training images are all of one grey, 0."),
    (dataset(seed=lambda: next(COUNTER)), {}, "x: the training split must be the same whenever it is read."),
]


@pytest.mark.parametrize(("build", "known", "text"), DATASETS)
def test_a_data_set(build: Any, known: dict[str, Any], text: str, tmp_path: Path) -> None:
    entry = entries.DatasetEntry("x", build=build, **known)
    assert complaint(testing.check_dataset, entry, tmp_path).startswith(text)


class Batch(nn.Module):
    """A tiny model, wrapped by something that is wrong."""

    def __init__(self, wrong: Callable[[Any, torch.Tensor], torch.Tensor], **shape: Any) -> None:
        super().__init__()
        self.inner, self.wrong = build_tiny_model(**shape), wrong

    def forward(self, x):
        return self.wrong(lambda images: self.inner(images.mean(dim=1, keepdim=True)), x)


def model(wrong: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    return lambda **shape: Batch(wrong, **shape)


def seeded_elsewhere(**shape: Any) -> nn.Module:
    built = build_tiny_model(**shape)
    nn.init.constant_(next(built.parameters()), float(next(COUNTER)))
    return built


def with_spare(**shape: Any) -> nn.Module:
    built = build_tiny_model(**shape)
    built.spare = nn.Linear(1, 1)
    return built


MODELS = [
    (seeded_elsewhere, "x: initial weights must come from torch's generator alone, so that a seed says what they are."),
    (model(lambda inner, x: inner(x).softmax(1)), "x must give raw logits; every row is a probability distribution."),
    (model(lambda inner, x: inner(x.detach())), "x: images must get a gradient; attacks need it."),
    (with_spare, "x: these parameters take no part in the logits: spare.weight, spare.bias."),
    (model(lambda inner, x: inner(x) - inner(x).mean(dim=0)), "x: in evaluation mode, an image's logits must not"),
    (model(lambda inner, x: inner(x.data.mul_(0.5) + x)), "x: the images must not be changed in place."),
    (
        model(lambda inner, x: inner(x) * (1 + x.is_contiguous(memory_format=torch.channels_last))),
        "x: the memory layout must not matter; use flatten, not view.",
    ),
]


@pytest.mark.parametrize(("build", "text"), MODELS)
def test_a_model(build: Any, text: str) -> None:
    grey = {"in_channels": 1} if build in (seeded_elsewhere, with_spare) else {}
    said = complaint(testing.check_model, entries.ModelEntry("x", build=build), **grey)
    assert said.startswith(text)


def test_a_modifier_that_a_method_does_not_compose_with_is_no_check() -> None:
    with pytest.raises(AssertionError, match=r"^fedpgd does not compose with calibrate\.$"):
        testing.check_trainer("fedpgd", losses=("calibrate",))


def split(change: Callable[[list[Any]], list[Any]]) -> Any:
    return lambda labels, num_clients: change([np.arange(len(labels))[i::num_clients] for i in range(num_clients)])


def drawing(labels: Any, num_clients: int) -> Any:
    np.random.seed(0)
    return np.array_split(np.random.permutation(len(labels)), num_clients)


PARTITIONS = [
    (
        split(lambda parts: [np.roll(part, next(COUNTER) % 7) for part in parts]),
        "x, 1 clients: the same seed must give the same split.",
    ),
    (
        lambda labels, num_clients: [np.arange(len(labels)), *[np.arange(0)] * (num_clients - 1)],
        "x, 3 clients: each client must get examples.",
    ),
    (drawing, "x: draw from a generator of the seed, not from numpy's global one."),
]


@pytest.mark.parametrize(("build", "text"), PARTITIONS)
def test_a_partition(build: Any, text: str) -> None:
    assert complaint(testing.check_partition, entries.PartitionEntry("x", build=build)).startswith(text)


class Deaf:
    def __init__(self, options: Any) -> None:
        pass


class Failing(Deaf):
    @hookimpl
    def calfat_run_stopped(self, run: Any) -> None:
        raise OSError("disk full")


def test_a_logger(tmp_path: Path, snapshot: TextSnapshot) -> None:
    snapshot(complaint(testing.check_logger, entries.LoggerEntry("x", build=Deaf), tmp_path))
    snapshot(complaint(testing.check_logger, entries.LoggerEntry("x", build=Failing), tmp_path))


def test_without_a_registry_it_is_the_built_ins_and_what_is_installed() -> None:
    testing.check_modifier("fedlc", tau=0.5)
