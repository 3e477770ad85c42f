"""The base of every built-in method: a method defines its two losses, and hooks around them; the loop does the rest."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from calfat_plugin import returned
from calfat_plugin.errors import PluginError
from calfat_plugin.interfaces import (
    AttackBatch,
    ClientLoss,
    InnerAttack,
    InnerTask,
    LocalTask,
    LocalTrainer,
    LossModifier,
    RoundEnd,
    TrainBatch,
)
from calfat_plugin.options import option
from calfat_plugin.seeds import generator

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from calfat_plugin.recipe.schema import Recipe
    from calfat_plugin.results import LocalUpdate

# The columns of table 6.3 (docs/methods.md), and beyond the paper three more that follow its LogitAdj column.
ALL_MODIFIERS = ("plain", "logitadj", "robal", "calibrated", "fedlc", "gear", "fedrs")


class AdversarialTrainer(LocalTrainer):
    """A method is two losses and named constants; subclasses are final and keep no state.

    A subclass overrides ``train_loss``, and ``attack_loss`` with ``start`` where it attacks. What else a
    method may need has a hook with a default: ``begin_round`` and ``end_round`` (a teacher, an average of
    weights, what a client keeps), ``make_optimizer`` and ``make_schedule``, ``take_steps`` (something after
    each step, or several steps a batch), ``backward`` (a step of more than one gradient). It never touches devices,
    layouts, batch splitting or modes: those belong to ``trainers.loop``.

    Attributes:
        options: an instance of the entry's options.
        modifier: the loss modifier that the recipe composes with the method.
        attacks: where False, ``x_adv`` is ``x_nat`` and ``attack_loss`` is never called.
        counts_iterates: whether ``TrainBatch.kappa`` is filled.
    """

    attacks: bool = True
    counts_iterates: ClassVar[bool] = False

    def __init__(self, options: Any, modifier: LossModifier) -> None:
        self.options = options
        self.modifier = modifier

    @property
    def has_own_steps(self) -> bool:
        """Whether ``take_steps`` is overridden."""
        return type(self).take_steps is not AdversarialTrainer.take_steps

    def adapt_model(self, model: nn.Module) -> nn.Module:
        return self.modifier.adapt_model(model)

    def bind_loss(self, class_counts: Tensor) -> ClientLoss:
        """The client's loss operators; ``class_counts``: (C,) on the training device."""
        return self.modifier.bind(class_counts)

    def begin_round(self, task: LocalTask) -> Any:
        """What the losses see as ``batch.context`` during a client's round; default: nothing (None).

        Called when ``task.model`` holds the global weights, before the first step.

        Args:
            task: the client's work; ``task.client_state`` is what ``end_round`` gave in this client's previous round.
        """
        return None

    def end_round(self, task: LocalTask, context: Any) -> RoundEnd:
        """What the client keeps, and numbers for the record; default: neither. Called after the last step.

        Args:
            task: the client's work; ``task.model`` is what will be sent.
            context: what ``begin_round`` returned.
        """
        return RoundEnd()

    def make_optimizer(self, parameters: list[nn.Parameter], task: LocalTask) -> Optimizer:
        """The optimiser of a client's round, new in each; default: the one of ``train_args``.

        Args:
            parameters: those that train.
            task: the client's work; ``task.settings`` has the recipe's learning rate of the round.
        """
        from calfat_plugin.trainers.additions import recipes_optimizer

        return recipes_optimizer(parameters, task.settings)

    def make_schedule(self, optimizer: Optimizer, task: LocalTask, num_batches: int) -> LRScheduler | None:
        """How the learning rate changes within a client's round; default: not at all.

        Its ``step`` is called after each mini-batch. A schedule over rounds is the recipe's: the learning rate
        in ``task.settings`` is that of the round.

        Args:
            optimizer: what ``make_optimizer`` returned.
            task: the client's work.
            num_batches: mini-batches of this round, over all its epochs.
        """
        return None

    def take_steps(self, batch: TrainBatch, step: Callable[[TrainBatch], Tensor]) -> Tensor:
        """The optimiser's steps for one mini-batch; default: one.

        Args:
            batch: the mini-batch, attacked.
            step: calls ``backward`` and moves the parameters once; returns the loss. For a further step give it
                ``batch.again()``, since the logits of ``batch`` are those before the first.

        Returns:
            The loss for the record, a scalar without gradient.
        """
        return step(batch)

    def attacked_rows(self, index: Tensor, task: LocalTask, generator: Generator) -> Tensor | None:
        """Which rows of a batch to attack: (N,) bool, or None for all.

        Args:
            index: (N,) positions of the batch's examples in ``task.data``.
            task: the client's work.
            generator: source of random choices that are new for every batch.
        """
        return None

    def start(self, x_nat: Tensor, task: LocalTask, generator: Generator) -> Tensor:
        """First iterate of an inner attack that has none of its own, as PGD; default: uniform in the ball.

        Args:
            x_nat: (N, C, H, W) clean images.
            task: the client's work; ``task.threat`` is the budget.
            generator: the only source of randomness.

        Returns:
            Shape of x_nat; may lie outside the ball, since the first step projects.
        """
        return task.threat.random_start(x_nat, generator)

    def attack_loss(self, batch: AttackBatch) -> Tensor:
        """The scalar that the inner maximisation climbs; default: cross-entropy of x_adv.

        A sum over examples, in which none depends on another: ``batch`` may be a part of the mini-batch. A scalar.
        """
        from calfat_plugin.maths.losses import cross_entropy

        return cross_entropy(batch.loss.attack_logits(batch.logits_adv), batch.y, reduction="sum")

    def craft(self, batch: AttackBatch, task: InnerTask, inner: InnerAttack) -> Tensor:
        """The adversarial examples of some examples of a mini-batch; default: those of the recipe's inner attack.

        A method with an attack of its own overrides it; recipes that choose another ``calfat.threat.inner`` are then
        refused.

        Args:
            batch: what the attack may look at.
            task: the clean images, the start, and ``attack_loss`` as a function of logits.
            inner: what ``calfat.threat.inner`` names.

        Returns:
            (N, C, H, W), inside the budget, without gradient.
        """
        return inner.craft(task)

    @abstractmethod
    def train_loss(self, batch: TrainBatch) -> Tensor:
        """The scalar that the outer step minimises, a mean over ``batch``."""

    def backward(self, batch: TrainBatch) -> Tensor:
        """Leave the gradient of one step in the parameters' ``.grad``, which is None before; default: of train_loss.

        Args:
            batch: the mini-batch, attacked.

        Returns:
            The loss for the record, a scalar without gradient.

        Raises:
            PluginError: ``train_loss`` returned something else than a scalar that depends on the parameters.
        """
        loss = returned.loss(self.train_loss(batch), "train_loss returned")
        if not loss.requires_grad:
            raise PluginError(
                "train_loss returned a number that depends on no parameter of the model; was it detached, or made "
                "under torch.no_grad()?"
            )
        loss.backward()
        return loss.detach()

    def fit(self, task: LocalTask) -> LocalUpdate:
        """Train for one round; see ``trainers.loop.train_locally``."""
        from calfat_plugin.trainers.loop import train_locally  # here: listing methods must not import torch

        return train_locally(self, task)


def start_noise_option() -> Any:
    """The option of a :class:`GaussianStart`."""
    return option(
        1e-3,
        low=0,
        open_low=True,
        help="standard deviation of the attack's Gaussian start; at x itself a divergence has no gradient",
        unit="fraction of the pixel range",
    )


class GaussianStart(AdversarialTrainer):
    """A method whose attack starts at x plus Gaussian noise, in whose options is ``start_noise``."""

    def start(self, x_nat: Tensor, task: LocalTask, generator: Generator) -> Tensor:
        return task.threat.gaussian_start(x_nat, generator, self.options.start_noise)


# --- mixtures of clean and adversarial examples -----------------------------------------------------------------------

Sampling = Literal["per_batch", "fixed"]
SAMPLING_HELP = (
    "per_batch: a new random share of every mini-batch; fixed: one split of the client's data for all rounds"
)


def mixed_rows(
    index: Tensor, task: LocalTask, batch_noise: Generator, ratio: float, sampling: Sampling
) -> Tensor | None:
    """The rows of a batch that become adversarial, rounded down: (N,) bool, or None for all of them."""
    if ratio == 1.0:
        return None  # nothing is drawn, so that the attack's noise is that of a method without a mixture
    if sampling == "fixed":
        split = random_share(len(task.data), ratio, generator(task.seed, "adversarial split", client=task.client))
        return split[index.to(split.device)]
    return random_share(len(index), ratio, batch_noise)


def random_share(num_examples: int, ratio: float, generator: Generator) -> Tensor:
    """Choose floor(ratio * num_examples) examples at random: (num_examples,) bool on the generator's device."""
    import torch

    # 0.29 * 100 is 28.999999999999996 in floating point; the slack makes it the 29 that was meant.
    chosen = math.floor(ratio * num_examples + 1e-9)
    order = torch.randperm(num_examples, generator=generator, device=generator.device)
    return order < chosen


def empty_share(recipe: Recipe, ratio: float, sampling: Sampling) -> str:
    """A warning where :func:`mixed_rows` rounds a share of a batch down to no example; empty where it does not."""
    batch = recipe.train.batch_size
    if sampling == "fixed" or not 0 < ratio * batch < 1:
        return ""
    return (
        f"never attacks: a share of {ratio:g} of a batch of {batch} is less than one example, which is rounded down to "
        "none. Raise one of the two."
    )
