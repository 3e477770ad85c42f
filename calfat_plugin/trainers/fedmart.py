"""FedMART: misclassification-aware adversarial training on every client (Wang et al., ICLR 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import Citation, TrainerEntry
from calfat_plugin.interfaces import LocalTask
from calfat_plugin.options import option
from calfat_plugin.trainers.base import ALL_MODIFIERS, AdversarialTrainer, TrainBatch, start_noise_option
from calfat_plugin.trainers.losses_methods import mart_margin, mart_regulariser

if TYPE_CHECKING:
    from torch import Generator, Tensor


@dataclass(frozen=True)
class FedMARTOptions:
    """The constants of MART."""

    lam: float = option(6.0, low=0, help="lambda, weight of the regulariser R; the authors' ResNet-18 script has 5")
    start_noise: float = start_noise_option()


class FedMART(AdversarialTrainer):
    """BCE + lambda R, the attack climbing CE.

    A modifier changes the CE inside BCE as anywhere; every probability besides (p, p~, its largest wrong class, and
    the weight 1 - p^y) comes from one set of logits, ``margin_logits``.
    """

    options: FedMARTOptions

    def start(self, x_nat: Tensor, task: LocalTask, generator: Generator) -> Tensor:
        return task.threat.gaussian_start(x_nat, generator, self.options.start_noise)

    def train_loss(self, batch: TrainBatch) -> Tensor:
        nat = batch.loss.margin_logits(batch.logits_nat)
        adv = batch.loss.margin_logits(batch.logits_adv)
        boosted = batch.loss.cross_entropy(batch.logits_adv, batch.y).mean() + mart_margin(adv, batch.y)
        return boosted + self.options.lam * mart_regulariser(nat, adv, batch.y)


ENTRY = TrainerEntry(
    "fedmart",
    build=FedMART,
    config=FedMARTOptions,
    summary="MART on every client: boosted cross-entropy, and a divergence weighted by how unsure the model is",
    formula="min CE(f(x~), y) - log(1.0001 - max_{k != y} p~^k) + lambda KL(p || p~) (1 - p^y), "
    "x~ = argmax CE(f(x'), y)",
    modifiers=ALL_MODIFIERS,
    citation=Citation(
        "Wang et al., Improving Adversarial Robustness Requires Revisiting Misclassified Examples, ICLR 2020",
        """@inproceedings{wang2020improving,
  title     = {Improving Adversarial Robustness Requires Revisiting Misclassified Examples},
  author    = {Wang, Yisen and Zou, Difan and Yi, Jinfeng and Bailey, James and Ma, Xingjun and Gu, Quanquan},
  booktitle = {International Conference on Learning Representations},
  year      = {2020}
}""",
    ),
)
