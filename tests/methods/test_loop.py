"""The training loop keeps its word to methods: batches, modes, streams, optimiser, corrections, finite numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calfat_plugin.datasets import ImageData
from calfat_plugin.datasets.batches import batch_bounds
from calfat_plugin.datasets.data import Augmentation
from calfat_plugin.errors import UpdateError
from calfat_plugin.interfaces import ActiveCorrection, AttackBatch, LocalCorrection, LocalTask, TrainBatch
from calfat_plugin.maths.passes import fast_passes
from calfat_plugin.observer import BatchProgress
from calfat_plugin.seeds import generator
from calfat_plugin.trainers import watching
from calfat_plugin.trainers.base import AdversarialTrainer
from calfat_plugin.trainers.watching import LossMeter
from tests.methods.helpers import (
    SETTINGS,
    Asking,
    TinyNet,
    build_method,
    build_modifier,
    local_task,
    same_bits,
    tiny_data,
)
from tests.snapshot import TextSnapshot


class Watched(AdversarialTrainer):
    """FedPGD that notes what it is handed."""

    def __init__(self, **flags: Any) -> None:
        super().__init__(None, build_modifier("plain"))
        self.batches: list[TrainBatch] = []
        self.attack_modes: list[bool] = []
        self.train_modes: list[bool] = []
        vars(self).update(flags)

    def attack_loss(self, batch: AttackBatch) -> Tensor:
        self.attack_modes.append(batch.model.training)
        assert not any(parameter.requires_grad for parameter in batch.model.parameters())
        return super().attack_loss(batch)

    def train_loss(self, batch: TrainBatch) -> Tensor:
        self.train_modes.append(batch.model.training)
        assert all(parameter.requires_grad for parameter in batch.model.parameters())
        self.batches.append(batch)
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()


def epochs(count: int, **others: Any) -> Any:
    return dataclasses.replace(SETTINGS, epochs=count, **others)


# --- batches and modes ------------------------------------------------------------------------------------------------


def test_every_epoch_goes_through_all_examples_once_in_another_order() -> None:
    data = tiny_data(count=10)
    method = Watched()
    method.fit(local_task(data=data, settings=epochs(3)))
    assert [len(batch.y) for batch in method.batches] == [4, 4, 2] * 3
    orders = []
    for epoch in range(3):
        x = torch.cat([batch.x_nat for batch in method.batches[3 * epoch : 3 * epoch + 3]])
        y = torch.cat([batch.y for batch in method.batches[3 * epoch : 3 * epoch + 3]])
        where = [next(i for i in range(10) if torch.equal(data.x[i], image)) for image in x]
        assert sorted(where) == list(range(10))
        assert torch.equal(y, data.y[where])
        orders.append(where)
    assert len({tuple(order) for order in orders}) == 3


def test_attack_in_evaluation_mode_training_in_training_mode() -> None:
    method = Watched()
    method.fit(local_task())
    assert method.attack_modes == [False] * 3 * 3  # three steps for each of three batches
    assert method.train_modes == [True] * 3


def test_images_are_attacked_as_the_model_sees_them() -> None:
    """uint8 images reach methods as floats in [0, 1], augmented; the data set itself is never touched."""
    stored = ImageData((tiny_data(count=6).x * 255).to(torch.uint8), tiny_data(count=6).y)
    before = stored.x.clone()
    method = Watched()
    task = dataclasses.replace(local_task(data=stored), augment=Augmentation(crop_padding=1, flip=True))
    method.fit(task)
    for batch in method.batches:
        assert batch.x_nat.dtype == batch.x_adv.dtype == torch.float32
        assert 0 <= batch.x_nat.min() <= batch.x_nat.max() <= 1
        task.threat.check(batch.x_adv, batch.x_nat, who="the loop")
    assert torch.equal(stored.x, before)


def test_rows_that_are_not_attacked_stay_clean() -> None:
    method = Watched(attacked_rows=lambda index, task, generator: index % 2 == 0)
    method.fit(local_task())
    for batch in method.batches:
        assert batch.attacked is not None
        changed = (batch.x_adv != batch.x_nat).flatten(1).any(dim=1)
        assert torch.equal(changed, batch.attacked)
    assert sum(int(batch.attacked.sum()) for batch in method.batches if batch.attacked is not None) == 5

    none = Watched(attacked_rows=lambda index, task, generator: torch.zeros(len(index), dtype=torch.bool))
    without = Watched(attacks=False)
    for method in (none, without):
        method.fit(local_task())
        assert method.attack_modes == []
    assert all(torch.equal(batch.x_adv, batch.x_nat) and batch.kappa is None for batch in without.batches)


def test_a_last_batch_of_one_joins_its_neighbour_where_statistics_need_it() -> None:
    """Batch normalisation cannot train on a single example."""

    def sizes(model: nn.Module) -> list[int]:
        method = Watched()
        method.fit(local_task(model, tiny_data(count=9)))
        return [len(batch.y) for batch in method.batches]

    assert sizes(TinyNet()) == [4, 4, 1]
    assert sizes(TinyNet(norm=True)) == [4, 5]


# --- streams ----------------------------------------------------------------------------------------------------------


def starts(**where: Any) -> Tensor:
    """First adversarial batch with a step so small that it shows the random start; eps 0.1."""
    method = Watched()
    threat = dataclasses.replace(local_task().threat, step_size=1e-9)
    method.fit(local_task(threat=threat, settings=dataclasses.replace(SETTINGS, batch_size=10), **where))
    batch = method.batches[0]
    order = batch.x_nat.flatten(1).sum(dim=1).argsort()
    return (batch.x_adv - batch.x_nat)[order]


def test_streams_are_functions_of_seed_round_and_client() -> None:
    here = starts(seed=3, round=2, client=1)
    assert torch.equal(here, starts(seed=3, round=2, client=1))
    for other in ({"seed": 4}, {"round": 3}, {"client": 0}):
        assert not torch.equal(here, starts(**{"seed": 3, "round": 2, "client": 1, **other}))


# --- optimiser and corrections ----------------------------------------------------------------------------------------


class Quadratic(AdversarialTrainer):
    """loss = sum of w^2 / 2, so the gradient is w."""

    attacks = False

    def __init__(self) -> None:
        super().__init__(None, build_modifier("plain"))

    def train_loss(self, batch: TrainBatch) -> Tensor:
        return sum(parameter.square().sum() / 2 for parameter in batch.model.parameters())  # type: ignore[return-value]


class One(nn.Module):
    """A single weight."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([value]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x.flatten(1)[:, :2]


def test_sgd_with_momentum_and_weight_decay_by_hand() -> None:
    settings = epochs(2, batch_size=10, learning_rate=0.5, momentum=0.5, weight_decay=0.2)
    update = Quadratic().fit(local_task(One(1.0), settings=settings))
    # Step 1: g = 1 + 0.2 = 1.2, v = 1.2, w = 1 - 0.6 = 0.4. Step 2: g = 0.4 + 0.08 = 0.48, v = 0.6 + 0.48, w = -0.14.
    assert update.state["w"].item() == pytest.approx(-0.14, abs=1e-7)
    assert update.metrics["loss"] == pytest.approx(0.4**2 / 2, abs=1e-7)  # of the last epoch, before its step


class Recorder(LocalCorrection, ActiveCorrection):
    """Notes the calls and takes a constant off each gradient and weight."""

    wants_full_gradient = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, task: LocalTask) -> ActiveCorrection:
        self.calls.append(f"begin at {float(task.model.w.detach()):g}")
        return self

    def take_full_gradient(self, gradient: Mapping[str, Tensor]) -> None:
        self.calls.append(f"full gradient {float(gradient['w']):g}")

    def after_backward(self, model: nn.Module) -> None:
        self.calls.append(f"gradient {float(model.w.grad):g}")
        model.w.grad.sub_(0.5)

    def after_step(self, model: nn.Module, learning_rate: float) -> None:
        self.calls.append(f"stepped to {float(model.w.detach()):g} by {learning_rate:g}")
        with torch.no_grad():
            model.w.add_(1)

    def finish(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self.calls.append(f"finish at {float(model.w.detach()):g}")
        return {"recorder/delta": torch.ones(1)}, {"kept": torch.zeros(1)}


def test_a_correction_is_called_around_every_step() -> None:
    recorder = Recorder()
    settings = epochs(2, batch_size=10, learning_rate=0.5, momentum=0.0, weight_decay=0.0)
    update = Quadratic().fit(local_task(One(1.0), settings=settings, correction=recorder))
    assert recorder.calls == [
        *("begin at 1", "full gradient 1"),
        *("gradient 1", "stepped to 0.75 by 0.5"),
        *("gradient 1.75", "stepped to 1.125 by 0.5"),
        "finish at 2.125",
    ]
    assert update.state["w"].item() == 2.125
    assert (list(update.extras), list(update.client_state)) == (["recorder/delta"], ["kept"])


def test_the_full_gradient_is_that_of_all_data_and_changes_nothing() -> None:
    clean, asking, settings = build_method("standard"), Asking(), dataclasses.replace(SETTINGS, batch_size=10)
    asked = clean.fit(local_task(TinyNet(norm=True), settings=settings, correction=asking))
    assert same_bits(asked.state, clean.fit(local_task(TinyNet(norm=True), settings=settings)).state)  # statistics, too

    net, data = TinyNet(norm=True).train(), tiny_data(count=10)
    order = torch.randperm(10, generator=generator(0, "full gradient batches", round=1))
    with fast_passes(net, data.x):  # the loop's order and layout: statistics of a batch are summed in float32
        loss = nn.functional.cross_entropy(net(data.x[order]), data.y[order])
        gradients = torch.autograd.grad(loss, list(net.parameters()))
    for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
        assert torch.allclose(asking.gradients[0][name], gradient + settings.weight_decay * parameter, atol=1e-6)


def test_the_full_gradient_leaves_dropout_its_draws() -> None:
    def trained(**correction: LocalCorrection) -> Mapping[str, Tensor]:
        net = TinyNet()
        net.body.append(nn.Dropout())
        torch.manual_seed(0)
        state: Mapping[str, Tensor] = build_method("standard").fit(local_task(net, **correction)).state
        return state

    assert same_bits(trained(), trained(correction=Asking()))


def test_the_full_gradient_is_of_what_is_trained_whether_or_not_the_loss_reaches_it() -> None:
    class Parts(One):
        def __init__(self) -> None:
            super().__init__(1.0)
            self.unused = nn.Parameter(torch.tensor([2.0]))
            self.frozen = nn.Parameter(torch.tensor([3.0]), requires_grad=False)

    class Of(Quadratic):
        def train_loss(self, batch: TrainBatch) -> Tensor:
            assert all(parameter.grad is None for parameter in batch.model.parameters())
            return batch.model.w.square().sum() / 2  # type: ignore[operator,union-attr]

    settings, asking = epochs(1, momentum=0.0, weight_decay=0.5), Asking()
    update = Of().fit(local_task(Parts(), settings=settings, correction=asking))
    assert {name: float(value) for name, value in asking.gradients[0].items()} == {"w": 1.5, "unused": 1.0}
    assert (update.state["unused"].item(), update.state["frozen"].item()) == (2.0, 3.0)  # no gradient, no decay


def test_a_methods_own_step_is_taken_in_training_and_in_the_full_gradient() -> None:
    """What ``backward`` leaves in the parameters, not the gradient of ``train_loss``."""
    asking = Asking()

    class Doubled(AdversarialTrainer):
        attacks = False

        def train_loss(self, batch: TrainBatch) -> Tensor:
            return batch.loss.cross_entropy(batch.logits_nat, batch.y).mean()

        def backward(self, batch: TrainBatch) -> Tensor:
            assert all(parameter.grad is None for parameter in batch.model.parameters())
            super().backward(batch)
            for parameter in batch.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(2)
            return torch.tensor(7.0)

    settings = dataclasses.replace(SETTINGS, batch_size=10, momentum=0.0, weight_decay=0.0)
    start, moved = TinyNet().state_dict(), []
    for method in (build_method("standard"), Doubled(None, build_modifier("plain"))):
        update = method.fit(local_task(settings=settings, correction=asking))
        moved.append({name: tensor - start[name] for name, tensor in update.state.items()})
    assert update.metrics["loss"] == 7.0
    for name in start:
        assert torch.equal(asking.gradients[1][name], 2 * asking.gradients[0][name])
        assert torch.allclose(moved[1][name], 2 * moved[0][name], atol=1e-6)


# --- what comes out ---------------------------------------------------------------------------------------------------


def test_the_loss_is_a_mean_over_examples_and_progress_is_reported_batch_by_batch() -> None:
    told: list[BatchProgress] = []

    class Constant(Quadratic):
        """Its loss is the number of examples in the batch."""

        def train_loss(self, batch: TrainBatch) -> Tensor:
            return super().train_loss(batch) * 0 + len(batch.y)

    task = dataclasses.replace(local_task(One(1.0), settings=epochs(2), client=3), on_batch=told.append)
    update = Constant().fit(task)
    mean = (4 * 4 + 4 * 4 + 2 * 2) / 10
    assert update.metrics == {"passes": 0.0, "loss": pytest.approx(mean)}
    assert [(progress.client, progress.batch, progress.num_batches) for progress in told] == [
        (3, batch, 6) for batch in range(1, 7)
    ]
    assert [progress.loss for progress in told] == pytest.approx([4, 4, mean] * 2)


def test_on_a_gpu_the_loss_is_looked_at_in_every_tenth_batch_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look makes the GPU wait; there is none here, so its tensors are kept on the CPU."""
    told: list[BatchProgress] = []
    zeros = SimpleNamespace(zeros=lambda *shape, dtype, device: torch.zeros(*shape, dtype=dtype), float64=torch.float64)
    monkeypatch.setattr(watching, "torch", zeros)
    task: Any = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        data=tiny_data(count=23),
        model=One(1.0),
        settings=epochs(2, batch_size=1),
        client=3,
        on_batch=told.append,
    )
    meter = LossMeter(task, 46)
    for epoch in range(2):
        meter.begin_epoch(epoch, len(batch_bounds(len(task.data), task.settings.batch_size)))
        for batch in range(23):
            meter.add(torch.tensor(float(batch)), 1)
    assert [(progress.batch, progress.loss) for progress in told] == [
        *((10, 4.5), (20, 9.5), (23, 11.0)),
        *((33, 4.5), (43, 9.5), (46, 11.0)),
    ]


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_training_at_once(lost: float, snapshot: TextSnapshot) -> None:
    batches = 0

    class Diverging(Quadratic):
        def train_loss(self, batch: TrainBatch) -> Tensor:
            nonlocal batches
            batches += 1
            return super().train_loss(batch) * (lost if batches == 5 else 1.0)

    with pytest.raises(UpdateError) as raised:
        Diverging().fit(local_task(One(1.0), settings=epochs(2), client=3, round=7))
    assert batches == 5
    snapshot(str(raised.value))


def test_the_mean_loss_is_summed_in_double_precision() -> None:
    """Single precision would lose the second batch."""
    meter = LossMeter(local_task(TinyNet()), 1)
    for value in (1.0, 1e-9):
        meter.add(torch.tensor(value), 16)
    assert meter.mean() == pytest.approx(0.5 + 0.5e-9, rel=1e-13)
