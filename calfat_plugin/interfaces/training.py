"""One client's work in one round: a mini-batch, the inner attack, the task, and an aggregator's part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from calfat_plugin.errors import ModelError
from calfat_plugin.interfaces.losses import ClientLoss, InnerTask
from calfat_plugin.results import State

if TYPE_CHECKING:
    import torch
    from torch import Generator, Tensor, nn

    from calfat_plugin.datasets import Augmentation, ImageData
    from calfat_plugin.maths.passes import Precision
    from calfat_plugin.observer import BatchProgress
    from calfat_plugin.recipe.training import AWPOptions, ByClassOptions
    from calfat_plugin.threat import ThreatModel


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
        index: (N,) positions of the examples in ``task.data``, on its device.
        context: what the method's ``begin_round`` returned.
        recorded: what ``record`` was given.
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
        context: Any = None,
        index: Tensor | None = None,
    ) -> None:
        if index is None:
            index = y.new_tensor(range(len(y)))
        self.model = model
        self.x_nat = x_nat
        self.x_adv = x_adv
        self.y = y
        self.loss = loss
        self.task = task
        self.attacked = attacked
        self.kappa = kappa
        self.context = context
        self.index = index
        self.recorded: dict[str, Tensor] = {}

    @cached_property
    def logits_nat(self) -> Tensor:
        """(N, C) logits of the clean images, with gradient; the forward pass happens on first use."""
        return self._nat.logits

    @cached_property
    def logits_adv(self) -> Tensor:
        """(N, C) logits of x_adv, with gradient; the forward pass happens on first use."""
        return self._adv.logits

    @property
    def features_nat(self) -> Tensor:
        """(N, F) penultimate features of the clean images, from the pass of ``logits_nat``.

        Raises:
            ModelError: the model has none to give; it is no ``ImageClassifier``.
        """
        return self._nat.features

    @property
    def features_adv(self) -> Tensor:
        """(N, F) penultimate features of x_adv, from the pass of ``logits_adv``; see ``features_nat``."""
        return self._adv.features

    @cached_property
    def _nat(self) -> _Pass:
        return _Pass(self.model, self.x_nat)

    @cached_property
    def _adv(self) -> _Pass:
        return _Pass(self.model, self.x_adv)

    def again(self, x_adv: Tensor | None = None) -> TrainBatch:
        """The same examples without their logits and features: for a second step, at the weights after the first.

        Args:
            x_adv: other adversarial examples; None: the same.
        """
        if x_adv is None:
            x_adv = self.x_adv
        batch = TrainBatch(
            self.model,
            self.x_nat,
            x_adv,
            self.y,
            self.loss,
            self.task,
            self.attacked,
            self.kappa,
            self.context,
            self.index,
        )
        batch.recorded = self.recorded
        return batch

    def record(self, name: str, values: Tensor) -> None:
        """Add to the metric ``name``, which the entry declares: the round's number is the mean over examples.

        Those of batches that recorded nothing under this name do not count.

        Args:
            name: of the metric.
            values: (N,), one an example, or (), their mean; of the last call for this batch.
        """
        self.recorded[name] = values.detach().mean()


class _Pass:
    """One forward pass, with the penultimate features on request."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self._model = model
        self._features: list[Tensor] = []
        if not getattr(model, "gives_features", False):  # of ImageClassifier, which is in a layer above this one
            self.logits: Tensor = model(x)
            return
        classifier: Any = model.classifier
        hook = classifier.register_forward_pre_hook(lambda layer, inputs: self._features.append(inputs[0]))
        try:
            self.logits = model(x)
        finally:
            hook.remove()

    @property
    def features(self) -> Tensor:
        if not self._features:
            raise ModelError(
                f"the method reads penultimate features, which the model {type(self._model).__name__} does not give. "
                "Choose a model that derives from calfat_plugin.ImageClassifier, as all built-in ones do; in a model "
                "of your own, derive from it and pass it the body and the last layer."
            )
        return self._features[0]


class InnerAttack:
    """An attack of training; this one is PGD, with the steps of ``calfat.threat``.

    It is stateless, as all plugins are. One that remembers something from mini-batch to mini-batch makes its memory in
    ``begin_round``, finds it in ``task.memory``, and hands on in ``end_round`` what it needs in the next round.

    Attributes:
        options: an instance of the entry's options.
        who: kind, name and distribution, for errors about its images; empty for PGD. The package sets it.
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
        """First iterate of the attack; None: that of the method, which suits the method's loss.

        An attack of one step must start from noise: at the clean image a divergence has no gradient.

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

    def take_steps(self, batch: TrainBatch, step: Callable[[TrainBatch], Tensor], memory: Any) -> Tensor:
        """The optimiser's steps for one mini-batch; default: one.

        An attack that looks for its images while the parameters move overrides this method. ``batch.x_adv`` is then the
        start of the attack, and ``craft`` is called only in passes that move no parameter. Each step takes its images
        as ``batch.again(x_adv)``; after the step their gradient is in ``x_adv.grad``, if ``x_adv`` requires one.

        Args:
            batch: the mini-batch, attacked.
            step: leaves the gradient of the training loss, and moves the parameters once; returns the loss.
            memory: what ``begin_round`` returned.

        Returns:
            The loss for the record, a scalar without gradient.
        """
        return step(batch)

    def after_step(self, batch: TrainBatch, gradient: Tensor | None, memory: Any) -> None:
        """Look at the gradient that a step left in the images; default: do nothing, so that it is not computed.

        Args:
            batch: the mini-batch, as it was trained on.
            gradient: of the training loss by ``batch.x_adv``, its shape; None where that loss does not depend on it.
            memory: what ``begin_round`` returned.
        """

    def reach(self, threat: ThreatModel) -> ThreatModel:
        """The ball around a clean image in which the attack's images lie; default: the budget.

        The first mini-batches of every round are checked against it. An attack that leaves the budget by design says
        here how far: ``threat.scaled(2)`` has twice the radius.

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

        Called in ``begin_round`` it is a copy of the global model, as fast as the model itself.
        """
        from copy import deepcopy

        return deepcopy(self.model).eval().requires_grad_(False)


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
