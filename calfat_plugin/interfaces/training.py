"""The interfaces of local training: trainers, loss modifiers, and an aggregator's part of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from calfat_plugin.interfaces.inner import InnerAttack
from calfat_plugin.results import LocalUpdate, State

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from calfat_plugin.datasets import Augmentation, ImageData
    from calfat_plugin.maths.graphs import Graphs
    from calfat_plugin.maths.precision import Precision
    from calfat_plugin.observer import BatchProgress
    from calfat_plugin.threat import ThreatModel


@dataclass(frozen=True)
class TrainSettings:
    """The host's training settings that a local trainer needs in one round.

    Attributes:
        epochs: local epochs a round, >= 1.
        batch_size: examples a mini-batch, >= 1.
        learning_rate: of the round, > 0; the recipe's schedule is in it.
        momentum: SGD momentum in [0, 1); its buffer starts at zero every round.
        weight_decay: L2 coefficient, >= 0; of ``adamw`` the decay of the weights themselves.
        num_rounds: rounds of the whole run.
        local_steps: mini-batches a round, >= 1, in place of ``epochs``; None: go by epochs.
        client_optimizer: ``sgd``, ``adam`` or ``adamw``.
        nesterov: whether SGD's momentum has Nesterov's form.
        max_grad_norm: L2 norm over all parameters to which a step's gradient is clipped, > 0; None: it is not.
        has_schedule: whether the learning rate differs from round to round.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float
    num_rounds: int
    local_steps: int | None = None
    client_optimizer: str = "sgd"
    nesterov: bool = False
    max_grad_norm: float | None = None
    has_schedule: bool = False


@dataclass(frozen=True)
class LocalTask:
    """One client's work in one round.

    Attributes:
        model: on ``device``, holding the global weights (and the client's own ``personal`` tensors). The trainer may
            change it as it likes. While ``trainers.loop`` trains, its convolutions are channels last in memory.
        data: this client's training examples, pixels in [0, 1] or uint8.
        class_counts: (C,) int64 counts of this client's labels. They never leave the client.
        threat: the budget to train against; its steps are those that ``inner`` takes.
        settings: epochs, batch size, optimiser.
        augment: the data set's augmentation.
        device: where to compute.
        seed: the run's seed; derive every stream from (seed, purpose, round, client).
        round: 1-based round number.
        client: 0-based client id.
        client_state: what this client handed back in its previous round; empty at first.
        broadcast: extras from the server, under namespaced names; empty at first.
        correction: the aggregator's part of local training.
        inner: how to find the images to train on.
        personal: names of the model's tensors that stay with this client (``LocalTrainer.personal_names``). The model
            holds this client's own, and an aggregator's correction leaves them alone.
        precision: arithmetic of the model's passes.
        graphs: what captured CUDA graphs of the run share; None: there are none.
        on_batch: called after each mini-batch.
    """

    model: nn.Module
    data: ImageData
    class_counts: Tensor
    threat: ThreatModel
    settings: TrainSettings
    augment: Augmentation
    device: torch.device
    seed: int
    round: int
    client: int
    client_state: State = field(default_factory=dict)
    broadcast: State = field(default_factory=dict)
    correction: LocalCorrection = field(default_factory=lambda: LocalCorrection())
    inner: InnerAttack = field(default_factory=InnerAttack)
    personal: frozenset[str] = frozenset()
    precision: Precision = "fp32"
    graphs: Graphs | None = None
    on_batch: Callable[[BatchProgress], None] = lambda progress: None

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """The model's trainable parameters that are not personal, by name: what aggregators work on."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and name not in self.personal
        }

    def frozen_copy(self) -> nn.Module:
        """A copy of ``model`` as it is now, in evaluation mode and without gradients: a teacher.

        In ``begin_round`` that is the global model, and laid out in memory as fast as the model itself.
        """
        from copy import deepcopy

        return deepcopy(self.model).eval().requires_grad_(False)


@dataclass(frozen=True)
class RoundEnd:
    """What a method hands back after a client's last step of a round.

    Attributes:
        state: what the client keeps for its next round, tensors by name; it comes back as ``LocalTask.client_state``
            and never leaves the client.
        metrics: numbers for the record, under names that the entry declares; averaged over clients by examples.
        extras: what the method's ``broadcast`` reads on the server, under namespaced names (``my-fat/margin``).
    """

    state: State = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: State = field(default_factory=dict)


class LocalTrainer(ABC):
    """Trains a client's copy of the global model for one round."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Change the architecture where the method needs it (dual normalisation, cosine classifier).

        Called once a process, before any weights are loaded, with torch's generator seeded for initial weights.

        Args:
            model: as the recipe builds it; may be changed in place.

        Returns:
            The model to train.
        """
        return model

    @abstractmethod
    def fit(self, task: LocalTask) -> LocalUpdate:
        """Train ``task.model`` on ``task.data`` and return the update.

        Args:
            task: the client's work.

        Raises:
            UpdateError: when the training left the finite numbers.
        """

    def personal_names(self, model: nn.Module) -> frozenset[str]:
        """Names in ``model``'s state dict that every client keeps for itself from round to round.

        The runtime stores and restores them per client. Clients send them along with the rest, and
        ``evaluated_personal`` makes from them what the global model is evaluated with.
        """
        return frozenset()

    def evaluated_personal(self, updates: Mapping[int, LocalUpdate], names: Sequence[str]) -> dict[str, Tensor]:
        """Server side: the personal tensors ``names`` of the model that is evaluated; default: their uniform mean.

        Args:
            updates: client id to update, of the round just finished.
            names: the personal names, never empty.
        """
        from calfat_plugin.maths.averaging import weighted_average

        states = [{name: update.state[name] for name in names} for update in updates.values()]
        return weighted_average(states, [1.0] * len(states))

    def among(self, others: Mapping[int, LocalTrainer]) -> LocalTrainer:
        """Server side: the trainer that the server of a run with groups of clients uses; default: this one.

        Args:
            others: client id to its trainer, of the clients in a group.
        """
        return self

    def broadcast(self, updates: Mapping[int, LocalUpdate]) -> dict[str, Tensor]:
        """Server side: extras of the method (not of the aggregator) to send with the next global model.

        Args:
            updates: client id to update, of the round just finished.
        """
        return {}


class LossModifier(ABC):
    """A change to the logits and the classification loss that composes with many methods."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Change the architecture where the modifier needs it; ``model`` as in ``LocalTrainer.adapt_model``."""
        return model

    @abstractmethod
    def bind(self, class_counts: Tensor) -> ClientLoss:
        """Return the losses of a client whose training labels have these counts.

        Args:
            class_counts: (C,) int64, on the device of the logits to come.
        """


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
        from calfat_plugin.maths.losses import cross_entropy

        return cross_entropy(logits, y, reduction="none")


class LocalCorrection:
    """An aggregator's part of local training; this one does nothing. ``begin`` returns the working object."""

    def begin(self, task: LocalTask) -> ActiveCorrection:
        """Called when ``task.model`` holds the global weights, before the first step.

        Args:
            task: the client's work.
        """
        return ActiveCorrection()


class ActiveCorrection:
    """One client's correction during one round of local training; this one does nothing.

    Attributes:
        wants_full_gradient: whether the loop calls ``take_full_gradient`` once, before the first step.
        needs_sgd: whether it holds for the recipe's SGD and unclipped gradients only.
    """

    wants_full_gradient: bool = False
    needs_sgd: ClassVar[bool] = False

    def take_full_gradient(self, gradient: Mapping[str, Tensor]) -> None:
        """Receive the gradient of the client's whole local loss (attack included) at the weights it starts from.

        Args:
            gradient: name of each trainable parameter to d(loss)/d(parameter), weight decay included.
        """

    def after_backward(self, model: nn.Module) -> None:
        """Change ``parameter.grad`` before the optimiser steps (FedProx adds ``mu (theta - theta_t)``);
        it is clipped after that.

        Args:
            model: the client's, with the gradients of this step.
        """

    def after_step(self, model: nn.Module, learning_rate: float) -> None:
        """Change parameters after the optimiser stepped (SCAFFOLD).

        Args:
            model: the client's.
            learning_rate: of the step, > 0.
        """

    def finish(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return (extras for the server, this client's new state).

        Args:
            model: the client's, after the last step.
        """
        return {}, {}
