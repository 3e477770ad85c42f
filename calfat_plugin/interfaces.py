"""What a local trainer, a loss modifier, an aggregator and an evaluator must provide.

All of them are stateless: one object may serve every client and every round. What a client or the server keeps
between rounds is a flat mapping from name to tensor that is handed in and handed back, so that the runtime can store,
send and checkpoint it. Derive from a class below, or from its built-in child that does most of the work
(``trainers.base.AdversarialTrainer``, ``evaluators.base.AttackEvaluator``).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from calfat_plugin.results import LocalUpdate
from calfat_plugin.results import State as State

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from calfat_plugin.datasets import Augmentation, ImageData
    from calfat_plugin.maths.graphs import Caller, Graphs
    from calfat_plugin.maths.precision import Precision
    from calfat_plugin.observer import BatchProgress
    from calfat_plugin.results import EvaluationResult
    from calfat_plugin.threat import ThreatModel


@dataclass(frozen=True)
class TrainSettings:
    """The host's training settings that a local trainer needs.

    Attributes:
        epochs: local epochs a round, >= 1.
        batch_size: examples a mini-batch, >= 1.
        learning_rate: constant learning rate of SGD, > 0.
        momentum: SGD momentum in [0, 1); its buffer starts at zero every round.
        weight_decay: L2 coefficient, >= 0.
        num_rounds: rounds of the whole run.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float
    num_rounds: int


@dataclass(frozen=True)
class LocalTask:
    """One client's work in one round.

    Attributes:
        model: on ``device``, holding the global weights (and the client's own ``personal`` tensors). The trainer may
            change it as it likes. While ``trainers.loop`` trains, its convolutions are channels last in memory.
        data: this client's training examples, pixels in [0, 1] or uint8.
        class_counts: (C,) int64 counts of this client's labels. They never leave the client.
        threat: the budget to train against.
        settings: epochs, batch size, optimiser.
        augment: the data set's augmentation.
        device: where to compute.
        seed: the run's seed; derive every stream from (seed, purpose, round, client).
        round: 1-based round number.
        client: 0-based client id.
        client_state: what this client handed back in its previous round; empty at first.
        broadcast: extras from the server, under namespaced names; empty at first.
        correction: the aggregator's part of local training.
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


class LocalTrainer(ABC):
    """Trains a client's copy of the global model for one round."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Change the architecture where the method needs it (dual normalisation, cosine classifier).

        Called once a process, before any weights are loaded, with torch's generator seeded for initial weights.
        """
        return model

    @abstractmethod
    def fit(self, task: LocalTask) -> LocalUpdate:
        """Train ``task.model`` on ``task.data`` and return the update.

        Raises:
            UpdateError: when the training left the finite numbers.
        """

    def personal_names(self, model: nn.Module) -> frozenset[str]:
        """Names in ``model``'s state dict that every client keeps for itself from round to round.

        The runtime stores and restores them per client. Clients send them along with the rest, and
        :meth:`evaluated_personal` makes from them what the global model is evaluated with.
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

    def broadcast(self, updates: Mapping[int, LocalUpdate]) -> dict[str, Tensor]:
        """Server side: extras of the method (not of the aggregator) to send with the next global model.

        Args:
            updates: client id to update, of the round just finished.
        """
        return {}


class LossModifier(ABC):
    """A change to the logits and the classification loss that composes with many methods."""

    def adapt_model(self, model: nn.Module) -> nn.Module:
        """Change the architecture where the modifier needs it. Called like ``LocalTrainer.adapt_model``."""
        return model

    @abstractmethod
    def bind(self, class_counts: Tensor) -> ClientLoss:
        """Return the losses of a client whose training labels have these counts.

        Args:
            class_counts: (C,) int64, on the device of the logits to come.
        """


class ClientLoss:
    """The operators of table 6.3 of ``docs/methods.md`` for one client; plain ones unless overridden.

    Logits go in and out as (N, C) float; no method changes its input in place.
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
        """Called when ``task.model`` holds the global weights, before the first step."""
        return ActiveCorrection()


class ActiveCorrection:
    """One client's correction during one round of local training; this one does nothing."""

    wants_full_gradient: bool = False  # True: the loop calls take_full_gradient once, before the first step

    def take_full_gradient(self, gradient: Mapping[str, Tensor]) -> None:
        """Receive the gradient of the client's whole local loss (attack included) at the weights it starts from.

        Args:
            gradient: name of each trainable parameter to d(loss)/d(parameter), weight decay included.
        """

    def after_backward(self, model: nn.Module) -> None:
        """Change ``parameter.grad`` before the optimiser steps (FedProx adds ``mu (theta - theta_t)``)."""

    def after_step(self, model: nn.Module, learning_rate: float) -> None:
        """Change parameters after the optimiser stepped (SCAFFOLD)."""

    def finish(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return (extras for the server, this client's new state)."""
        return {}, {}


@dataclass(frozen=True)
class AggregationTask:
    """One round's aggregation.

    Attributes:
        global_state: the model that the clients started from, on the CPU.
        updates: client id to checked update (finite, right names and shapes), ascending ids, at least one.
        server_state: what the aggregator handed back last round; empty at first.
        parameter_names: names of trainable parameters that are not personal; the other tensors are buffers, or are
            replaced after the aggregation.
        num_clients: clients in total (not only this round's).
        round: 1-based round number.
    """

    global_state: State
    updates: Mapping[int, LocalUpdate]
    server_state: State
    parameter_names: Sequence[str]
    num_clients: int
    round: int


@dataclass(frozen=True)
class Aggregate:
    """The outcome of an aggregation.

    Attributes:
        state: the new global model.
        server_state: what the aggregator wants back next round.
        broadcast: extras for every client, under a namespaced name (``scaffold/c/conv.weight``).
        weights: client id to the weight its update got, summing to 1.
    """

    state: State
    server_state: State = field(default_factory=dict)
    broadcast: State = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)


class Aggregator(ABC):
    """Combines client updates into the next global model."""

    def correction(self) -> LocalCorrection:
        """The aggregator's part of local training."""
        return LocalCorrection()

    def check_extras(self, extras: State, parameters: State, *, who: str) -> None:
        """Refuse one client's extras before they can spoil the aggregation; the round continues without that client.

        Args:
            extras: what came beside the client's model, under namespaced names.
            parameters: the global model's trainable parameters that are not personal, for names and shapes.
            who: the sender, as the message should name it.

        Raises:
            UpdateError: something is missing, misshapen or not finite.
        """
        return None  # most aggregators take no extras, so there is nothing to refuse

    @abstractmethod
    def combine(self, task: AggregationTask) -> Aggregate:
        """Combine the updates without touching them.

        Raises:
            UpdateError: when the updates cannot be combined.
        """


@dataclass(frozen=True)
class EvaluationTask:
    """One evaluator's work on one model.

    Attributes:
        model: in evaluation mode, on ``device``; raw logits for pixels in [0, 1].
        data: test examples.
        num_classes: C.
        threat: the budget.
        batch_size: examples a batch.
        device: where to compute.
        seed: derive every stream from (seed, purpose, round).
        round: round number for derived seeds; 0 for the final evaluation.
        rows_at_once: how many examples to pass through the model at once where each passes many times, >= 1; more are
            right, but slower.
        clean_correct: (N,) bool, whether the model classifies the clean example correctly; computed once and shared.
        call: calls a function of tensors, or replays a captured graph of it; see ``maths.graphs.Caller``.
        scratch: a folder for what a long evaluation needs to continue after a crash; it need not exist yet, other
            evaluators use it too, and it is removed once the results are written. None: nothing is kept.
        on_progress: called with (examples done, examples in all, correct so far).
        tally: called with (name, count) to add up a number for ``EvaluationResult.details``.
        on_examples: called with adversarial examples that were checked against the budget: their positions in ``data``,
            (n,) int64 on the CPU, and the points, (n, C, H, W) float32 on ``device``.
    """

    model: nn.Module
    data: ImageData
    num_classes: int
    threat: ThreatModel
    batch_size: int
    device: torch.device
    seed: int
    round: int
    clean_correct: Tensor
    rows_at_once: int = sys.maxsize
    call: Caller = lambda name, function, *inputs: function(*inputs)
    scratch: Path | None = None
    on_progress: Callable[[int, int, int], None] = lambda done, total, correct: None
    tally: Callable[[str, int], None] = lambda name, count: None
    on_examples: Callable[[Tensor, Tensor], None] = lambda where, x_adv: None


class Evaluator(ABC):
    """Measures a model."""

    gives_examples: ClassVar[bool] = False  #: True where :meth:`evaluate` calls ``task.on_examples``

    @abstractmethod
    def evaluate(self, task: EvaluationTask, label: str) -> EvaluationResult:
        """Measure ``task.model``; see ``evaluators.base.AttackEvaluator``, which re-checks the budget.

        Raises:
            BudgetError: when adversarial examples left the budget.
            ModelError: when the model cannot be evaluated.
        """
