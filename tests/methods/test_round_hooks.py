"""The hooks of a client's round: their order, what they see, and what becomes of what they return."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from calfat_plugin import AdversarialTrainer, ImageClassifier, RoundEnd, TrainerEntry
from calfat_plugin.interfaces import ActiveCorrection, LocalCorrection, LocalTask, TrainBatch
from tests.methods.helpers import (
    SETTINGS,
    Federation,
    TinyNet,
    build_modifier,
    experiment,
    local_task,
    same_bits,
    tiny_data,
)


class Plain(AdversarialTrainer):
    """FedPGD, and a diary of its hooks."""

    def __init__(self, options: Any = None, modifier: Any = None) -> None:
        super().__init__(options, modifier or build_modifier("plain"))
        self.calls: list[Any] = []

    def begin_round(self, task: LocalTask) -> Any:
        self.calls.append(("begin", {name: tensor.tolist() for name, tensor in task.client_state.items()}))
        return task.frozen_copy()

    def make_optimizer(self, parameters: Any, task: LocalTask) -> Any:
        self.calls.append("optimizer")
        return super().make_optimizer(parameters, task)

    def make_schedule(self, optimizer: Any, task: LocalTask, num_batches: int) -> Any:
        self.calls.append(("schedule", num_batches))
        return super().make_schedule(optimizer, task, num_batches)

    def attack_loss(self, batch: Any) -> Tensor:
        self.calls.append(("attack", batch.context.training))
        return super().attack_loss(batch)

    def train_loss(self, batch: TrainBatch) -> Tensor:
        self.calls.append(("train", batch.context.training, batch.index.tolist()))
        return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()

    def end_round(self, task: LocalTask, context: Any) -> RoundEnd:
        self.calls.append("end")
        return RoundEnd({"seen": torch.arange(2)}, extras={"plain/x": torch.zeros(1)})


def test_the_hooks_are_called_in_this_order_and_see_the_context() -> None:
    method, settings = Plain(), dataclasses.replace(SETTINGS, epochs=2)
    kept = {"method/seen": torch.ones(2), "scaffold/c/x": torch.zeros(1)}
    update = method.fit(local_task(settings=settings, client_state=kept))
    batch = [*[("attack", False)] * 3, "train"]  # ten examples in batches of four
    calls = [call[0] if isinstance(call, tuple) and call[0] == "train" else call for call in method.calls]
    first = [("begin", {"seen": [1.0, 1.0]}), "optimizer", ("schedule", 6)]
    assert calls == [*first, *batch * 6, "end"]
    rows = [call[2] for call in method.calls if call[0] == "train"]
    for epoch in (rows[:3], rows[3:]):
        assert sorted(index for batch in epoch for index in batch) == list(range(10))
    assert {name: tensor.tolist() for name, tensor in update.client_state.items()} == {"method/seen": [0, 1]}
    assert list(update.extras) == ["plain/x"]


def test_the_frozen_copy_is_the_global_model_and_stays_it() -> None:
    model = TinyNet()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[Mapping[str, Tensor]] = []

    class Watching(Plain):
        def end_round(self, task: LocalTask, context: Any) -> RoundEnd:
            assert not any(parameter.requires_grad for parameter in context.parameters())
            seen.append(context.state_dict())
            return RoundEnd()

    update = Watching().fit(local_task(model))
    assert same_bits(seen[0], before)
    assert not same_bits(update.state, before)


def test_what_is_kept_is_a_copy() -> None:
    """The worker's one model goes to the next client."""

    class Keeping(Plain):
        def end_round(self, task: LocalTask, context: Any) -> RoundEnd:
            return RoundEnd(state=task.model.state_dict())

    model = TinyNet()
    update = Keeping().fit(local_task(model))
    with torch.no_grad():
        model.classifier.weight.zero_()  # type: ignore[union-attr, operator]
    assert bool(update.client_state["method/classifier.weight"].any())


def test_several_steps_a_batch_see_the_weights_between_them() -> None:
    class Twice(Plain):
        def take_steps(self, batch: TrainBatch, step: Any) -> Tensor:
            step(batch)
            again = batch.again()
            with torch.no_grad():
                assert torch.equal(again.logits_adv, batch.model(batch.x_adv))
                assert not torch.equal(again.logits_adv, batch.logits_adv)
            result: Tensor = step(batch.again())
            return result

    class Counting(ActiveCorrection):
        rates: list[float] = []  # noqa: RUF012

        def after_step(self, model: Any, learning_rate: float) -> None:
            self.rates.append(learning_rate)

    class Correction(LocalCorrection):
        def begin(self, task: LocalTask) -> ActiveCorrection:
            return Counting()

    Twice().fit(local_task(correction=Correction()))
    assert Counting.rates == [SETTINGS.learning_rate] * 6  # two steps for each of three batches


def test_a_schedule_is_stepped_after_each_batch() -> None:
    rates: list[float] = []

    class Halving(Plain):
        def make_schedule(self, optimizer: Any, task: LocalTask, num_batches: int) -> Any:
            self.optimizer = optimizer
            return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def train_loss(self, batch: TrainBatch) -> Tensor:
            rates.append(self.optimizer.param_groups[0]["lr"])
            return super().train_loss(batch)

    Halving().fit(local_task())
    assert rates == [0.1, 0.05, 0.025]


def test_features_and_logits_come_from_one_pass() -> None:
    net = TinyNet()
    model = ImageClassifier(net.body, net.classifier)  # type: ignore[arg-type]
    passes: list[int] = []
    model.body.register_forward_hook(lambda module, inputs, output: passes.append(len(output)))
    x = tiny_data().x
    batch = TrainBatch(model, x, x.flip(0), tiny_data().y, None, local_task())  # type: ignore[arg-type]
    assert torch.equal(model.classifier(batch.features_adv), batch.logits_adv)
    assert torch.equal(batch.features_nat.flip(0), batch.features_adv)
    assert passes == [10, 10]
    assert not model.classifier._forward_pre_hooks


def test_what_is_recorded_is_the_mean_over_examples_of_the_last_epoch() -> None:
    class Recording(Plain):
        def train_loss(self, batch: TrainBatch) -> Tensor:
            batch.record("index", batch.index.double())
            batch.record("size", torch.tensor(float(len(batch.y))))
            if len(batch.y) == 2:
                batch.record("of the last batch", torch.tensor(3.0))
            return super().train_loss(batch)

    metrics = Recording().fit(local_task(settings=dataclasses.replace(SETTINGS, epochs=2))).metrics
    assert metrics["index"] == pytest.approx(4.5)
    assert metrics["size"] == pytest.approx((4 * 4 + 4 * 4 + 2 * 2) / 10)
    assert metrics["of the last batch"] == 3.0


def test_a_second_step_adds_to_what_the_first_recorded() -> None:
    x = tiny_data().x
    batch = TrainBatch(TinyNet(), x, x, tiny_data().y, None, local_task())  # type: ignore[arg-type]
    batch.record("first", torch.tensor([1.0, 3.0]))
    batch.again().record("second", torch.tensor(5.0))
    assert batch.recorded == {"first": torch.tensor(2.0), "second": torch.tensor(5.0)}


def test_clients_metrics_are_averaged_by_their_examples_and_others_are_left_aside() -> None:
    run = experiment("fedpgd")
    entry = TrainerEntry("fedpgd", build=run.trainer.entry.build, metrics={"margin": "of a test"})
    federation = Federation(dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, entry=entry)))
    state, number = federation.server.state, torch.tensor
    uploads = {
        0: (10, {**state, "metric/loss": number(1.0), "metric/margin": number(1.0)}),
        1: (30, {**state, "metric/loss": number(1.0), "metric/margin": number(2.0), "metric/other": number(9.0)}),
        2: (50, {**state, "metric/loss": number(1.0)}),
    }
    assert federation.server.finish_round(1, uploads).metrics == {"train/margin": 1.75}
