"""What a method sees of a mini-batch while it attacks and while it trains, and which rows a mixture attacks."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from calfat_plugin.errors import ModelError
from calfat_plugin.seeds import generator

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from calfat_plugin.interfaces import ClientLoss, LocalTask
    from calfat_plugin.recipe.schema import Recipe

Sampling = Literal["per_batch", "fixed"]
SAMPLING_HELP = (
    "per_batch: a new random share of every mini-batch; fixed: one split of the client's data for all rounds"
)


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
        from calfat_plugin.models.base import ImageClassifier

        self._model = model
        self._features: list[Tensor] = []
        if not isinstance(model, ImageClassifier):
            self.logits: Tensor = model(x)
            return
        keep = model.classifier.register_forward_pre_hook(lambda layer, inputs: self._features.append(inputs[0]))
        try:
            self.logits = model(x)
        finally:
            keep.remove()

    @property
    def features(self) -> Tensor:
        if not self._features:
            raise ModelError(
                f"the method reads penultimate features, which the model {type(self._model).__name__} does not give. "
                "Choose a model that derives from calfat_plugin.ImageClassifier, as all built-in ones do; in a model "
                "of your own, derive from it and pass it the body and the last layer."
            )
        return self._features[0]


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


def empty_share(recipe: Recipe, ratio: float, sampling: Sampling) -> str:
    """A warning where :func:`mixed_rows` rounds a share of a batch down to no example; empty where it does not."""
    batch = recipe.train.batch_size
    if sampling == "fixed" or not 0 < ratio * batch < 1:
        return ""
    return (
        f"never attacks: a share of {ratio:g} of a batch of {batch} is less than one example, which is rounded down to "
        "none. Raise one of the two."
    )


def random_share(num_examples: int, ratio: float, generator: Generator) -> Tensor:
    """Choose floor(ratio * num_examples) examples at random: (num_examples,) bool on the generator's device."""
    import torch

    # 0.29 * 100 is 28.999999999999996 in floating point; the slack makes it the 29 that was meant.
    chosen = math.floor(ratio * num_examples + 1e-9)
    order = torch.randperm(num_examples, generator=generator, device=generator.device)
    return order < chosen
