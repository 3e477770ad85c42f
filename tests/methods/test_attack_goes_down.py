"""A training attack of the wrong sign is noticed: by the client in its last batches, by the server over the clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.federation.outliers import attack_alarms
from calfat_plugin.interfaces import InnerAttack, InnerTask
from calfat_plugin.maths.losses import falling
from calfat_plugin.results import FELL, LocalUpdate
from calfat_plugin.testing.tiny import answered, balanced_model
from calfat_plugin.threat import ThreatModel
from calfat_plugin.trainers import loop
from calfat_plugin.trainers.base import AdversarialTrainer
from calfat_plugin.trainers.batches import AttackBatch, TrainBatch
from tests.methods.helpers import SETTINGS, Federation, build_modifier, experiment, local_task, same_bits, train


class Attacking(AdversarialTrainer):
    """FedPGD whose attack loss is multiplied by ``sign``, on the rows from ``first``."""

    def __init__(self, sign: float, first: int = 0) -> None:
        super().__init__(None, build_modifier("plain"))
        self.sign, self.first = sign, first

    def attacked_rows(self, index: Tensor, task: Any, generator: torch.Generator) -> Tensor | None:
        return torch.arange(len(index)) >= self.first

    def attack_loss(self, batch: AttackBatch) -> Tensor:
        return self.sign * super().attack_loss(batch)

    def train_loss(self, batch: TrainBatch) -> Tensor:
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()


class Drawing(nn.Module):
    """Draws from the global generator in every pass, and does not use what it draws."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1)
        answer: Tensor = self.model(x)
        return answer


def metrics(
    method: AdversarialTrainer, round: int = 1, wrap: Callable[[nn.Module], nn.Module] = lambda m: m, **settings: Any
) -> Any:
    """Of a round of 12 images, which the model has right; default: in one batch."""
    model = balanced_model()
    chosen = dataclasses.replace(SETTINGS, **{"epochs": 1, "batch_size": 12, **settings})
    return train(method, local_task(wrap(model), answered(model), settings=chosen, round=round)).metrics


@pytest.mark.parametrize(
    ("method", "fell"), [(Attacking(-1), 12), (Attacking(1), None), (Attacking(-1, 2), 10), (Attacking(-1, 3), None)]
)
def test_the_client_says_for_how_many_images_its_attack_goes_down(method: Attacking, fell: int | None) -> None:
    assert metrics(method).get(FELL) == fell


@pytest.mark.parametrize(
    ("enough", "settings", "fell"),
    [
        (64, {"batch_size": 5}, 12),  # the last has 2
        (64, {"batch_size": 5, "epochs": 2}, 12),  # each image once
        (64, {"batch_size": 5, "local_steps": 4}, 12),  # 2 of the first epoch and 1 of the second
        (8, {"batch_size": 2}, 10),  # the last 5
        (6, {"batch_size": 2}, None),
    ],
)
def test_the_last_batches_count_until_they_have_enough_images(
    enough: int, settings: dict[str, Any], fell: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_LOOKED_AT", enough)
    assert metrics(Attacking(-1), learning_rate=1e-9, weight_decay=0.0, **settings).get(FELL) == fell


def test_only_what_the_model_has_right_counts() -> None:
    """Of an image that it has wrong an attack on a divergence may go anywhere."""
    model = balanced_model()
    right = answered(model)
    wrong = dataclasses.replace(right, y=(right.y + 1) % 4)
    settings = dataclasses.replace(SETTINGS, batch_size=5, learning_rate=1e-9, weight_decay=0.0)
    assert FELL in train(Attacking(-1), local_task(model, right, settings=settings)).metrics
    assert FELL not in train(Attacking(-1), local_task(model, wrong, settings=settings)).metrics


def test_the_looks_leave_training_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> LocalUpdate:
        model = balanced_model()
        wrapped = nn.Sequential(nn.Dropout(0.2), Drawing(model))
        settings = dataclasses.replace(SETTINGS, batch_size=5)
        return train(Attacking(1), local_task(wrapped, answered(model), settings=settings))

    torch.manual_seed(0)
    looked = trained()
    monkeypatch.setattr(loop, "_first_looked_at", lambda work, lengths: sum(lengths))
    torch.manual_seed(0)
    plain = trained()
    assert same_bits(looked.state, plain.state)
    assert looked.metrics == plain.metrics


class Downhill(InnerAttack):
    """Gives images of which the model is surer than of the clean ones."""

    def start(self, x_nat: Tensor, threat: ThreatModel, generator: torch.Generator) -> Tensor:
        x, model = x_nat.clone().requires_grad_(), balanced_model()
        with torch.enable_grad():
            logits = model(x)
            (slope,) = torch.autograd.grad(nn.functional.cross_entropy(logits, logits.argmax(dim=1)), x)
        surer: Tensor = (x_nat - 0.05 * slope.sign()).clamp(0, 1)
        return surer

    def craft(self, task: InnerTask) -> Tensor:
        return self.start(task.x_nat, task.threat, torch.Generator())


class DownhillFirst(Downhill):
    """The same, and then steps of its own."""

    def take_steps(self, batch: Any, step: Callable[[Any], Tensor], memory: Any) -> Tensor:
        return step(batch)


@pytest.mark.parametrize(("inner", "said"), [(Downhill(), True), (DownhillFirst(), False)])
def test_an_attack_with_steps_of_its_own_is_not_looked_at(inner: InnerAttack, said: bool) -> None:
    """Free goes on from its start with the gradients of training: there the loss may be lower."""
    model = balanced_model()
    task = local_task(model, answered(model), settings=dataclasses.replace(SETTINGS, batch_size=12), inner=inner)
    assert (FELL in train(Attacking(1), task).metrics) is said


def test_rounds_are_looked_at_ever_less_often() -> None:
    assert [round for round in range(1, 20) if FELL in metrics(Attacking(-1), round)] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("clean", "attacked", "fell"),
    [
        ([1.0] * 10, [0.5] * 10, 10),
        ([1.0] * 9, [0.5] * 9, 0),  # chance could do that
        ([1.0] * 10, [1 - 1e-6] * 10, 0),  # rounding
        ([1.0] * 16, [0.5] * 12 + [1.1] * 4, 0),  # three quarters are not over three quarters
        ([1.0] * 16, [0.5] * 13 + [1.1] * 3, 13),
        ([1.0] * 16, [0.9] * 13 + [9.0] * 3, 0),  # but the sum rises
    ],
)
def test_what_counts_as_falling(clean: list[float], attacked: list[float], fell: int) -> None:
    assert falling(torch.tensor(clean), torch.tensor(attacked)) == fell


def test_the_server_raises_the_alarm_where_over_half_of_the_clients_say_so() -> None:
    assert attack_alarms({}, 0) == attack_alarms({0: 12.0}, 2) == attack_alarms({0: 12.0, 1: 30.0}, 4) == ()
    assert attack_alarms({0: 12.0, 3: 30.0}, 3) == (
        "attack-goes-down: the attacks of 2 of 3 clients lower the loss of the true label, that of client 3 for 30 "
        "images of its last batches",
    )


def test_clients_without_an_attack_are_not_counted() -> None:
    """Two of three train on clean images, and have nothing to say; what they claim all the same counts nothing."""
    federation = Federation(experiment("fedpgd", calfat__clients=[{"ids": "0-1", "trainer": "standard"}]))
    clients, downlink = federation.server.start_round(1), federation.server.downlink()
    uploads = {c: (federation.worker.num_examples(c), federation.worker.fit(c, 1, downlink)) for c in clients}
    said = "metric/" + FELL
    uploads[0][1][said] = torch.tensor(99.0)
    assert not any("attack-goes-down" in alarm for alarm in federation.server.finish_round(1, uploads).alarms)
    uploads[2][1][said] = torch.tensor(12.0)
    (alarm,) = (text for text in federation.server.finish_round(2, uploads).alarms if "attack-goes-down" in text)
    assert "of 1 of 1 clients" in alarm
    assert "that of client 2 for 12 images" in alarm
