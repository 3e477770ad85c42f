"""The interface of inner attacks: how training looks for the images that a method trains on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calfat_plugin.maths.attacks import gradient_ascent, input_gradient

if TYPE_CHECKING:
    from torch import Generator, Tensor

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
    """

    model: Callable[[Tensor], Tensor]
    x_nat: Tensor
    start: Tensor
    loss: Callable[[Tensor], Tensor]
    threat: ThreatModel
    passes: Callable[[], AbstractContextManager[object]] = nullcontext

    def climb(self, *, steps: int, step_size: float, within: ThreatModel | None = None) -> Tensor:
        """The end of projected steps from ``start``; see ``maths.attacks.gradient_ascent``.

        Args:
            steps: how many.
            step_size: length of each, a fraction of the pixel range.
            within: what they are projected on; None: the budget.
        """
        threat = self.threat if within is None else within
        how: dict[str, Any] = {"steps": steps, "step_size": step_size, "start": self.start, "passes": self.passes}
        return gradient_ascent(self.model, self.x_nat, self.loss, threat=threat, **how)

    def gradient(self, x_adv: Tensor) -> Tensor:
        """The loss's gradient at these images, shape of x_adv, in float32: a step of an attack with its own loop.

        Args:
            x_adv: shape of x_nat, without gradient.
        """
        import torch  # here, not above: recipes are checked without torch

        x_adv = x_adv.detach().requires_grad_()
        with torch.enable_grad():
            return input_gradient(self.loss(self.model(x_adv)), x_adv)


class InnerAttack:
    """An attack of training; this one is PGD, with the steps of ``calfat.threat``. It is stateless, as all plugins are.

    Attributes:
        options: an instance of the entry's options.
    """

    def __init__(self, options: Any = None) -> None:
        self.options = options

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

    def craft(self, task: InnerTask) -> Tensor:
        """The images to train on: shape of ``task.x_nat``, without gradient, in the set that ``reach`` gives.

        It draws no random numbers, and an image does not depend on the others: the mini-batch may come in parts.

        Args:
            task: the images, their start and the loss to climb.
        """
        return task.climb(steps=task.threat.steps, step_size=float(task.threat.step_size))

    def reach(self, threat: ThreatModel) -> ThreatModel:
        """The set around a clean image that its images lie in, by norm, eps and pixel range; default: the budget.

        Args:
            threat: the budget.
        """
        return threat
