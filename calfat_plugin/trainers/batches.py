"""What a method sees of a mini-batch: ``AttackBatch`` while it attacks, ``TrainBatch`` while it trains."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from calfat_plugin.interfaces import ClientLoss, LocalTask


class AttackBatch:
    """What the inner maximisation may look at: some examples of a mini-batch. The model is in evaluation mode.

    An attack's loss is a sum over examples, so the mini-batch may be cut: each part takes all its steps as a batch of
    its own, with N the examples of the part.

    Attributes:
        model: the client's model.
        x_nat: (N, C, H, W) clean images, float32 in [0, 1].
        y: (N,) labels.
        loss: the client's loss operators.
        logits_adv: (N, C) logits of the running x_adv, with gradient; set anew for each step.
    """

    logits_adv: Tensor

    def __init__(self, model: nn.Module, x_nat: Tensor, y: Tensor, loss: ClientLoss) -> None:
        self.model, self.x_nat, self.y, self.loss = model, x_nat, y, loss

    @cached_property
    def logits_nat(self) -> Tensor:
        """(N, C) clean logits without gradient: constant in x_adv, so computed once."""
        import torch

        with torch.no_grad():
            logits: Tensor = self.model(self.x_nat)
        return logits


class TrainBatch:
    """What the outer minimisation may look at. The model is in training mode.

    Attributes:
        model: the client's model.
        x_nat: (N, C, H, W) clean images, float32 in [0, 1].
        x_adv: the same images after the attack; rows outside ``attacked`` are clean.
        y: (N,) labels.
        loss: the client's loss operators.
        attacked: (N,) bool, rows that were attacked; None: all of them.
        kappa: (N,) how many iterates of the attack were classified correctly, for methods that set
            ``counts_iterates``; else None.
        task: the client's work this round, for round numbers and the like.
    """

    def __init__(
        self,
        model: nn.Module,
        x_nat: Tensor,
        x_adv: Tensor,
        y: Tensor,
        loss: ClientLoss,
        task: LocalTask,
        attacked: Tensor | None = None,
        kappa: Tensor | None = None,
    ) -> None:
        self.model, self.x_nat, self.x_adv, self.y, self.loss = model, x_nat, x_adv, y, loss
        self.task, self.attacked, self.kappa = task, attacked, kappa

    @cached_property
    def logits_nat(self) -> Tensor:
        """(N, C) logits of the clean images, with gradient; the forward pass happens on first use."""
        logits: Tensor = self.model(self.x_nat)
        return logits

    @cached_property
    def logits_adv(self) -> Tensor:
        """(N, C) logits of x_adv, with gradient; the forward pass happens on first use."""
        logits: Tensor = self.model(self.x_adv)
        return logits
