"""FedGAIRAT: adversarial training that weighs examples by how easily they are attacked (Zhang et al., ICLR 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from calfat_plugin.entries import TrainerEntry, paper
from calfat_plugin.errors import OptionError
from calfat_plugin.interfaces import TrainBatch
from calfat_plugin.options import option
from calfat_plugin.trainers.base import AdversarialTrainer

if TYPE_CHECKING:
    from torch import Tensor

    from calfat_plugin.recipe.schema import Recipe

Weighting = Literal["tanh", "sigmoid", "discrete"]


@dataclass(frozen=True)
class FedGAIRATOptions:
    """The constants of GAIRAT."""

    weighting: Weighting = option("tanh", help="form of the weight as a function of kappa")
    lam: float = option(-1.0, help="Lambda, shift of the weight's argument; large values weigh all examples alike")
    start_round: int = option(
        60, low=1, help="first round with weights; plain adversarial training before it", unit="rounds"
    )


class FedGAIRAT(AdversarialTrainer):
    """mean_j w_j CE(f(x~_j), y_j), w from the number of attack iterates that were still classified correctly."""

    options: FedGAIRATOptions
    counts_iterates = True

    def train_loss(self, batch: TrainBatch) -> Tensor:
        options = self.options
        if batch.kappa is None:  # a clean round (calfat.trainer.clean_rounds): no iterates, so no weights
            return batch.loss.cross_entropy(batch.logits_adv, batch.y).mean()
        lam = options.lam
        if batch.task.round < options.start_round:
            lam = math.inf  # all weights are 1
        weights = example_weights(batch.kappa, batch.task.threat.steps, lam, options.weighting)
        return (weights * batch.loss.cross_entropy(batch.logits_adv, batch.y)).mean()


def example_weights(kappa: Tensor, steps: int, lam: float, weighting: Weighting) -> Tensor:
    """Weights of a batch, normalised to mean 1: examples that are easier to attack weigh more.

    With h = floor(steps / 2) and a = lam + 5 (h - kappa) / h the raw weight is (1 + tanh(a)) / 2 for ``tanh``,
    sigmoid(a) for ``sigmoid``, and (steps + 1 - kappa) / (steps + 1) for ``discrete``. With lam = +inf all weights are
    1, which is plain adversarial training.
    """
    import torch.nn.functional as F

    if lam == math.inf:
        return kappa.new_ones(kappa.shape).float()
    if weighting == "discrete":
        log_raw = (steps + 1 - kappa).float().log()
    else:
        half = steps // 2
        argument = lam + 5.0 * (half - kappa.float()) / half
        if weighting == "tanh":
            argument = 2.0 * argument  # (1 + tanh a) / 2 = sigmoid(2 a)
        log_raw = F.logsigmoid(argument)  # in logs, because the raw weights of a batch may underflow
    return len(kappa) * log_raw.softmax(dim=0)


def _check(options: FedGAIRATOptions, recipe: Recipe) -> None:
    if options.weighting != "discrete" and recipe.threat.in_training.steps < 2:
        steps = "calfat.threat.steps"
        if recipe.threat.own_steps is not None:
            steps = f"the steps of calfat.threat.inner '{recipe.threat.inner.name}'"
        raise OptionError(
            f"weighting {options.weighting} divides by half the attack's steps, rounded down, so {steps} "
            f"must be at least 2; got {recipe.threat.in_training.steps}. weighting: discrete takes any number."
        )


def _idle(options: FedGAIRATOptions) -> dict[str, str]:
    if options.weighting != "discrete":
        return {}
    return {"lam": "discrete weights have no shift."}


ENTRY = TrainerEntry(
    "fedgairat",
    build=FedGAIRAT,
    config=FedGAIRATOptions,
    check=_check,
    idle=_idle,
    summary="GAIRAT on every client: examples near the decision boundary weigh more, from a given round on",
    formula="min mean_j w_j CE(f(x~_j), y_j), w_j ~ (1 + tanh(Lambda + 5 (h - kappa_j) / h)) / 2 with mean 1, "
    "h = floor(K/2), x~ = argmax CE(f(x'), y)",
    modifiers=("plain",),
    citation=paper("zhang2021geometry"),
)
