"""FedMART: misclassification-aware adversarial training on every client (Wang et al., ICLR 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from calfat_plugin.entries import TrainerEntry, paper
from calfat_plugin.interfaces import TrainBatch
from calfat_plugin.maths.losses import true_class, wide, without_true_class
from calfat_plugin.options import option
from calfat_plugin.trainers.base import ALL_MODIFIERS, GaussianStart, start_noise_option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedMARTOptions:
    """The constants of MART."""

    lam: float = option(6.0, low=0, help="lambda, weight of the regulariser R; the authors' ResNet-18 script has 5")
    start_noise: float = start_noise_option()


class FedMART(GaussianStart):
    """BCE + lambda R, the attack climbing CE.

    A modifier changes the CE inside BCE as anywhere; every probability besides (p, p~, its largest wrong class, and
    the weight 1 - p^y) comes from one set of logits, ``margin_logits``.
    """

    options: FedMARTOptions

    def train_loss(self, batch: TrainBatch) -> Tensor:
        nat = batch.loss.margin_logits(batch.logits_nat)
        adv = batch.loss.margin_logits(batch.logits_adv)
        boosted = batch.loss.cross_entropy(batch.logits_adv, batch.y).mean() + margin(adv, batch.y)
        return boosted + self.options.lam * regulariser(nat, adv, batch.y)


def margin(logits_adv: Tensor, y: Tensor) -> Tensor:
    """mean -log(1.0001 - p~^{k*} + 1e-12), k* the most probable wrong class of p~ = softmax(logits_adv).

    Added to CE(f(x~), y) it makes MART's boosted cross-entropy (BCE). Ties go to the lowest class index.
    """
    p_adv = wide(logits_adv).softmax(dim=1)
    runner_up = without_true_class(p_adv.detach(), y).argmax(dim=1)
    # 1.0001 keeps the log finite in float32 where p = 1; the 1e-12 is below float32's resolution there.
    return (-(1.0001 - true_class(p_adv, runner_up) + 1e-12).log()).mean()


def regulariser(logits_nat: Tensor, logits_adv: Tensor, y: Tensor) -> Tensor:
    """R = mean KL(p || p~) (1.0000001 - p^y): the divergence weighs more where the clean example is unsure.

    p = softmax(logits_nat), p~ = softmax(logits_adv), with log p~ taken as log(p~ + 1e-12). Nothing is detached.
    """
    log_p = wide(logits_nat).log_softmax(dim=1)
    p, p_adv = log_p.exp(), wide(logits_adv).softmax(dim=1)
    kl = (p * (log_p - (p_adv + 1e-12).log())).sum(dim=1)
    return (kl * (1.0000001 - true_class(p, y))).mean()


ENTRY = TrainerEntry(
    "fedmart",
    build=FedMART,
    config=FedMARTOptions,
    summary="MART on every client: boosted cross-entropy, and a divergence weighted by how unsure the model is",
    formula="min CE(f(x~), y) - log(1.0001 - max_{k != y} p~^k) + lambda KL(p || p~) (1 - p^y), "
    "x~ = argmax CE(f(x'), y)",
    modifiers=ALL_MODIFIERS,
    citation=paper("wang2020improving"),
)
