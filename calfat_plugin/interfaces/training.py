"""The interfaces of local training: inner attacks, trainers, loss modifiers, and an aggregator's part of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from calfat_plugin.maths.attacks import gradient_ascent, input_gradient
from calfat_plugin.maths.averaging import weighted_average
from calfat_plugin.maths.losses import cross_entropy
from calfat_plugin.results import LocalUpdate, State

if TYPE_CHECKING:
    import torch
    from torch import Generator, Tensor, nn

    from calfat_plugin.datasets import Augmentation, ImageData
    from calfat_plugin.datasets.batches import Examples
    from calfat_plugin.maths.passes import Precision
    from calfat_plugin.observer import BatchProgress
    from calfat_plugin.recipe.training import AWPOptions, ByClassOptions
    from calfat_plugin.threat import ThreatModel


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
        threat = self.threat if within is None else within
        return gradient_ascent(
            self.model,
            self.x_nat,
            self.loss,
            threat=threat,
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


class MiniBatch(Protocol):
    """What an inner attack sees of a mini-batch while the parameters move.

    Attributes:
        x_nat: (N, C, H, W) clean images.
        x_adv: what takes their place in training.
        attacked: (N,) bool, rows that are attacked, the others being clean; None: all of them.
        task: the client's work.
    """

    x_nat: Tensor
    x_adv: Tensor
    attacked: Tensor | None
    task: LocalTask

    def again(self, x_adv: Tensor | None = None) -> MiniBatch:
        """The same examples, to step on once more.

        Args:
            x_adv: other adversarial examples; None: the same.
        """


class InnerAttack:
    """An attack of training; this one is PGD, with the steps of ``calfat.threat``.

    It is stateless, as all plugins are. One that remembers something from mini-batch to mini-batch makes its memory in
    ``begin_round``, finds it in ``task.memory``, and hands on in ``end_round`` what it needs in the next round.

    Attributes:
        options: an instance of the entry's options.
        who: kind, name and distribution, where errors about its images are to name it; the loop's, not a plugin's.
    """

    who: str = ""

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @property
    def has_own_steps(self) -> bool:
        """Whether ``take_steps`` is overridden."""
        return type(self).take_steps is not InnerAttack.take_steps

    @property
    def looks_back(self) -> bool:
        """Whether ``after_step`` is overridden."""
        return type(self).after_step is not InnerAttack.after_step

    def begin_round(self, task: LocalTask) -> Any:
        """The attack's memory during a client's round; default: none.

        Args:
            task: the client's work; ``task.client_state`` has what ``end_round`` gave in the last round whose update
                the server used.
        """
        return None

    def end_round(self, memory: Any) -> State:
        """What the client keeps for its next round, tensors by name; default: nothing.

        Args:
            memory: what ``begin_round`` returned.
        """
        return {}

    def start(self, x_nat: Tensor, threat: ThreatModel, generator: Generator) -> Tensor | None:
        """First iterate of the attack; None: the method's own, which for PGD suits the method's loss.

        Of an attack of one step it is noise: at the clean image a divergence has no gradient.

        Args:
            x_nat: (N, C, H, W) clean images, a whole mini-batch.
            threat: the budget.
            generator: the only source of randomness.

        Returns:
            Shape of x_nat; or None.
        """
        return None

    def draw(self, x_nat: Tensor, threat: ThreatModel, generator: Generator) -> Tensor | None:
        """Random numbers that ``craft`` needs beside the start, drawn after it; default: none.

        Args:
            x_nat: (N, C, H, W) clean images, a whole mini-batch.
            threat: the budget.
            generator: the only source of randomness.

        Returns:
            Shape of x_nat, of which ``craft`` finds its images' part in ``task.drawn``; or None.
        """
        return None

    def craft(self, task: InnerTask) -> Tensor:
        """The images to train on: shape of ``task.x_nat``, without gradient, in the set that ``reach`` gives.

        It draws no random numbers, and an image does not depend on the others: the mini-batch may come in parts.

        Args:
            task: the images, their start and the loss to climb.
        """
        return task.climb(steps=task.threat.steps, step_size=float(task.threat.step_size))

    def take_steps(self, batch: MiniBatch, step: Callable[[Any], Tensor], memory: Any) -> Tensor:
        """The optimiser's steps for one mini-batch; default: one.

        An attack that looks for its images while the parameters move overrides it. Its mini-batch then comes with the
        start for ``x_adv``; ``craft`` is left to passes that move no parameter. Each step takes its images as
        ``batch.again(x_adv)``, whose gradient is in ``x_adv.grad`` after the step, if it requires one.

        Args:
            batch: the mini-batch, attacked.
            step: leaves the gradient of the training loss, and moves the parameters once; returns the loss.
            memory: what ``begin_round`` returned.

        Returns:
            The loss for the record, a scalar without gradient.
        """
        return step(batch)

    def after_step(self, batch: MiniBatch, gradient: Tensor | None, memory: Any) -> None:
        """Look at what a step left in the images; default: not at all, and then training does not compute it.

        Args:
            batch: the mini-batch, as it was trained on.
            gradient: of the training loss by ``batch.x_adv``, its shape; None where that loss does not depend on it.
            memory: what ``begin_round`` returned.
        """

    def reach(self, threat: ThreatModel) -> ThreatModel:
        """The set around a clean image that its images lie in, by norm and eps; default: the budget.

        A run holds the first mini-batches of every round to it. An attack that leaves the budget by design says here
        how far: ``threat.scaled(2)`` has twice the radius.

        Args:
            threat: the budget.

        Returns:
            With the pixel range of the budget.
        """
        return threat


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
        client_state: what this client handed back in the last round whose update the server used; empty at first.
        broadcast: extras from the server, under namespaced names; empty at first.
        correction: the aggregator's part of local training.
        inner: how to find the images to train on.
        label_smoothing: s of ``calfat.trainer.label_smoothing``; the loop has it in ``cross_entropy`` of the loss.
        awp: how the loop perturbs the weights at which ``backward`` leaves its gradient; None: not at all.
        clean_rounds: in rounds up to this one the loop attacks nothing: ``x_adv`` is ``x_nat``.
        by_class: how the loop makes each example's budget of ``threat``; None: all have the same.
        personal: names of the model's tensors that stay with this client (``LocalTrainer.personal_names``). The model
            holds this client's own, and an aggregator's correction leaves them alone.
        precision: arithmetic of the model's passes.
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
    label_smoothing: float = 0.0
    awp: AWPOptions | None = None
    clean_rounds: int = 0
    by_class: ByClassOptions | None = None
    personal: frozenset[str] = frozenset()
    precision: Precision = "fp32"
    on_batch: Callable[[BatchProgress], None] = lambda progress: None

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.class_counts)

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

        A tensor that ``model`` has under several names is personal if one of them is here.

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
        states = []
        for update in updates.values():
            states.append({name: update.state[name] for name in names})
        return weighted_average(states, [1.0] * len(states))

    def among(self, others: Mapping[int, LocalTrainer]) -> LocalTrainer:
        """Server side: the trainer that the server of a run with groups of clients uses; default: this one.

        A group's own trainer is asked for neither ``personal_names`` nor ``evaluated_personal`` nor ``broadcast``: a
        method that needs them has to be the run's trainer as well.

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
