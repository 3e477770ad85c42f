"""Mistakes that authors of plugins make, each a plugin, and what a run says of it.

The table of docs/plugin_mistakes.md is made of them:
``pytest --update-snapshots tests/contract/test_plugin_mistakes.py`` writes that table.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from calfat_plugin import (
    Aggregate,
    AggregatorEntry,
    Attacker,
    AttackerEntry,
    AttackEvaluator,
    ClientLoss,
    Dataset,
    DatasetEntry,
    EvaluatorEntry,
    ImageData,
    InnerAttack,
    InnerAttackEntry,
    LoggerEntry,
    LossModifier,
    ModelEntry,
    ModifierEntry,
    NoOptions,
    PartitionEntry,
    Registry,
    TrainerEntry,
    hookimpl,
    option,
    weighted_average,
)
from calfat_plugin.aggregators.fedavg import FedAvg, FedAvgOptions
from calfat_plugin.datasets import pixels
from calfat_plugin.entries import Entry
from calfat_plugin.evaluators.alarms import find_alarms
from calfat_plugin.evaluators.gradient import PGD, PGDOptions
from calfat_plugin.experiment import Experiment, assemble
from calfat_plugin.recipe.document import parse_document
from calfat_plugin.runs.session import Listeners
from calfat_plugin.testing import TinyModel
from calfat_plugin.trainers.base import AdversarialTrainer
from calfat_plugin.trainers.fedpgd import FedPGD
from tests import plugins
from tests.cli.runner import ROOT
from tests.methods.helpers import RECIPE, Federation

Outcome = Literal["error", "warning", "alarm", "harmless"]
PAGE = ROOT / "docs" / "plugin_mistakes.md"
META = torch.device("meta")  # no data behind it: any other device than the one that is in use


@dataclass(frozen=True)
class Comes:
    """What comes of a mistake.

    Attributes:
        says: of what is said a part, word for word; of an alarm its code; of a harmless one why it is that.
        act: makes the plugin, and does with it what a run does; returns what was said without an error.
    """

    outcome: Outcome
    says: str
    act: Callable[[], Iterable[str]]


def _comes(outcome: Outcome, says: str, made: Any, *rounds: int, **settings: Any) -> Comes:
    return Comes(outcome, says, play(made, *rounds, **settings) if isinstance(made, Entry) else made)


error, warning, alarm, harmless = (partial(_comes, outcome) for outcome in get_args(Outcome))


PATHS: dict[type[Entry], tuple[str | int, ...]] = {
    TrainerEntry: ("calfat", "trainer"),
    AggregatorEntry: ("calfat", "aggregator"),
    ModelEntry: ("model_args", "model"),
    PartitionEntry: ("data_args", "partition_method"),
    DatasetEntry: ("data_args", "dataset"),
    InnerAttackEntry: ("calfat", "threat", "inner"),
}
LISTS: dict[type[Entry], tuple[tuple[str, ...], Any]] = {
    ModifierEntry: (("calfat", "trainer"), {"name": "fedpgd", "loss": "wrong"}),
    EvaluatorEntry: (("calfat", "evaluators"), ["wrong", "natural"]),
    LoggerEntry: (("calfat", "loggers"), ["wrong"]),
    AttackerEntry: (("calfat", "clients"), [{"ids": [1], "attacker": "wrong"}]),
}


def registry(*hooks: Entry) -> Registry:
    return Registry.load(entry_points=False, plugins=[plugins.offering(*hooks, name="wrong")])


def experiment(entry: Entry, **settings: Any) -> Experiment:
    """The tiny recipe with this plugin, which is called wrong; ``settings``: dotted keys, dots written as ``__``."""
    path, value = LISTS.get(type(entry)) or (PATHS[type(entry)], "wrong")
    document = parse_document(RECIPE, "test.yaml").with_value(path, value, "test.yaml:1")
    for key, setting in settings.items():
        document = document.with_value(tuple(key.split("__")), setting, "--set")
    return assemble(document, registry(entry))


def play(entry: Entry, rounds: int = 1, **settings: Any) -> Callable[[], Iterator[str]]:
    """Evaluators tried, rounds, the final evaluation: the alarms of all of it."""

    def act() -> Iterator[str]:
        federation = Federation(experiment(entry, **settings))
        federation.server.begin(None)
        for _ in range(rounds):
            yield from federation.play().alarms
        for alarm in find_alarms(federation.server.final_evaluation()):
            yield f"{alarm.code}: {alarm.text}"

    return act


# --- local trainers ---------------------------------------------------------------------------------------------------


def cross_entropy(batch: Any) -> Tensor:
    loss: Tensor = batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()
    return loss


def trainer(metrics: Any = None, config: type = NoOptions, **methods: Any) -> TrainerEntry:
    """A method that is right but for these methods."""
    body = {"train_loss": lambda self, batch: cross_entropy(batch), **methods}
    build = type("Wrong", (AdversarialTrainer,), body)
    return TrainerEntry("wrong", build=build, config=config, metrics=metrics or {})


def smoothed(self: Any, batch: Any) -> Tensor:
    self.mean = 0.9 * getattr(self, "mean", 0.0) + cross_entropy(batch)
    mean: Tensor = self.mean
    return mean


def counted(self: Any, batch: Any) -> Tensor:
    self.batches = getattr(self, "batches", 0) + 1
    return cross_entropy(batch) / self.batches


def without_backward(self: Any, batch: Any) -> Tensor:
    return cross_entropy(batch).detach()


def without_zero_grad(self: Any, batch: Any) -> Tensor:
    loss = cross_entropy(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def in_evaluation_mode(self: Any, batch: Any) -> Tensor:
    batch.model.eval()
    return cross_entropy(batch)


def noisy(self: Any, batch: Any) -> Tensor:
    return cross_entropy(batch) * (1 + 0.01 * float(torch.rand(())) + 0.01 * np.random.rand() + 0.01 * random.random())


def elsewhere(self: Any, batch: Any) -> Tensor:
    weights = torch.ones(len(batch.y), device=META)
    loss: Tensor = (weights * batch.loss.cross_entropy(batch.logits_adv, batch.y)).mean()
    return loss


def sent_elsewhere(self: Any, task: Any) -> Any:
    update = AdversarialTrainer.fit(self, task)
    return replace(update, state={name: tensor.to(META) for name, tensor in update.state.items()})


class Misspelt(AdversarialTrainer):
    def train_loss(self, batch: Any) -> Tensor:
        return cross_entropy(batch)

    def atack_loss(self, batch: Any) -> Tensor:
        loss: Tensor = batch.logits_adv.sum()
        return loss


class Idle(FedPGD):
    """What its author meant to change is not there yet."""


def negated(self: Any, batch: Any) -> Tensor:
    return -AdversarialTrainer.attack_loss(self, batch)


def over_images(self: Any, batch: Any) -> Tensor:
    batch.x_nat.clamp_(max=0.9)
    return cross_entropy(batch)


def takes_steps_twice(self: Any, batch: Any, step: Any) -> Tensor:
    step(batch)
    last: Tensor = step(batch)
    return last


TRAINERS = {
    "`train_loss` gives a loss for each example": error(
        "expected one number, a tensor of shape ()",
        trainer(train_loss=lambda self, batch: batch.loss.cross_entropy(batch.logits_adv, batch.y)),
    ),
    "`train_loss` gives a Python float": error(
        "expected one number, a tensor of shape ()", trainer(train_loss=lambda self, batch: cross_entropy(batch).item())
    ),
    "the loss is detached, or computed under `torch.no_grad()`": error(
        "depends on no parameter of the model", trainer(train_loss=lambda self, batch: cross_entropy(batch).detach())
    ),
    "the loss is nan": error(
        "the training loss is nan", trainer(train_loss=lambda self, batch: cross_entropy(batch) * torch.nan)
    ),
    "the loss is a sum over the batch": harmless(
        "as a learning rate that is as many times larger; the loss in `rounds.csv` shows it",
        trainer(train_loss=lambda self, b: b.loss.cross_entropy(b.logits_adv, b.y).sum()),
        train_args__learning_rate=0.001,
    ),
    "cross-entropy of a softmax": harmless(
        "a weaker method; evaluators attack the model's own logits",
        trainer(train_loss=lambda self, b: b.loss.cross_entropy(b.logits_adv.softmax(1), b.y).mean()),
    ),
    "it trains on the clean images alone": harmless(
        "a method without robustness, and its robust accuracy says so",
        trainer(train_loss=lambda self, b: b.loss.cross_entropy(b.logits_nat, b.y).mean()),
    ),
    "a hook's name is misspelt: `atack_loss`": error(
        "Did you mean 'attack_loss'?", TrainerEntry("wrong", build=Misspelt)
    ),
    "a subclass of a built-in method changes nothing": error(
        "overrides nothing of FedPGD", TrainerEntry("wrong", build=Idle)
    ),
    "`attack_loss` is a mean over the examples": harmless(
        "a step has a length of its own, whatever the scale of the gradient",
        trainer(attack_loss=lambda self, b: b.loss.cross_entropy(b.logits_adv, b.y).mean()),
    ),
    "`attack_loss` is negated": harmless(
        "a method without robustness, and its robust accuracy says so; `check_trainer` names the sign",
        trainer(attack_loss=negated),
    ),
    "a step changes the clean images in place": error("in place", trainer(train_loss=over_images)),
    "`take_steps` steps twice on one forward pass": error(
        "Trying to backward through the graph a second time", trainer(take_steps=takes_steps_twice)
    ),
    "a running mean of losses keeps their graphs": error(
        "detach what is kept from one batch to the next", trainer(train_loss=smoothed)
    ),
    "an attribute counts the batches": warning(
        "changes its attributes while it works (batches)", trainer(train_loss=counted)
    ),
    "`backward` forgets `loss.backward()`": error(
        "left no gradient in any parameter", trainer(backward=without_backward)
    ),
    "`backward` forgets `zero_grad()`": harmless(
        "gradients are None before each step", trainer(backward=without_zero_grad)
    ),
    "the model is left in evaluation mode": error(
        "left the model in evaluation mode", trainer(train_loss=in_evaluation_mode)
    ),
    "it draws from the global generators of torch, numpy and Python": harmless(
        "they are seeded for each client and round, and put back", trainer(train_loss=noisy)
    ),
    "a tensor on another device": error("Make tensors where those that came in are", trainer(train_loss=elsewhere)),
    "a loop of its own sends tensors that are on the GPU": error("expected it on the cpu", trainer(fit=sent_elsewhere)),
    "a metric that the entry does not declare": error(
        "which its entry does not declare",
        trainer(train_loss=lambda self, b: b.record("margin", b.logits_adv) or cross_entropy(b)),
    ),
    "the code reads an option that the config lacks": error(
        "its code reads the option 'beta', which its entry does not declare",
        trainer(train_loss=lambda self, b: self.options.beta * cross_entropy(b)),
    ),
}


# --- loss modifiers ---------------------------------------------------------------------------------------------------


def modifier(**methods: Any) -> ModifierEntry:
    """A modifier whose client's loss has these methods."""
    loss = type("Loss", (ClientLoss,), methods)
    body = {"__init__": lambda self, options: None, "bind": lambda self, class_counts: loss()}
    return ModifierEntry("wrong", build=type("Wrong", (LossModifier,), body), methods=("fedpgd",))


def shifted_in_place(self: Any, logits: Tensor) -> Tensor:
    logits += 1
    return logits


MODIFIERS = {
    "a method's name is misspelt: `attack_logit`": error(
        "Did you mean 'attack_logits'?", modifier(attack_logit=lambda self, z: 2 * z)
    ),
    "`cross_entropy` gives the mean": error(
        "cross_entropy of its loss returned a tensor of shape (); expected a tensor of shape (2,)",
        modifier(cross_entropy=lambda self, z, y: nn.functional.cross_entropy(z, y)),
    ),
    "logits are changed in place": error(
        "changes the logits that it is given in place", modifier(attack_logits=shifted_in_place)
    ),
    "`bind` returns the class": error(
        "bind returned the class ClientLoss",
        ModifierEntry(
            "wrong",
            build=type(
                "Wrong", (LossModifier,), {"__init__": lambda self, o: None, "bind": lambda self, c: ClientLoss}
            ),
            methods=("fedpgd",),
        ),
    ),
}


# --- inner attacks ----------------------------------------------------------------------------------------------------


def inner(**methods: Any) -> InnerAttackEntry:
    return InnerAttackEntry("wrong", build=type("Wrong", (InnerAttack,), methods))


def with_graph(self: Any, task: Any) -> Tensor:
    x_adv = task.x_nat.clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(task.loss(task.model(x_adv)), x_adv)
        found: Tensor = task.threat.project(x_adv + 0.01 * slope.sign(), task.x_nat)
    return found


def twice_as_far(self: Any, task: Any) -> Tensor:
    slope = task.gradient(task.x_nat)
    found: Tensor = (task.x_nat + 2 * float(task.threat.eps) * slope.sign()).clamp(0, 1)
    return found


def whitened(self: Any, task: Any) -> Tensor:
    task.x_nat.clamp_(max=0.9)
    found: Tensor = task.climb(steps=2, step_size=0.05)
    return found


class Renamed(InnerAttack):
    def find(self, task: Any) -> Tensor:
        return task.climb(steps=1, step_size=0.1)  # type: ignore[no-any-return]


INNER_ATTACKS = {
    "the method has another name: `find`": error(
        "overrides nothing of InnerAttack", InnerAttackEntry("wrong", build=Renamed)
    ),
    "`craft` returns nothing": error("craft returned nothing (None)", inner(craft=lambda self, task: None)),
    "`craft` returns float64": error("expected torch.float32", inner(craft=lambda self, task: task.x_nat.double())),
    "`craft` leaves the ball": error("left the linf ball", inner(craft=twice_as_far)),
    "`craft` returns the perturbation alone": error(
        "left the linf ball", inner(craft=lambda self, task: 0.05 * torch.ones_like(task.x_nat))
    ),
    "`craft` changes the clean images in place": error("in place", inner(craft=whitened)),
    "`craft` does not detach its images": harmless("they are detached", inner(craft=with_graph)),
    "`craft` takes more steps than the entry says": harmless(
        "`passes` in `rounds.csv` are counted, not believed",
        inner(craft=lambda self, task: task.climb(steps=5, step_size=0.05)),
    ),
}


# --- aggregators ------------------------------------------------------------------------------------------------------


def aggregator(combine: Callable[[Any], Any], **more: Any) -> AggregatorEntry:
    body = {"__init__": lambda self, options: None, "combine": lambda self, task: combine(task), **more}
    from calfat_plugin import Aggregator

    return AggregatorEntry("wrong", build=type("Wrong", (Aggregator,), body))


def mean(task: Any) -> dict[str, Tensor]:
    return weighted_average([update.state for update in task.updates.values()], [1.0] * len(task.updates))


def each(change: Callable[[Tensor, Tensor], Tensor]) -> AggregatorEntry:
    """The next model's tensors from the old ones and the clients' mean."""
    return aggregator(lambda task: Aggregate({n: change(task.global_state[n], new) for n, new in mean(task).items()}))


class Momentum(FedAvg):
    def combine(self, task: Any) -> Aggregate:
        found = super().combine(task)
        self.last = found.state
        return found


def spoiled(task: Any) -> Aggregate:
    for tensor in next(iter(task.updates.values())).state.values():
        tensor.mul_(2)
    return Aggregate(mean(task))


def with_norm(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    """A model with batch normalisation, which counts its batches in an integer."""
    return TinyModel(side=image_size[0], classes=num_classes, norm=True)


def as_numbers(task: Any) -> Aggregate:
    states = [update.state for update in task.updates.values()]
    return Aggregate({name: sum(state[name] for state in states) / len(states) for name in states[0]})


WITH_NORM = {"model_args__model": f"{__name__}:with_norm"}
AGGREGATORS = {
    "`combine` returns the state alone": error("combine returned a dict", aggregator(mean)),
    "the step has the wrong sign: theta - (mean - theta)": alarm(
        "server-step", each(lambda old, new: old - (new - old))
    ),
    "`combine` returns the mean update in place of the model": alarm("server-step", each(lambda old, new: new - old)),
    "models are summed, and not divided": alarm("server-step", each(lambda old, new: 3 * new)),
    "its weights are numbers of examples, and do not sum to 1": error(
        "sum to",
        aggregator(lambda task: Aggregate(mean(task), weights={c: u.num_examples for c, u in task.updates.items()})),
    ),
    "updates are changed in place": error("in place", aggregator(spoiled)),
    "buffers are left out": error(
        "is missing",
        aggregator(lambda task: Aggregate({name: mean(task)[name] for name in task.parameter_names})),
        **WITH_NORM,
    ),
    "integer buffers are averaged as floats": error(
        "has dtype torch.float32, expected torch.int64", aggregator(as_numbers), **WITH_NORM
    ),
    "the result is nan": error("nan or inf", each(lambda old, new: new * torch.nan)),
    "tensors on another device": error("expected it on the cpu", each(lambda old, new: new.to(META))),
    "momentum is kept in an attribute": warning(
        "changes its attributes while it works (last)", AggregatorEntry("wrong", build=Momentum, config=FedAvgOptions)
    ),
    "it looks at the server's images, undeclared": error(
        "uses_monitored_data=True", aggregator(lambda task: task.monitored())
    ),
    "clients are not weighed by their examples": harmless(
        "a rule like any other; without `weights` nothing is claimed", aggregator(lambda task: Aggregate(mean(task)))
    ),
}


# --- attackers --------------------------------------------------------------------------------------------------------


class Sends(Attacker):
    def __init__(self, options: Any) -> None:
        self.options = options

    def send(self, task: Any) -> Any:
        return task.global_state


def attacker(**methods: Any) -> AttackerEntry:
    body = {"__init__": lambda self, options: None, **methods}
    return AttackerEntry("wrong", build=type("Wrong", (Attacker,), body))


def in_place(self: Any, data: ImageData, num_classes: int) -> ImageData:
    data.y.add_(1).remainder_(num_classes)
    return data


ATTACKERS = {
    "a method's name is misspelt: `send`": error("Did you mean 'sent'?", AttackerEntry("wrong", build=Sends)),
    "`poisoned` gives labels that are none": error(
        "poisoned returned labels from", attacker(poisoned=lambda self, data, c: replace(data, y=data.y + 5))
    ),
    "`poisoned` gives images on another device": error(
        "poisoned returned images on meta", attacker(poisoned=lambda self, data, c: data.to(META))
    ),
    "`poisoned` gives images outside [0, 1]": error(
        "poisoned returned images whose pixels run from",
        attacker(poisoned=lambda self, data, c: replace(data, x=pixels(data.x) * 2 - 1)),
    ),
    "`poisoned` gives a pair": error(
        "poisoned returned a tuple; expected an ImageData", attacker(poisoned=lambda self, data, c: (data.x, data.y))
    ),
    "`poisoned` changes the labels in place": harmless("each round has a copy", attacker(poisoned=in_place)),
    "`sent` looks at the honest clients, undeclared": error(
        "sees_honest=True", attacker(sent=lambda self, task: task.honest())
    ),
    "`sent` gives float64": warning(
        "has dtype torch.float64, expected torch.float32",
        attacker(sent=lambda self, task: {n: t.double() for n, t in task.own.items()}),
    ),
}


# --- evaluators -------------------------------------------------------------------------------------------------------


def evaluator(craft: Any = lambda self, task, x, y, noise: x, **methods: Any) -> EvaluatorEntry:
    body = {"craft": craft, "settings": lambda self, task: {}, **methods}
    return EvaluatorEntry("wrong", build=type("Wrong", (AttackEvaluator,), body))


def training(self: Any, task: Any, x: Tensor, y: Tensor, noise: Any) -> Tensor:
    task.model.train()
    return x


def fitted(self: Any, task: Any, x: Tensor, y: Tensor, noise: Any) -> Tensor:
    with torch.no_grad():
        next(task.model.parameters()).add_(1)
    return x


def counting(accuracy: Any) -> EvaluatorEntry:
    return evaluator(
        evaluate=lambda self, task, label: replace(AttackEvaluator.evaluate(self, task, label), accuracy=accuracy)
    )


def shaken(self: Any, task: Any, x: Tensor, y: Tensor, noise: Any) -> Tensor:
    return (x + 0.1 * (2 * torch.rand(x.shape) - 1)).clamp(0, 1)


class Downhill(PGD):
    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return -super().loss(logits, y)


EVALUATORS = {
    "`craft` leaves the ball": error(
        "left the linf ball of eps 0.1", evaluator(lambda self, task, x, y, noise: torch.ones_like(x))
    ),
    "`craft` returns the perturbation alone": error(
        "left the", evaluator(lambda self, task, x, y, noise: 0.1 * torch.ones_like(x))
    ),
    "`craft` returns one image too few": error(
        "craft returned a tensor of shape", evaluator(lambda self, task, x, y, noise: x[1:])
    ),
    "`settings` returns nothing": error("settings returned nothing", evaluator(settings=lambda self, task: None)),
    "the attack climbs the wrong way": alarm("loss-falls", EvaluatorEntry("wrong", build=Downhill, config=PGDOptions)),
    "the model is left in training mode": error("changed the model it was to measure", evaluator(training)),
    "the model's weights are changed": error("changed the model it was to measure", evaluator(fitted)),
    "accuracy in percent": error("expected a fraction in [0, 1]", counting(86.5)),
    "it draws from torch's global generator": harmless(
        "it is seeded for each evaluation; `check_evaluator` asks for `noise`", evaluator(shaken)
    ),
    "a metric that the entry does not declare": error(
        "which its entry does not declare", evaluator(lambda self, task, x, y, noise: task.record("far", y) or x)
    ),
}


# --- models -----------------------------------------------------------------------------------------------------------


def model(change: Callable[[Any, Tensor], Tensor]) -> ModelEntry:
    """What ``change`` makes of a tiny model and images."""

    def build(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
        return Changed(TinyModel(side=image_size[0], classes=num_classes), change)

    return ModelEntry("wrong", build=build)


class Changed(nn.Module):
    def __init__(self, inner: nn.Module, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.inner, x)


def seeding(in_channels: int, image_size: tuple[int, int], num_classes: int) -> nn.Module:
    torch.manual_seed(0)
    return TinyModel(side=image_size[0], classes=num_classes)


ATTACKED = {"calfat__evaluators": ["natural", "pgd2"], "calfat__monitor__evaluators": ["natural"]}
MODELS = {
    "the model returns a softmax": alarm("probabilities", model(lambda net, x: net(x).softmax(1)), **ATTACKED),
    "the number of classes is fixed": error(
        "expected logits of shape (2, 10)",
        ModelEntry("wrong", build=lambda in_channels, image_size, num_classes: TinyModel(side=8, classes=4)),
    ),
    "the images are detached": error("does not depend on x_adv", model(lambda net, x: net(x.detach()))),
    "`build` takes other arguments": error(
        "calling it with in_channels, image_size, num_classes failed",
        ModelEntry("wrong", build=lambda classes: TinyModel()),
    ),
    "`build` seeds torch by itself": error("its code seeds torch by itself", ModelEntry("wrong", build=seeding)),
    "pixels are divided by 255 a second time": harmless(
        "a model that learns more slowly; steps of an attack have a length of their own",
        model(lambda net, x: net(x / 255)),
    ),
}


# --- data sets and partitions -----------------------------------------------------------------------------------------


def dataset(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[], Iterable[str]]:
    """Images (12, 3, 8, 8) in [0, 1] and labels 0 to 3, changed."""

    def load(root: Any) -> Dataset:
        images = torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        data = ImageData(*change(images, torch.arange(12) % 4))
        return Dataset("wrong", data, data, 4)

    return lambda: experiment(DatasetEntry("wrong", build=load)).load_dataset() and ()


DATASETS = {
    "pixels are 0 to 255 in floating point": error(
        "expected [0, 1]: divide bytes by 255", dataset(lambda x, y: (x * 255, y))
    ),
    "pixels are normalised": error("leave normalisation to the model", dataset(lambda x, y: ((x - 0.5) / 0.25, y))),
    "channels come last": error("permute(0, 3, 1, 2)", dataset(lambda x, y: (x.permute(0, 2, 3, 1), y))),
    "labels begin at 1": error("labels run from 1 to 4; expected 0 to 3", dataset(lambda x, y: (x, y + 1))),
    "labels are floats": error(
        "expected (N, C, H, W) uint8 or floats, and (N,) whole numbers", dataset(lambda x, y: (x, y.float()))
    ),
    "images are float64": harmless("they become float32", dataset(lambda x, y: (x.double(), y))),
}


def partition(build: Callable[..., Any]) -> Callable[[], Iterable[str]]:
    """Of thirty examples to three clients; the labels are the same after it."""

    def act() -> Iterable[str]:
        labels = np.arange(30) % 10
        experiment(PartitionEntry("wrong", build=build)).split(labels)
        return () if (labels == np.arange(30) % 10).all() else ("the labels were changed",)

    return act


def sorting(labels: Any, num_clients: int) -> Any:
    labels.sort()
    return np.array_split(np.arange(len(labels)), num_clients)


def masks(labels: Any, num_clients: int) -> Any:
    return [np.arange(len(labels)) % num_clients == client for client in range(num_clients)]


PARTITIONS = {
    "clients overlap": error(
        "training examples out more than once",
        partition(lambda labels, n: [np.arange(11), np.arange(10, 20), np.arange(20, 30)]),
    ),
    "examples are dropped": error("may_leave_out=True", partition(lambda labels, n: np.array_split(np.arange(27), n))),
    "masks in place of positions": error("positions in the training set, whole numbers", partition(masks)),
    "a client too few": error(
        "2 index arrays for 3 clients", partition(lambda labels, n: np.array_split(np.arange(30), n - 1))
    ),
    "the labels are sorted in place": harmless("they are a copy", partition(sorting)),
}


# --- loggers ----------------------------------------------------------------------------------------------------------


def logger(**methods: Any) -> Callable[[], Iterable[str]]:
    """Told of a round; what the run says of it."""

    def act() -> Iterable[str]:
        said: list[str] = []
        build = type("Wrong", (), {"__init__": lambda self, options: None, **methods})
        listeners = Listeners.of(experiment(LoggerEntry("wrong", build=build)), said.append)
        listeners.round_finished(None, None)  # type: ignore[arg-type]
        return said

    return act


def failing(self: Any, record: Any) -> None:
    raise OSError("disk full")


LOGGERS = {
    "it raises an exception": warning(
        "failed in calfat_round_finished and is off for this run: OSError: disk full",
        logger(calfat_round_finished=hookimpl(failing)),
    ),
    "`@hookimpl` is missing above one of its hooks": warning(
        "is @hookimpl missing above it?",
        logger(calfat_round_finished=lambda self: None, calfat_run_finished=hookimpl(lambda self: None)),
    ),
    "a hook's name is misspelt": warning("calfat_round_finish", logger(calfat_round_finish=hookimpl(failing))),
    "an argument has another name": warning(
        "is not used", logger(calfat_round_finished=hookimpl(lambda self, rec: None))
    ),
}


# --- hooks, entries, options ------------------------------------------------------------------------------------------


def loaded(**hooks: Any) -> Callable[[], Iterable[str]]:
    return lambda: Registry.load(entry_points=False, plugins=[SimpleNamespace(**hooks, __name__="mine")]) and ()


def offering(make: Callable[[], Any]) -> Callable[[], Iterable[str]]:
    return loaded(calfat_local_trainers=hookimpl(make))


class NoDataclass:
    beta = 1.0


@dataclass(frozen=True)
class Reserved:
    name: str = option("x", help="of a test")


HOOKS = {
    "a hook's name is misspelt: `calfat_local_trainer`": error(
        "Did you mean 'calfat_local_trainers'?", loaded(calfat_local_trainer=hookimpl(lambda: []))
    ),
    "`@hookimpl` is missing above a hook": error(
        "is @hookimpl missing above it?", loaded(calfat_aggregators=lambda: [], calfat_attackers=hookimpl(lambda: []))
    ),
    "`yield` is forgotten": error("is a 'yield' or 'return' missing?", offering(lambda: None)),
    "the class is yielded in place of an entry": error(
        "must yield TrainerEntry objects, got the class FedPGD", offering(lambda: [FedPGD])
    ),
    "a name that a built-in has": error(
        "offer a local trainer called 'fedpgd'", offering(lambda: [TrainerEntry("fedpgd", build=FedPGD)])
    ),
    "the config is no dataclass": error(
        "NoDataclass", offering(lambda: [TrainerEntry("wrong", build=FedPGD, config=NoDataclass)])
    ),
    "an option has the name of a recipe's key": error(
        "recipes use that key for something else",
        offering(lambda: [TrainerEntry("wrong", build=FedPGD, config=Reserved)]),
    ),
}

#: Kind of the plugin, as the page has it, to what its author did, and what comes of it.
MISTAKES: dict[str, dict[str, Comes]] = {
    "local trainer": TRAINERS,
    "loss modifier": MODIFIERS,
    "inner attack": INNER_ATTACKS,
    "aggregator": AGGREGATORS,
    "attacker": ATTACKERS,
    "evaluator": EVALUATORS,
    "model": MODELS,
    "data set": DATASETS,
    "partition": PARTITIONS,
    "logger": LOGGERS,
    "hooks and options": HOOKS,
}

_BLOCK = re.compile(r"(<!-- mistakes: .*? -->\n).*?(<!-- end of mistakes -->)", re.DOTALL)


def table() -> str:
    """The table as the page has it."""
    rows = [
        f"| {kind} | {what} | {comes.outcome} | {comes.says if comes.outcome == 'harmless' else f'`{comes.says}`'} |"
        for kind, mistakes in MISTAKES.items()
        for what, comes in mistakes.items()
    ]
    head = "| plugin | mistake | what comes of it | what is said, or why it is harmless |\n| --- | --- | --- | --- |"
    return "\n".join([head, *rows, ""])


def on_page() -> str:
    """The page with the table as it should be."""
    return _BLOCK.sub(lambda found: found[1] + table() + found[2], PAGE.read_text(encoding="utf-8"))
