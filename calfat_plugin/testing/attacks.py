"""What the attack inside a training method must keep, where the attack is the loop's (``AdversarialTrainer``)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from calfat_plugin.interfaces import LocalTask
from calfat_plugin.maths.attacks import attack_mode
from calfat_plugin.testing.tiny import replaced, require
from calfat_plugin.trainers.base import AdversarialTrainer
from calfat_plugin.trainers.batches import TrainBatch


def check_attack(trainer: AdversarialTrainer, train: Callable[[], object], who: str) -> int:
    """Look at every batch that a method trains on; how many examples it trained on.

    Its examples lie inside the budget. The attack leaves the clean images, the model and the global random generators
    as they are; it moves its start, and its points cost the method's own training loss no less than random ones.

    Args:
        train: trains with it, on images that the model gets right: what leaves the model's answer leaves the label.
        who: the method, as messages name it.
    """
    watch = _Watch(who, trainer.start, trainer.backward, trainer.train_loss)
    with replaced(trainer, start=watch.started, backward=watch.stepped, train_loss=watch.lost):
        train()
    return watch.examples


class _Begun(NamedTuple):
    """What an attack began with."""

    x_nat: Tensor
    start: Tensor
    around: dict[str, object]


@dataclass
class _Watch:
    """Stands in front of a method's own hooks."""

    who: str
    start: Callable[[Tensor, LocalTask, torch.Generator], Tensor]
    backward: Callable[[TrainBatch], Tensor]
    train_loss: Callable[[TrainBatch], Tensor]
    examples: int = 0
    begun: _Begun | None = None

    def started(self, x_nat: Tensor, task: LocalTask, generator: torch.Generator) -> Tensor:
        x_clean, before = x_nat.clone(), around(task.model)
        found = self.start(x_nat, task, generator)
        self.begun = _Begun(x_clean, found.clone(), before)
        return found

    def lost(self, batch: TrainBatch) -> Tensor:
        batch.task.inner.reach(batch.task.threat).check(batch.x_adv, batch.x_nat, who=self.who)
        return self.train_loss(batch)

    def stepped(self, batch: TrainBatch) -> Tensor:
        begun, self.begun = self.begun, None
        if begun is not None:
            self._look(begun, batch)
        batch.task.inner.reach(batch.task.threat).check(batch.x_adv, batch.x_nat, who=self.who)
        self.examples += len(batch.y)
        return self.backward(batch)

    def _look(self, begun: _Begun, batch: TrainBatch) -> None:
        rows = torch.ones_like(batch.y, dtype=torch.bool) if batch.attacked is None else batch.attacked
        for what, state in around(batch.model).items():
            require(state == begun.around[what], f"{self.who}: the attack must leave {what} as it found them.")
        reach, start = batch.task.inner.reach(batch.task.threat), batch.x_nat.clone()
        start[rows] = reach.project(begun.start, begun.x_nat)
        moved = not torch.equal(start, batch.x_adv)
        require(moved, f"{self.who}: the attack must move its start; attack_loss has no gradient there.")
        anywhere = batch.x_nat.clone()
        anywhere[rows] = reach.random_start(begun.x_nat, torch.Generator().manual_seed(0))
        by_chance, found = self._loss_at(batch, anywhere), self._loss_at(batch, batch.x_adv)
        require(
            found >= by_chance,
            f"{self.who}: the attack must cost the training loss no less than random noise does in the budget: it "
            f"makes it {found:.3g}, noise {by_chance:.3g}. The loop climbs attack_loss: has a loss the wrong sign?",
        )

    def _loss_at(self, batch: TrainBatch, x_adv: Tensor) -> float:
        """The training loss of these adversarial examples, (N, C, H, W), as the attack sees the model."""
        nat, y, loss, task = batch.x_nat, batch.y, batch.loss, batch.task
        there = TrainBatch(
            batch.model, nat, x_adv, y, loss, task, batch.attacked, batch.kappa, batch.context, batch.index
        )
        with attack_mode(batch.model), torch.no_grad():
            return float(self.train_loss(there))


def around(model: nn.Module) -> dict[str, object]:
    """What an attack must leave as it is, by what messages call it."""
    numpy_state = np.random.get_state(legacy=False)["state"]
    return {
        "the model's tensors": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "the global random generators": (
            random.getstate(),
            numpy_state["key"].tolist(),
            numpy_state["pos"],
            torch.get_rng_state().tolist(),
        ),
    }
