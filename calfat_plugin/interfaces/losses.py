"""The losses of training: a client's operators on logits, what modifies them, and what an attack sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from calfat_plugin.maths.attacks import gradient_ascent, input_gradient
from calfat_plugin.maths.losses import cross_entropy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from calfat_plugin.datasets.batches import Examples
    from calfat_plugin.threat import ThreatModel


class ClientLoss:
    """The operators of table 6.3 of ``docs/methods.md`` for one client; plain ones unless overridden.

    ``logits`` go in and out as (N, C) float; no method changes its input in place. ``y``: (N,) int64 labels.
    """

    def attack_logits(self, logits: Tensor) -> Tensor:
        """Logits that the inner maximisation sees."""
        return logits

    def kl_logits(self, logits: Tensor) -> Tensor:
        """Logits inside an outer KL term between clean and adversarial predictions."""
        return logits

    def margin_logits(self, logits: Tensor) -> Tensor:
        """Logits inside an outer probability-margin term (MART)."""
        return logits

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """The outer classification loss per example: (N,)."""
        return cross_entropy(logits, y, reduction="none")


class LossModifier(ABC):
    """A change to the logits and the classification loss that composes with many methods.

    Attributes:
        options: an instance of the entry's options.
    """

    def __init__(self, options: Any = None) -> None:
        self.options = options

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Change the architecture where the modifier needs it; ``model`` as in ``LocalTrainer.adapt_model``."""
        return model

    @abstractmethod
    def bind(self, class_counts: Tensor) -> ClientLoss:
        """Return the losses of a client whose training labels have these counts.

        Args:
            class_counts: (C,) int64, on the device of the logits to come.
        """


class AttackBatch:
    """What the inner maximisation may look at: some examples of a mini-batch. The model is in evaluation mode.

    An attack's loss is a sum over examples, so the mini-batch may be cut: each part takes all its steps as a batch of
    its own, with N the examples of the part.

    Attributes:
        model: the client's model.
        x_nat: (N, C, H, W) clean images, float32 in [0, 1].
        y: (N,) labels.
        loss: the client's loss operators.
        context: what the method's ``begin_round`` returned.
        logits_adv: (N, C) logits of the running x_adv, with gradient; set anew for each step.
    """

    logits_adv: Tensor

    def __init__(self, model: nn.Module, x_nat: Tensor, y: Tensor, loss: ClientLoss, context: Any = None) -> None:
        self.model = model
        self.x_nat = x_nat
        self.y = y
        self.loss = loss
        self.context = context

    @cached_property
    def logits_nat(self) -> Tensor:
        """(N, C) clean logits without gradient: constant in x_adv, so computed once."""
        import torch

        with torch.no_grad():
            logits: Tensor = self.model(self.x_nat)
        return logits


@dataclass(frozen=True)
class InnerTask:
    """The inner maximisation over some images of a mini-batch, as an attack sees it.

    Attributes:
        model: (N, C, H, W) to logits, the client's model in evaluation mode.
        x_nat: (N, C, H, W) clean images in [0, 1]; never to be changed.
        start: first iterate, shape of x_nat; it may lie outside the budget.
        loss: logits of an iterate to the scalar to climb, the method's: a sum over the images, in which none depends on
            another. Its calls are counted as the attack's iterates, so it is called once a step.
        threat: the budget.
        passes: makes the context that sets the arithmetic of the model's passes.
        memory: what the attack's ``begin_round`` returned.
        examples: which of the client's examples the images are, for an attack that remembers something of each.
        drawn: of these images, what the attack's ``draw`` returned.
    """

    model: Callable[[Tensor], Tensor]
    x_nat: Tensor
    start: Tensor
    loss: Callable[[Tensor], Tensor]
    threat: ThreatModel
    passes: Callable[[], AbstractContextManager[object]] = nullcontext
    memory: Any = None
    examples: Examples | None = None
    drawn: Tensor | None = None

    def climb(self, *, steps: int, step_size: float, within: ThreatModel | None = None) -> Tensor:
        """The end of projected steps from ``start``; see ``maths.attacks.gradient_ascent``.

        Args:
            steps: how many.
            step_size: length of each, a fraction of the pixel range.
            within: what they are projected on; None: the budget.
        """
        if within is None:
            within = self.threat
        return gradient_ascent(
            self.model,
            self.x_nat,
            self.loss,
            threat=within,
            steps=steps,
            step_size=step_size,
            start=self.start,
            passes=self.passes,
        )

    def gradient(self, x_adv: Tensor) -> Tensor:
        """The loss's gradient at these images, shape of x_adv, in float32: a step of an attack with its own loop.

        Args:
            x_adv: shape of x_nat, without gradient.
        """
        import torch  # here, not above: recipes are checked without torch

        x_adv = x_adv.detach().requires_grad_()
        with torch.enable_grad():
            return input_gradient(self.loss(self.model(x_adv)), x_adv)
