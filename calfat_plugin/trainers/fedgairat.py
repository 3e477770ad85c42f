"""FedGAIRAT: adversarial training that weighs examples by how easily they are attacked (Zhang et al., ICLR 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import Citation, TrainerEntry
from calfat_plugin.errors import OptionError
from calfat_plugin.options import option
from calfat_plugin.trainers.base import AdversarialTrainer, TrainBatch
from calfat_plugin.trainers.losses_methods import GairatWeighting, gairat_lambda, gairat_loss, gairat_weights

if TYPE_CHECKING:
    from torch import Tensor

    from calfat_plugin.recipe.schema import Recipe


@dataclass(frozen=True)
class FedGAIRATOptions:
    """The constants of GAIRAT."""

    weighting: GairatWeighting = option("tanh", help="form of the weight as a function of kappa")
    lam: float = option(-1.0, help="Lambda, shift of the weight's argument; large values weigh all examples alike")
    start_round: int = option(
        60, low=1, help="first round with weights; plain adversarial training before it", unit="rounds"
    )


class FedGAIRAT(AdversarialTrainer):
    """mean_j w_j CE(f(x~_j), y_j), w from the number of attack iterates that were still classified correctly."""

    options: FedGAIRATOptions
    counts_iterates = True

    def train_loss(self, batch: TrainBatch) -> Tensor:
        assert batch.kappa is not None  # counts_iterates
        lam = gairat_lambda(batch.task.round, start_round=self.options.start_round, lam=self.options.lam)
        weights = gairat_weights(batch.kappa, batch.task.threat.steps, lam=lam, weighting=self.options.weighting)
        return gairat_loss(batch.loss.cross_entropy(batch.logits_adv, batch.y), weights)


def _check(options: FedGAIRATOptions, recipe: Recipe) -> None:
    if options.weighting != "discrete" and recipe.threat.steps < 2:
        raise OptionError(
            f"weighting {options.weighting} divides by half the attack's steps, rounded down, so calfat.threat.steps "
            f"must be at least 2; got {recipe.threat.steps}. weighting: discrete takes any number."
        )


ENTRY = TrainerEntry(
    "fedgairat",
    build=FedGAIRAT,
    config=FedGAIRATOptions,
    check=_check,
    summary="GAIRAT on every client: examples near the decision boundary weigh more, from a given round on",
    formula="min mean_j w_j CE(f(x~_j), y_j), w_j ~ (1 + tanh(Lambda + 5 (h - kappa_j) / h)) / 2 with mean 1, "
    "h = floor(K/2), x~ = argmax CE(f(x'), y)",
    modifiers=("plain",),
    citation=Citation(
        "Zhang et al., Geometry-aware Instance-reweighted Adversarial Training, ICLR 2021",
        """@inproceedings{zhang2021geometry,
  title     = {Geometry-aware Instance-reweighted Adversarial Training},
  author    = {Zhang, Jingfeng and Zhu, Jianing and Niu, Gang and Han, Bo and Sugiyama, Masashi and
               Kankanhalli, Mohan},
  booktitle = {International Conference on Learning Representations},
  year      = {2021}
}""",
    ),
)
