"""The base of every built-in method: a method says its two losses, the loop does the rest."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from calfat_plugin.interfaces import ClientLoss, LocalTask, LocalTrainer, LossModifier
from calfat_plugin.options import option

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from calfat_plugin.results import LocalUpdate

# The columns of table 6.3 (docs/methods.md), and beyond the paper three more that follow its LogitAdj column.
ALL_MODIFIERS = ("plain", "logitadj", "robal", "calibrated", "fedlc", "gear", "fedrs")


def start_noise_option() -> Any:
    """The option of methods whose attack starts at x plus Gaussian noise."""
    return option(
        1e-3,
        low=0,
        open_low=True,
        help="standard deviation of the attack's Gaussian start; at x itself a divergence has no gradient",
        unit="fraction of the pixel range",
    )


class AttackBatch:
    """What the inner maximisation may look at. The model is in evaluation mode.

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


class AdversarialTrainer(LocalTrainer):
    """A method is two losses and named constants; subclasses are final and keep no state.

    A subclass overrides :meth:`train_loss`, and :meth:`attack_loss` with :meth:`start` where it attacks. It never
    touches devices, layouts, batch splitting, optimisers or modes: those belong to ``trainers.loop``.

    Attributes:
        options: an instance of the entry's options.
        modifier: the loss modifier that the recipe composes with the method.
    """

    attacks: ClassVar[bool] = True  # False: x_adv is x_nat and attack_loss is never called
    counts_iterates: ClassVar[bool] = False  # True: TrainBatch.kappa is filled

    def __init__(self, options: Any, modifier: LossModifier) -> None:
        self.options = options
        self.modifier = modifier

    def adapt_model(self, model: nn.Module) -> nn.Module:
        return self.modifier.adapt_model(model)

    def bind_loss(self, class_counts: Tensor) -> ClientLoss:
        """The client's loss operators; ``class_counts``: (C,) on the training device."""
        return self.modifier.bind(class_counts)

    def attacked_rows(self, index: Tensor, task: LocalTask, generator: Generator) -> Tensor | None:
        """Which rows of a batch to attack: (N,) bool, or None for all.

        Args:
            index: (N,) positions of the batch's examples in ``task.data``.
            task: the client's work.
            generator: source of random choices that are new for every batch.
        """
        return None

    def start(self, x_nat: Tensor, task: LocalTask, generator: Generator) -> Tensor:
        """First iterate of the attack; default: uniform in the ball."""
        return task.threat.random_start(x_nat, generator)

    def attack_loss(self, batch: AttackBatch) -> Tensor:
        """The scalar that the inner maximisation climbs, summed over the batch; default: cross-entropy of x_adv."""
        from calfat_plugin.maths.losses import cross_entropy

        return cross_entropy(batch.loss.attack_logits(batch.logits_adv), batch.y, reduction="sum")

    @abstractmethod
    def train_loss(self, batch: TrainBatch) -> Tensor:
        """The scalar that the outer step minimises, a mean over the batch."""

    def fit(self, task: LocalTask) -> LocalUpdate:
        """Train for one round; see ``trainers.loop.train_locally``."""
        from calfat_plugin.trainers.loop import train_locally  # here: listing methods must not import torch

        return train_locally(self, task)
