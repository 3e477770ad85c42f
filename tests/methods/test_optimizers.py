"""The local optimiser of ``train_args``: against torch's own by a plain loop, clipped, and in a number of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from calfat_plugin.aggregators.scaffold import divisor
from calfat_plugin.datasets.batches import Batch, batches
from calfat_plugin.errors import PluginError, RecipeError, UpdateError
from calfat_plugin.interfaces import ActiveCorrection, LocalCorrection, LocalTask, TrainBatch, TrainSettings
from calfat_plugin.observer import BatchProgress
from calfat_plugin.seeds import generator
from calfat_plugin.trainers.additions import check_optimizer
from calfat_plugin.trainers.base import AdversarialTrainer
from tests.methods.helpers import (
    CPU,
    SETTINGS,
    Federation,
    TinyNet,
    build_aggregator,
    build_method,
    build_modifier,
    experiment,
    local_task,
    same_bits,
    tiny_data,
)
from tests.snapshot import TextSnapshot

RATE, DECAY = SETTINGS.learning_rate, SETTINGS.weight_decay
NORM = 0.3  # smaller than the first gradients of TinyNet, larger than some of the last
MAKERS: Mapping[str, tuple[dict[str, Any], Callable[[Any], Optimizer]]] = {
    "sgd": ({"momentum": 0.5}, lambda p: SGD(p, lr=RATE, momentum=0.5, weight_decay=DECAY)),
    "nesterov": ({"nesterov": True}, lambda p: SGD(p, lr=RATE, momentum=0.9, weight_decay=DECAY, nesterov=True)),
    "adam": ({"client_optimizer": "adam"}, lambda p: Adam(p, lr=RATE, weight_decay=DECAY)),
    "adamw": ({"client_optimizer": "adamw"}, lambda p: AdamW(p, lr=RATE, weight_decay=DECAY)),
}


def settings(**changed: Any) -> TrainSettings:
    return dataclasses.replace(SETTINGS, **changed)


def in_order(passes: int | None = None) -> Iterator[Batch]:
    """The batches of client 0 in round 1, pass after pass, each in an order of its own."""
    for epoch in count() if passes is None else range(passes):
        yield from batches(tiny_data(), 4, CPU, generator=generator(0, "batches", round=1, client=0, extra=epoch))


def by_hand(make: Callable[[Any], Optimizer], steps: int, max_norm: float | None = None) -> Mapping[str, Tensor]:
    """Weights after so many steps on clean images."""
    model = TinyNet()
    optimizer = make(model.parameters())
    for x, y, _ in islice(in_order(), steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model.state_dict()


def trained(given: TrainSettings, method: str = "standard", **more: Any) -> Mapping[str, Tensor]:
    return build_method(method).fit(local_task(settings=given, **more)).state


@pytest.mark.parametrize("max_norm", [None, NORM])
@pytest.mark.parametrize("name", MAKERS)
def test_steps_are_those_of_torchs_optimiser(name: str, max_norm: float | None) -> None:
    asked, make = MAKERS[name]
    found = trained(settings(epochs=2, max_grad_norm=max_norm, **asked))
    wanted, other = by_hand(make, 6, max_norm), by_hand(make, 6, NORM if max_norm is None else None)
    for weights in found:
        torch.testing.assert_close(found[weights], wanted[weights], rtol=1e-5, atol=1e-6)
    assert not all(torch.allclose(found[weights], other[weights], rtol=1e-3, atol=1e-4) for weights in found)


def test_the_whole_gradient_is_clipped_also_what_an_aggregator_adds_to_it() -> None:
    class Pull(ActiveCorrection):
        def after_backward(self, model: nn.Module) -> None:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 100.0)

    class Pulling(LocalCorrection):
        def begin(self, task: LocalTask) -> ActiveCorrection:
            return Pull()

    given = settings(local_steps=1, max_grad_norm=NORM, momentum=0.0, weight_decay=0.0)
    after, before = trained(given, correction=Pulling()), TinyNet().state_dict()
    moved = torch.stack([(after[name] - before[name]).square().sum() for name in before]).sum().sqrt()
    assert float(moved) == pytest.approx(RATE * NORM, rel=1e-4)


# --- local steps ------------------------------------------------------------------------------------------------------


class Counting(AdversarialTrainer):
    """Notes which examples each step saw, and how many batches the round was said to have."""

    def __init__(self) -> None:
        super().__init__(None, build_modifier("plain"))
        self.seen: list[list[int]] = []
        self.told: list[int] = []

    def make_schedule(self, optimizer: Optimizer, task: LocalTask, num_batches: int) -> LRScheduler | None:
        self.told.append(num_batches)
        return None

    def train_loss(self, batch: TrainBatch) -> Tensor:
        self.seen.append(batch.index.tolist())
        batch.record("number", torch.tensor(float(len(self.seen))))
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 12])  # an epoch has 3
def test_local_steps_are_exact_and_go_through_the_data_again_in_new_orders(steps: int) -> None:
    method, progress = Counting(), list[BatchProgress]()
    update = method.fit(local_task(settings=settings(local_steps=steps, epochs=5), on_batch=progress.append))
    assert method.seen == [examples.index.tolist() for _, _, examples in islice(in_order(), steps)]
    assert method.told == [steps]
    assert [(now.batch, now.num_batches) for now in progress] == [(done, steps) for done in range(1, steps + 1)]
    weights = [len(index) for index in method.seen]  # means are over the whole round, not over what is left of an epoch
    mean = sum(number * weight for number, weight in enumerate(weights, start=1)) / sum(weights)
    assert update.metrics["number"] == pytest.approx(mean)
    again = Counting()
    assert same_bits(again.fit(local_task(settings=settings(local_steps=steps))).state, update.state)


@pytest.mark.parametrize("method", ["fedpgd", "mixfat", "fedrbn"])
def test_steps_of_whole_epochs_are_these_epochs(method: str) -> None:
    made = build_method(method)

    def fit(given: TrainSettings) -> Mapping[str, Tensor]:
        model = made.adapt_model(TinyNet(norm=True))
        state: Mapping[str, Tensor] = made.fit(local_task(model, settings=given)).state
        return state

    assert same_bits(fit(settings(epochs=2)), fit(settings(local_steps=6)))


def test_clients_of_any_size_take_the_same_number_of_steps() -> None:
    for size in (1, 4, 50):
        method = Counting()
        method.fit(local_task(data=tiny_data(count=size), settings=settings(local_steps=5)))
        assert len(method.seen) == 5
    assert build_method("fedpgd").fit(local_task(data=tiny_data(count=0), settings=settings(local_steps=5))).metrics


# --- every method, every round ----------------------------------------------------------------------------------------


def test_the_rate_that_is_recorded_is_the_one_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[float] = []
    step = SGD.step

    def noting(self: SGD, *given: Any) -> Any:
        used.extend(group["lr"] for group in self.param_groups)
        return step(self, *given)

    monkeypatch.setattr(SGD, "step", noting)
    asked = {"train_args__lr_schedule": "step", "train_args__lr_step_size": 1, "train_args__local_steps": 1}
    federation = Federation(experiment("fedpgd", **asked))
    recorded = [federation.play().learning_rate for _ in range(2)]
    clients = federation.server.experiment.num_clients
    assert used == [rate for rate in recorded for _ in range(clients)]
    assert recorded == pytest.approx([0.05, 0.005])


# --- what does not go together ----------------------------------------------------------------------------------------


class Own(AdversarialTrainer):
    """A method with an optimiser of its own."""

    def __init__(self, make: Callable[[Any, LocalTask], Optimizer]) -> None:
        super().__init__(None, build_modifier("plain"))
        self.make = make

    def make_optimizer(self, parameters: list[nn.Parameter], task: LocalTask) -> Optimizer:
        return self.make(parameters, task)

    def train_loss(self, batch: TrainBatch) -> Tensor:
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()


@pytest.mark.parametrize(
    ("own", "asked", "what"),
    [
        (AdamW, {"client_optimizer": "adam"}, "train_args.client_optimizer: adam"),
        (SGD, {"nesterov": True}, "train_args.nesterov: true"),
        (
            AdamW,
            {"has_schedule": True, "learning_rate": 0.025},
            "the round's learning rate of 0.025 (train_args.lr_schedule and warmup_rounds)",
        ),
    ],
)
def test_an_own_optimiser_that_contradicts_the_recipe_is_refused(
    own: Any, asked: dict[str, Any], what: str, snapshot: TextSnapshot
) -> None:
    with snapshot.raises(PluginError, what):
        Own(lambda parameters, task: own(parameters, lr=1.0)).fit(local_task(settings=settings(**asked)))


def test_an_own_optimiser_may_follow_the_recipe_and_replace_its_defaults() -> None:
    follows = Own(lambda parameters, task: AdamW(parameters, lr=task.settings.learning_rate))
    follows.fit(local_task(settings=settings(has_schedule=True, client_optimizer="adamw")))
    Own(lambda parameters, task: AdamW(parameters, lr=1e-3)).fit(local_task())


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"client_optimizer": "adam"}, "train_args.client_optimizer is adam"),
        ({"max_grad_norm": 0.5}, "train_args.max_grad_norm is 0.5"),
    ],
)
def test_a_correction_of_plain_steps_is_refused_beside_others(
    asked: dict[str, Any], found: str, snapshot: TextSnapshot
) -> None:
    """And before the run."""
    correction = build_aggregator("scaffold").correction()
    with snapshot.raises(PluginError, found):
        trained(settings(**asked), "fedpgd", correction=correction)
    with snapshot.raises(RecipeError, *asked):
        experiment("fedpgd", "scaffold", **{f"train_args__{key}": value for key, value in asked.items()})
    trained(settings(nesterov=True, has_schedule=True), "fedpgd", correction=correction)  # in both, variates know it


def test_a_correction_of_plain_steps_is_refused_beside_a_schedule_within_the_round() -> None:
    """Its optimiser is the recipe's SGD, and walks another way than the divisor says."""
    place = nn.Parameter(torch.zeros(()))
    asked = settings()
    optimizer = SGD([place], lr=asked.learning_rate, momentum=asked.momentum, nesterov=asked.nesterov)
    check_optimizer(optimizer, None, asked, needs_sgd=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    check_optimizer(optimizer, schedule, asked, needs_sgd=False)
    with pytest.raises(PluginError, match="it makes an optimiser of its own"):
        check_optimizer(optimizer, schedule, asked, needs_sgd=True)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_scaffolds_divisor_is_how_far_sgd_walks(steps: int, nesterov: bool) -> None:
    """On a constant gradient of 1, in units of the learning rate."""
    place = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = SGD([place], lr=0.1, momentum=0.9, nesterov=nesterov)
    for _ in range(steps):
        place.grad = torch.ones_like(place)
        optimizer.step()
    assert -float(place.detach()) / 0.1 == pytest.approx(divisor(steps, 0.9, "gradient", nesterov=nesterov))
    assert divisor(steps, 0.9, "after_step", nesterov=nesterov) == divisor(steps, 0.0, "gradient") == steps
    with pytest.raises(UpdateError, match=r"^SCAFFOLD needs at least one local step to measure a variate; got 0$"):
        divisor(0, 0.9, "gradient")
