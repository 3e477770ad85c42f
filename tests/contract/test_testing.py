"""Every check of ``calfat_plugin.testing`` can fail: plugins with one mistake each, and what is said of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
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
from calfat_plugin.interfaces import Aggregate, ClientLoss, InnerAttack, LossModifier
from calfat_plugin.registry import Registry
from calfat_plugin.testing.tiny import build_tiny_model
from calfat_plugin.trainers.fedpgd import FedPGD
from calfat_plugin.trainers.fedtrades import FedTRADES, FedTRADESOptions
from tests.methods.tied_models import Overlapping, Tied
from tests.plugins import offering
from tests.snapshot import TextSnapshot


def registry(entry: Entry) -> Registry:
    """The built-ins and this entry."""
    return testing.builtin_registry(offering(entry))


def complaint(check: Callable[..., Any], entry: Entry, *more: Any, **options: Any) -> str:
    with pytest.raises((AssertionError, UpdateError, BudgetError, ModelError, PluginError)) as raised:
        check(entry.name, *more, registry=registry(entry), **options)
    return str(raised.value)


class CountsThreads:
    """Stands in for a registry: notes torch's number of threads, and ends the check."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __getattr__(self, name: str) -> Any:
        self.threads.append(torch.get_num_threads())
        raise ModelError("the check of a test ends here")


@pytest.mark.parametrize("name", [name for name in testing.__all__ if name.startswith("check_")])
def test_a_check_takes_one_thread_and_puts_the_number_back(name: str, tmp_path: Path) -> None:
    before, registry = torch.get_num_threads(), CountsThreads()
    folders = [tmp_path] if name in ("check_dataset", "check_logger") else []
    torch.set_num_threads(3)
    try:
        with pytest.raises(ModelError, match=r"^the check of a test ends here$"):
            getattr(testing, name)("anything", *folders, registry=registry)
        assert registry.threads[0] == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


COUNTER = itertools.count(1)  # what a plugin with a memory of its own would have


def but(base: type, **changes: Callable[..., Any]) -> Any:
    """A class whose methods give what these make of the right result and of what the method is given."""

    def method(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *given: change(getattr(base, name)(self, *given), *given)

    return type(f"Wrong{base.__name__}", (base,), {name: method(name, change) for name, change in changes.items()})


# --- trainers ---------------------------------------------------------------------------------------------------------


class Idle(FedPGD):
    """Returns the model as it got it."""

    def fit(self, task):
        state = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
        return replace(super().fit(task), state=state)


class KeepsInObject(FedPGD):
    """Its second round depends on an attribute that a resumed run does not have; single tasks do not show it."""

    def fit(self, task):
        update = super().fit(task)
        if task.settings.num_rounds != 4:  # as the federation has it
            return update
        self.rounds = getattr(self, "rounds", 0) + 1
        return replace(update, client_state={"rounds": torch.tensor([float(self.rounds)])})


class Keeping(FedPGD):
    """Adds to what the client keeps where it lies, so that a round made again begins elsewhere."""

    def fit(self, task):
        count = task.client_state.get("count", torch.zeros(1))
        count += 1
        return replace(super().fit(task), client_state={"count": count.clone()})


class Sending(FedPGD):
    def broadcast(self, updates):
        return {"x/scale": torch.ones(1)}

    def begin_round(self, task):
        for tensor in task.broadcast.values():
            tensor.mul_(2)


def always(**fields: int) -> Any:
    """Trains with these fields of the task, whatever the task has."""
    return type("Always", (FedPGD,), {"fit": lambda self, task: FedPGD.fit(self, replace(task, **fields))})


class Uphill(FedPGD):
    """The right loss, and a step of the wrong sign."""

    def backward(self, batch):
        loss = super().backward(batch)
        for parameter in batch.model.parameters():
            parameter.grad.neg_()
        return loss


class Adapting(FedPGD):
    """Its attack sees batch statistics, and moves the running ones."""

    def attack_loss(self, batch):
        batch.model.train()
        batch.model(batch.x_nat)
        batch.model.eval()
        return super().attack_loss(batch)


class LeavesL2(FedPGD):
    """Steps by the sign, whatever the norm."""

    def backward(self, batch):
        batch.x_adv = (batch.x_nat + 0.1 * (batch.x_adv - batch.x_nat).sign()).clamp(0, 1)
        return super().backward(batch)


def divided(loss: Any, batch: Any) -> Any:
    """Not defined for a batch of one: a division by zero."""
    return loss + 0 * batch.logits_adv.sum() / (len(batch.logits_adv) - 1)


def bias_alone(update: Any, task: Any) -> Any:
    return replace(update, state={"classifier.bias": update.state["classifier.bias"]})


LOWER = (
    "x with plain, linf: the attack must cost the training loss no less than random noise does in the budget: it makes "
)
WRONG_SIGN = ". The loop climbs attack_loss: has a loss the wrong sign?"
OTHER = "must give other batches; derive every stream from the task's"
FELL = "x with plain: training must lower the cross-entropy of the client's images, which went from 1.93"
TRAINERS = [
    (but(FedPGD, fit=bias_alone), "x with plain: tensor 'body.0.weight' is missing"),
    (but(FedPGD, fit=lambda update, task: replace(update, num_examples=1)), "x with plain: num_examples must be 10"),
    (Idle, "x with plain: a round of training must change the model; no tensor changed."),
    (but(FedPGD, train_loss=lambda loss, _: loss * (1 + 1e-3 * next(COUNTER))), "x with plain: the same task must"),
    (KeepsInObject, "a run that is resumed after round 1 must end with the same client states; keep no state in"),
    (but(FedPGD, fit=lambda update, task: task.data.x.mul_(0.5) is None or update), "the client's data must not be"),
    (but(FedPGD, train_loss=divided), "client 0, round 1, epoch 1: the training loss is nan by batch 1 of 1."),
    (but(FedPGD, fit=lambda update, _: replace(update, metrics={"loss": math.inf})), "x with plain: metrics must be"),
    (but(FedPGD, fit=lambda update, task: replace(update, state=task.model.state_dict())), "an update must hold"),
    (Keeping, "x with plain: what the client keeps must not be changed in place."),
    (Sending, "x with plain: what the server sends must not be changed in place."),
    (always(seed=0), f"x with plain: another seed {OTHER}"),
    (always(round=1), f"x with plain: another round {OTHER}"),
    (always(client=0), f"x with plain: another client {OTHER}"),
    (but(FedPGD, train_loss=lambda loss, batch: -loss), FELL),
    (Uphill, FELL),
    (but(FedPGD, attack_loss=lambda loss, batch: -loss), f"{LOWER}it 0.0595, noise 0.716{WRONG_SIGN}"),
    (but(FedTRADES, attack_loss=lambda loss, batch: -loss), f"{LOWER}it 0.651, noise 0.761{WRONG_SIGN}"),
    (but(FedPGD, attack_loss=lambda loss, batch: 0 * loss), "x with plain, linf: the attack must move its start;"),
    (Adapting, "x with plain, linf: the attack must leave the model's tensors as it found them."),
    (
        but(FedPGD, start=lambda _, x, *__: x + 0.1 * torch.rand(x.shape)),
        "x with plain, linf: the attack must leave the",
    ),
    (LeavesL2, "x with plain, l2: 12 of 12 adversarial examples left the l2 ball of eps 0.3; the worst is example 8,"),
]


def trainer(build: Any) -> entries.TrainerEntry:
    return entries.TrainerEntry(
        "x", build=build, config=FedTRADESOptions if issubclass(build, FedTRADES) else entries.NoOptions
    )


# --- aggregators ------------------------------------------------------------------------------------------------------


def emptied_by_numpy(found: Aggregate, task: Any) -> Aggregate:
    if len(task.updates) > 1:
        next(iter(task.updates[1].state.values())).numpy().fill(0)
    return found


def of_two(found: Aggregate, task: Any) -> Aggregate:
    return Aggregate(found.state if len(task.updates) > 1 else {})


def numbered(found: Aggregate, task: Any) -> Aggregate:
    return replace(found, broadcast={"x/n": torch.tensor([float(next(COUNTER))])})


AGGREGATORS = [
    (but(FedAvg, combine=emptied_by_numpy), "x: what combine is given must not be changed in place."),
    (but(FedAvg, combine=numbered), "x: the same task must give the same broadcast, whichever round came in between."),
    (but(FedAvg, combine=of_two), "x, a round of 1: tensor 'body.0.weight' is missing"),
]


def aggregator(build: Any, **more: Any) -> entries.AggregatorEntry:
    return entries.AggregatorEntry("x", build=build, config=FedAvgOptions, **more)


def stepping(factor: float) -> Any:
    """theta + factor (mean - theta)."""

    def moved(mean: Aggregate, task: Any) -> Aggregate:
        old = task.global_state
        return replace(mean, state={name: old[name] + factor * (mean.state[name] - old[name]) for name in old})

    return aggregator(but(FedAvg, combine=moved))


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


def test_an_aggregator_that_looks_at_the_servers_images() -> None:
    def looked(found: Aggregate, task: Any) -> Aggregate:
        monitored = task.monitored()
        assert monitored.logits(task.global_state).shape == (len(monitored.data), 4)
        return found

    entry = aggregator(but(FedAvg, combine=looked), uses_monitored_data=True)
    testing.check_aggregator("x", registry=registry(entry))


# --- evaluators -------------------------------------------------------------------------------------------------------


class Attack(BudgetedAttack):
    """Does nothing."""

    def settings(self, task):
        return {}

    def craft(self, task, x, y, noise):
        return x


def claiming(base: type, **values: Any) -> Any:
    """Values of its result replaced; a function of nothing is called."""

    def claimed(found: Any, *_: Any) -> Any:
        return replace(found, **{name: value() if callable(value) else value for name, value in values.items()})

    return but(base, evaluate=claimed)


class DescendingInL1(PGD):
    def craft(self, task, x, y, noise):
        self.sign = -1 if self.threat(task).norm == "l1" else 1
        return super().craft(task, x, y, noise)

    def loss(self, logits, y):
        return self.sign * super().loss(logits, y)


def boasting(found: Any, task: Any, label: str) -> Any:
    """Other numbers than those of its examples; not where eps is 0."""
    nothing = {"accuracy": 0.0, "per_class": (0.0,) * 4}
    return found if task.threat.eps == 0 else replace(found, **ALL_RIGHT, **nothing)


ALL_RIGHT: dict[str, Any] = {"accuracy_release": 1.0, "per_class_release": (1.0,) * 4}


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
        continues = place is not None and place.exists()
        if place is not None:
            place.parent.mkdir(exist_ok=True)
            place.touch()
        found = super().evaluate(task, label)
        return replace(found, accuracy=1.0, per_class=(1.0,) * 4, **ALL_RIGHT) if continues else found


class LinfOnly(Attack):
    """Moves each pixel by eps, whatever the norm."""

    def craft(self, task, x, y, noise):
        return task.threat.random_start(x, noise).sub(x).sign().mul(float(task.threat.eps)).add(x).clamp(0, 1)


def backward(x_adv: Any, task: Any, *_: Any) -> Any:
    """Leaves gradients in the model's parameters."""
    task.model(x_adv).sum().backward()
    return x_adv


def asking(x_adv: Any, task: Any, x: Any, y: Any, noise: Any) -> Any:
    """Asks again about what it has not broken, be it nothing."""
    task.model(x_adv[task.model(x_adv).argmax(dim=1) == y])
    return x_adv


def wavering() -> float:
    return next(COUNTER) % 12 / 12


BREAKS = "x: an attack must break some of 12 images that the model gets right, in the"
EVALUATORS = [
    (DescendingInL1, f"{BREAKS} l1 ball of eps 1;"),
    (but(PGD, loss=lambda loss, *_: -loss), f"{BREAKS} linf ball of eps 0.1;"),
    (Attack, f"{BREAKS} linf ball of eps 0.1; it broke none. Does it climb its loss, or descend? An evaluator "),
    (but(PGD, evaluate=boasting), "x: accuracy_release is 1; on the examples that it hands out it is 0."),
    (but(PGD, craft=backward), "x: the model's parameters must be left without gradients, and able to have them; take"),
    (Halving, "x: interrupted half way and started again with what it kept in EvaluationTask.scratch, it must give"),
    (but(PGD, craft=asking), "x: it asks the model about an empty batch; skip the call then."),
    (LinfOnly, "evaluator 'x': 5 of 5 adversarial examples left the l2 ball of eps 0.3; the worst is example "),
    (Straying, "evaluator 'x': 12 of 12 adversarial examples left the pixel range [0, 1]; the worst is example "),
    (claiming(Natural, per_class=(1.0,) * 4), "x: the examples that per_class counts as right must be those of accur"),
    (claiming(Attack, accuracy=0.0, accuracy_release=wavering), "x: the same model, images and seed must give"),
    (claiming(Attack, accuracy=0.0, accuracy_release=0.0), "x: with eps 0 it must find the natural accuracy "),
    (claiming(Natural, num_examples=99), "x: num_examples must be those that it counted."),
    (claiming(Natural, accuracy=0.123), "x: accuracy must be a share of its 12 examples; got 0.123."),
    (claiming(Natural, accuracy=0.5, accuracy_release=0.0), "x: accuracy must be at most accuracy_release; got 0.5 "),
    (claiming(Natural, accuracy=1.0, accuracy_release=1.0), "x: accuracy must be at most the natural accuracy; got 1"),
    (claiming(Natural, per_class=()), "x: per_class and per_class_release must have values for each of the 4 classes."),
]


def evaluator(build: Any) -> entries.EvaluatorEntry:
    return entries.EvaluatorEntry("x", build=build, config=PGDOptions if issubclass(build, PGD) else BudgetOptions)


def test_an_accuracy_may_be_a_mean_in_float32() -> None:
    """Which a hair lies above the share of whole examples."""
    rounded = but(Natural, evaluate=lambda found, *_: replace(found, accuracy=min(found.accuracy + 3e-8, 1.0)))
    testing.check_evaluator("x", registry=registry(evaluator(rounded)))


# --- modifiers --------------------------------------------------------------------------------------------------------


class Loss(ClientLoss):
    def __init__(self, class_counts):
        self.counts = class_counts


class Log(Loss):
    def attack_logits(self, logits):
        return logits + self.counts.log()


class Drawing(Loss):
    def __init__(self, class_counts):
        self.shift = next(COUNTER) * torch.arange(4)

    def margin_logits(self, logits):
        return logits + self.shift


class Counting(Loss):
    def __init__(self, class_counts):
        class_counts += 1


def modifier(loss: Any, adapt: Callable[[nn.Module], nn.Module] = lambda model: model) -> entries.ModifierEntry:
    body = {
        "__init__": lambda self, options: None,
        "adapt_model": lambda self, model: adapt(model),
        "bind": lambda self, class_counts: loss(class_counts),
    }
    return entries.ModifierEntry("x", build=type("Modifier", (LossModifier,), body), methods=("fedpgd",))


def batchwise(right: Any, logits: Any) -> Any:
    return logits - logits.mean(dim=0)


COUNTS = "x, counts [5, 3, 2, 1]:"
MODIFIERS = [
    (modifier(but(Loss, cross_entropy=lambda loss, *_: loss.mean())), f"{COUNTS} cross_entropy must give (6,); got ()"),
    (modifier(Log), "x, counts [7, 0, 0, 2]: attack_logits must be finite for finite logits; got "),
    (modifier(but(Loss, kl_logits=batchwise)), f"{COUNTS} kl_logits: an example's value must not depend on the others"),
    (modifier(Drawing), f"{COUNTS} margin_logits: the same counts must give the same values."),
    (modifier(but(Loss, attack_logits=lambda _, logits: logits.mul_(2))), f"{COUNTS} attack_logits: its input must"),
    (modifier(Counting), "x: the class counts must not be changed in place."),
    (modifier(Loss, lambda model: model.body), "x: the adapted model must give logits (3, 4); got (3, 12)."),
]


# --- inner attacks ----------------------------------------------------------------------------------------------------


class Outside(InnerAttack):
    """Declares nothing, and goes twice as far."""

    def craft(self, task):
        return task.climb(steps=3, step_size=float(task.threat.eps), within=task.threat.scaled(2))


class Downhill(InnerAttack):
    def craft(self, task):
        away = replace(task, loss=lambda logits: -task.loss(logits))
        return InnerAttack.craft(self, away)


class OneStep(InnerAttack):
    """Does not say that it takes one step."""

    def craft(self, task):
        return task.climb(steps=1, step_size=float(task.threat.step_size))


class Meaning(InnerAttack):
    """An image's step depends on its mini-batch."""

    def craft(self, task):
        x_adv = task.start
        for _ in range(task.threat.steps):
            slope = task.gradient(x_adv)
            x_adv = task.threat.project(task.threat.ascend(x_adv, slope + slope.mean(dim=0), 0.1), task.x_nat)
        return x_adv


class Trains(InnerAttack):
    def craft(self, task):
        with torch.no_grad():
            task.model.classifier.bias += 1
        return super().craft(task)


class Replays(InnerAttack):
    def take_steps(self, batch, step, memory):
        step(batch.again())
        return step(batch)


class Later(InnerAttack):
    """Goes twice as far from the third mini-batch of a round on, where a run does not look any more."""

    def begin_round(self, task):
        return []

    def craft(self, task):
        task.memory.append(None)
        return task.climb(steps=3, step_size=1.0, within=task.threat.scaled(1 if len(task.memory) < 3 else 2))


class Elsewhere(InnerAttack):
    """Keeps in the process what a client has to get back when a run is resumed."""

    def begin_round(self, task):
        return next(COUNTER)

    def craft(self, task):
        return task.climb(steps=3, step_size=float(task.threat.eps) / (1 + task.memory % 7))


def any_start(start: Any, x_nat: Any, threat: Any, generator: Any) -> Any:
    return threat.random_start(x_nat, torch.Generator().manual_seed(next(COUNTER)))


def inner(build: Any, **more: Any) -> entries.InnerAttackEntry:
    return entries.InnerAttackEntry("x", build=build, **more)


def over_images(found: Any, task: Any) -> Any:
    task.x_nat.mul_(0.5)
    return found


AT_THE_IMAGE = but(OneStep, start=lambda start, x_nat, *_: x_nat)
LINF = "x, linf, cross-entropy:"
INNER_ATTACKS = [
    (inner(Outside), f"{LINF} 12 of 12 adversarial examples left the linf ball of eps 0.005;"),
    (inner(Downhill), f"{LINF} its images must cost more than their start; the loss went from "),
    (inner(OneStep), f"{LINF} craft must call task.loss once for each of its 3 steps, as its entry"),
    (inner(AT_THE_IMAGE, steps=lambda options: 1), f"{LINF} one step must start from noise: at the clean"),
    (inner(Meaning), f"{LINF} an image must not depend on the others of its mini-batch."),
    (inner(but(InnerAttack, start=any_start)), f"{LINF} start must draw from the generator that it is given,"),
    (inner(but(InnerAttack, craft=over_images)), f"{LINF} clean images and start must not be changed in place."),
    (inner(but(InnerAttack, craft=lambda x, _: x.requires_grad_())), f"{LINF} craft must return images without"),
    (inner(Trains), f"{LINF} it must leave the model's tensors as it found them."),
    (inner(Later), "x, linf: 2 of 2 adversarial examples left the linf ball of eps 0.1;"),
    (inner(Elsewhere), "a run that is resumed after round 1 must end with the same state; keep no state in objects."),
    (inner(Replays), "x, linf: 6 optimiser steps for 3 mini-batches; the entry's replays make it 3."),
]


def test_an_inner_attack_may_declare_a_set_of_its_own() -> None:
    declared = but(Outside, reach=lambda threat, given: given.scaled(2))
    testing.check_inner_attack("x", registry=registry(inner(declared, steps=lambda options: 3)))


def test_a_trainer_with_its_own_attack_stays_in_the_budget() -> None:
    class Outside(FedPGD):
        def craft(self, batch, task, inner):
            return task.climb(steps=3, step_size=float(task.threat.eps), within=task.threat.scaled(2))

    assert complaint(testing.check_trainer, trainer(Outside)).startswith(
        "local trainer 'x' (passed in Plugin): client 0, round 1, batch 1: 4 of 4 adversarial examples left"
    )


CASES = [
    *((testing.check_trainer, trainer(broken), text) for broken, text in TRAINERS),
    *((testing.check_aggregator, aggregator(broken), text) for broken, text in AGGREGATORS),
    *((testing.check_evaluator, evaluator(broken), text) for broken, text in EVALUATORS),
    *((testing.check_modifier, entry, text) for entry, text in MODIFIERS),
    *((testing.check_inner_attack, entry, text) for entry, text in INNER_ATTACKS),
]


@pytest.mark.parametrize(("check", "entry", "text"), CASES, ids=[f"{entry.kind}, {text}" for _, entry, text in CASES])
def test_a_mistake_is_found(check: Any, entry: Entry, text: str) -> None:
    assert complaint(check, entry).startswith(text)


# --- data sets, models, partitions, loggers ---------------------------------------------------------------------------


def dataset(name: str = "x", scale: float = 1.0, seed: Callable[[], int] = lambda: 0) -> Any:
    def load(root: Path) -> Dataset:
        found = testing.tiny_dataset()
        train = ImageData(testing.tiny_images(seed(), 30).x * scale, found.train.y)
        return replace(found, name=name, train=train)

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


def layout_bound(inner: Any, x: torch.Tensor) -> Any:
    return inner(x) * (1 + x.is_contiguous(memory_format=torch.channels_last))


class Forgetful(Batch):
    """Scales its logits by what is in no state dict."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(lambda inner, x: inner(x) * self.scale, **shape)
        self.scale = torch.ones(())

    def forward(self, x):
        if self.training:
            self.scale = self.scale * 2
        return super().forward(x)


class OwnLoading(Batch):
    """Its state dict is read as if it held the square roots."""

    def __init__(self, **shape: Any) -> None:
        super().__init__(lambda inner, x: inner(x), **shape)

    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict({name: tensor.square() for name, tensor in state.items()}, strict, assign)


class Unties(Tied):
    def load_state_dict(self, state, strict=True, assign=False):
        self.b.weight = nn.Parameter(state["b.weight"].clone())
        return super().load_state_dict(state, strict, assign)


class WithWords(Batch):
    def __init__(self, **shape: Any) -> None:
        super().__init__(lambda inner, x: inner(x), **shape)

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        pass


MODELS = [
    (Forgetful, "x: its state dict must hold all that logits depend on; a copy that loads it gives others."),
    (OwnLoading, "x: after load_state_dict its tensors must be those that it was given."),
    (Unties, "model Unties: its tensors 'a.weight' and 'b.weight' are one, but after load_state_dict they are not."),
    (Overlapping, "model 'x' (passed in Plugin): its tensors 'a.weight' and 'b.weight' share memory, but are not one."),
    (WithWords, "x: its state dict must hold nothing but tensors."),
    (seeded_elsewhere, "x: initial weights must come from torch's generator alone, so that a seed says what they are."),
    (model(lambda inner, x: inner(x).softmax(1)), "x must give raw logits; every row is a probability distribution."),
    (model(lambda inner, x: inner(x.detach())), "x: images must get a gradient; attacks need it."),
    (with_spare, "x: these parameters take no part in the logits: spare.weight, spare.bias."),
    (model(lambda inner, x: inner(x) - inner(x).mean(dim=0)), "x: in evaluation mode, an image's logits must not"),
    (model(lambda inner, x: inner(x.data.mul_(0.5) + x)), "x: the images must not be changed in place."),
    (model(layout_bound), "x: the memory layout must not matter; use flatten, not view."),
]


@pytest.mark.parametrize(("build", "text"), MODELS)
def test_a_model(build: Any, text: str) -> None:
    grey = {"in_channels": 1} if build in (seeded_elsewhere, with_spare) else {}
    said = complaint(testing.check_model, entries.ModelEntry("x", build=build), **grey)
    assert said.startswith(text)


def test_a_model_whose_layers_have_one_weight_together() -> None:
    found = testing.check_model("x", registry=registry(entries.ModelEntry("x", build=Tied)))
    assert found.b.weight is found.a.weight


def test_a_modifier_that_a_method_does_not_compose_with_is_no_check() -> None:
    with pytest.raises(AssertionError, match=r"^fedpgd does not compose with calibrate\.$"):
        testing.check_trainer("fedpgd", losses=("calibrate",))


def split(change: Callable[[list[Any]], list[Any]]) -> Any:
    return lambda labels, num_clients: change([np.arange(len(labels))[i::num_clients] for i in range(num_clients)])


def drawing(labels: Any, num_clients: int) -> Any:
    np.random.seed(0)
    return np.array_split(np.random.permutation(len(labels)), num_clients)


def drawing_once(labels: Any, num_clients: int) -> Any:
    np.random.rand()
    return np.array_split(np.arange(len(labels)), num_clients)


def rolled(parts: list[Any]) -> list[Any]:
    return [np.roll(part, next(COUNTER) % 7) for part in parts]


def to_the_first(labels: Any, num_clients: int) -> Any:
    return [np.arange(len(labels)), *[np.arange(0)] * (num_clients - 1)]


PARTITIONS = [
    (split(rolled), "x, 1 clients: the same seed must give the same split."),
    (to_the_first, "x, 3 clients: each client must get examples."),
    (drawing, "x: draw from a generator of the seed, not from numpy's global one."),
    (drawing_once, "x: draw from a generator of the seed, not from numpy's global one."),
]


@pytest.mark.parametrize(("build", "text"), PARTITIONS)
def test_a_partition(build: Any, text: str) -> None:
    np.random.seed(0)
    np.random.rand()  # in the midst of what numpy makes at a time
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
