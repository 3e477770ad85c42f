"""The running means of a client's training, and the check that its loss stays finite."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from calfat_plugin.errors import UpdateError
from calfat_plugin.interfaces import LocalTask
from calfat_plugin.observer import BatchProgress

_REPORT_EVERY = 10  # batches between looks at the loss on a GPU, which each look makes wait


class LossMeter:
    """Running means of one epoch, or of a round of local steps; looks at the sums on the device now and then."""

    def __init__(self, task: LocalTask, in_round: int) -> None:
        """in_round: how many batches the round has."""
        self.task, self.in_round, self.done = task, in_round, 0
        self.begin_epoch(0, in_round)

    def begin_epoch(self, epoch: int, in_epoch: int) -> None:
        """epoch: counted from 0; in_epoch: how many batches it has."""
        self.epoch, self.in_epoch, self.batches = epoch, in_epoch, 0
        if epoch == 0 or self.task.settings.local_steps is None:
            self.total = torch.zeros((), dtype=torch.float64, device=self.task.device)
            self.recorded: dict[str, Tensor] = {}
            self.examples = 0

    def add(self, loss: Tensor, count: int, recorded: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        self.total += loss.double() * count
        for name, mean in recorded.items():
            self.recorded[name] = self.recorded.get(name, 0) + mean.double() * count
        self.examples += count
        self.batches += 1
        self.done += 1
        every = 1 if self.task.device.type == "cpu" else _REPORT_EVERY
        if self.batches % every == 0 or self.batches == self.in_epoch:
            self.task.on_batch(BatchProgress(self.task.client, self.done, self.in_round, self.mean()))

    def means(self) -> dict[str, float]:
        """The mean loss per example, and those of all that was recorded.

        Raises:
            UpdateError: when the loss is not finite.
        """
        return {**{name: float(total) / self.examples for name, total in self.recorded.items()}, "loss": self.mean()}

    def mean(self) -> float:
        """Mean loss per example so far.

        Raises:
            UpdateError: when it is not finite.
        """
        mean = float(self.total) / max(1, self.examples)
        if mean != mean or abs(mean) == float("inf"):
            raise UpdateError(
                f"client {self.task.client}, round {self.task.round}, epoch {self.epoch + 1}: the training loss is "
                f"{mean} by batch {self.batches} of {self.in_epoch}. Lower train_args.learning_rate "
                f"(now {self.task.settings.learning_rate:g}) or the scale of the loss."
            )
        return mean
